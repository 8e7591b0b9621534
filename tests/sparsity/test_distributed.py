"""Two processes against one: the same masks on every rank, under DDP and FSDP2, with a restart in the middle."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_scripts import run_script
from sparse_methods import EVERY_METHOD, SAFE, TOTAL, Tiny, backward, expected_zeros, loss_of, optimizer_for

from horst.sparsity import Recorder

WORKER = Path(__file__).parent / "distributed_worker.py"


def run_single(name):
    model = Tiny()
    optimizer = optimizer_for(name, model.parameters())
    sparsifier = (EVERY_METHOD | {"safe": SAFE})[name](model, optimizer)
    recorder = Recorder(sparsifier, quantiles=(0.5,)) if name == "acdc" else None
    hashes, norms = [sparsifier.mask_hash()], []
    for step in range(TOTAL):
        optimizer.zero_grad()
        backward(sparsifier, lambda step=step: loss_of(model, step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        if sparsifier.step() or step % 8 == 7:
            hashes.append(sparsifier.mask_hash())
    records = recorder.records if recorder else []
    return {"hashes": hashes, "norms": norms, "records": records, "weights": dict(model.named_parameters())}


def strip_quantiles(record):
    """Counts agree exactly between one rank and two; magnitudes only to rounding."""
    return {name: {**layer, "quantiles": None} for name, layer in record["layers"].items()}


def launch(kind, tmp_path, world=2):
    outs = [tmp_path / f"rank{rank}.pt" for rank in range(world)]
    command = [sys.executable, str(WORKER), kind]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store"), str(outs[rank])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    logs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(logs)
    return [torch.load(out, weights_only=True) for out in outs]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp-columns"])
def test_two_ranks_train_the_run_of_one(kind, tmp_path):
    ranks = launch(kind, tmp_path)
    assert len(ranks[0]) >= 4
    for name, first in ranks[0].items():
        single = run_single(name)
        for other in ranks[1:]:
            assert other[name]["hashes"] == first["hashes"], name
        assert first["is_sharded"] == (kind != "ddp")
        # The gradients are sums in another order, so weights agree to rounding and masks exactly.
        assert first["hashes"] == single["hashes"], name
        assert [strip_quantiles(r) for r in first["records"]] == [strip_quantiles(r) for r in single["records"]]
        for key, weight in single["weights"].items():
            torch.testing.assert_close(first["weights"][key], weight.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first["norms"], single["norms"], rtol=1e-4, atol=1e-6)
        for step in range(TOTAL):
            held = sum(sum(rank[name]["counts"][step]) for rank in ranks) // (2 if kind == "ddp" else 1)
            assert held == expected_zeros(name, step + 1)


UNEVEN = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[3])
from sparse_methods import Tiny, adamw
from horst.sparsity import AtInit, Static
rank, world = int(sys.argv[1]), 5
if world > 1:
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=world)
for make in (
    lambda m, o: Static(m, o, sparsity=0.55, distribution="global"),
    lambda m, o: Static(m, o, sparsity=0.55),
    lambda m, o: Static(m, o, pattern="1:4"),
    lambda m, o: AtInit(m, o, sparsity=0.55, score="random"),
):
    model = Tiny()
    for p in model.parameters():
        p.data = (p.data * 4).round() / 4
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    print("hash", make(model, adamw(model.parameters())).mask_hash())
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


def test_uneven_and_empty_shards_full_of_ties_choose_what_one_process_chooses(tmp_path):
    """Eight rows over five ranks: 2, 2, 2, 2 and none."""
    hashes = [[line for line in log.splitlines() if "hash" in line] for log in run_script(UNEVEN, tmp_path, 5)]
    single = run_script(UNEVEN.replace("int(sys.argv[1]), 5", "0, 1"), tmp_path, 1)[0]
    assert len(hashes[0]) == 4
    assert all(rank == [line for line in single.splitlines() if "hash" in line] for rank in hashes)


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_that_differ_between_ranks_are_noticed(compiled, tmp_path):
    script = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from horst.sparsity import Static
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
if COMPILED:
    model = torch.compile(model)
masks = {"weight": torch.arange(16).view(4, 4) % 2 == rank}
try:
    Static(model, torch.optim.SGD(model.parameters()), masks=masks, layers="all_linear")
except RuntimeError as error:
    assert "masks differ between ranks" in str(error)
    print("noticed")
dist.barrier()
dist.destroy_process_group()
"""
    script = script.replace("COMPILED", str(compiled))
    assert all("noticed" in log for log in run_script(script, tmp_path, 2))


CHECKPOINTS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from pathlib import Path
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[3])
from sparse_methods import EVERY_METHOD, Tiny, adamw, train_step
from horst.parameters.sharding import part_of
rank, folder = int(sys.argv[1]), Path(sys.argv[2]).parent
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)

def build(name):
    model = Tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = adamw(model.parameters())
    return model, optimizer, EVERY_METHOD[name](model, optimizer)

for name in ("acdc", "gmp", "rigl", "acdc-values"):
    model, optimizer, sparsifier = build(name)
    for step in range(5):  # AC/DC has gone sparse, and a new one is dense
        train_step(model, [optimizer], sparsifier, step)
    state, saved = sparsifier.state_dict(), str(folder / name)
    dcp.save({"sparsifier": sparsifier}, checkpoint_id=saved)
    resumed = build(name)[2]
    try:
        dcp.load({"sparsifier": resumed}, checkpoint_id=saved)
    except ValueError as error:
        assert name == "acdc-values" and "4 tensors, and 8 were saved" in str(error), error
        if rank == 0:
            dcp_to_torch_save(saved, saved + ".pt")
        dist.barrier()
        resumed.load_state_dict(torch.load(saved + ".pt", weights_only=True)["sparsifier"])
    assert resumed.steps == 5
    assert resumed.mask_hash() == sparsifier.mask_hash(), name
    assert len(resumed.state_dict()["extra"].get("values", {})) == (4 if name == "acdc-values" else 0)

if rank == 0:
    torch.save(state, folder / "rank0.pt")
dist.barrier()
found = torch.load(folder / "rank0.pt", weights_only=False)["pruned"]["blocks.0.fc1.weight"]
try:
    part_of(model.blocks[0].fc1.weight, found)
    assert rank == 0
except ValueError as error:
    assert rank == 1 and "the part of another rank, at [0] of the mesh and not at [1]" in str(error), error
dist.barrier()
dist.destroy_process_group()
"""


def test_distributed_checkpoints_and_states_of_another_rank(tmp_path):
    run_script(CHECKPOINTS, tmp_path, 2)
