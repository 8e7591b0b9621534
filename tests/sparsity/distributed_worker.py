"""One rank of a DDP or FSDP2 run on a CPU, for test_distributed.py: trains every method and saves what came out.

    python distributed_worker.py KIND RANK WORLD STORE OUT

KIND is "ddp", "fsdp" or "fsdp-columns" (sharded along the input dimension).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from sparse_methods import EVERY_METHOD, SAFE, TOTAL, Tiny, backward, batch, optimizer_for

from horst.sparsity import Recorder

METHODS = EVERY_METHOD | {"safe": SAFE}
COLUMNS = ("acdc", "gmp", "rigl", "sparse_opt", "set", "elsa", "cast")
RESTART_AT = 15


def local_loss(model: torch.nn.Module, step: int, rank: int, world: int) -> torch.Tensor:
    """The mean over this rank's share of the batch: averaged over ranks it is the loss of the whole batch."""
    x = batch(step).chunk(world)[rank]
    return (model(x) - x[:, :4].sin()).square().mean()


def build(kind: str, name: str, rank: int, world: int) -> tuple:
    model: torch.nn.Module = Tiny()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        placement = (lambda p: Shard(1) if p.dim() == 2 else Shard(0)) if kind == "fsdp-columns" else None
        mesh = init_device_mesh("cpu", (world,))  # else a machine with a GPU shards over that
        for block in model.blocks:
            fully_shard(block, mesh=mesh, shard_placement_fn=placement)
        fully_shard(model, mesh=mesh, shard_placement_fn=placement)
    optimizer = optimizer_for(name, model.parameters())
    options = {"loss": lambda m: local_loss(m, 0, rank, world)} if name == "snip" else {}
    return model, optimizer, METHODS[name](model, optimizer, **options)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(kind: str, name: str, rank: int, world: int) -> dict:
    model, optimizer, sparsifier = build(kind, name, rank, world)
    recorder = Recorder(sparsifier, quantiles=(0.5,)) if name == "acdc" else None  # one method is enough, and quicker
    hashes, norms, counts = [sparsifier.mask_hash()], [], []
    for step in range(TOTAL):
        if step == RESTART_AT:  # resume from what each rank saved
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
            state, saved = optimizer.state_dict(), sparsifier.state_dict()
            sparsifier.close()
            model, optimizer, sparsifier = build(kind, name, rank, world)
            if recorder is not None:
                recorder = Recorder(sparsifier, quantiles=(0.5,))  # filled by the sparsifier's state
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(weights[n])
            optimizer.load_state_dict(state)
            sparsifier.load_state_dict(saved)
        optimizer.zero_grad()
        backward(sparsifier, lambda model=model, step=step: local_loss(model, step, rank, world))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norms.append(float(full(norm)))
        optimizer.step()
        if sparsifier.step() or step % 8 == 7:
            hashes.append(sparsifier.mask_hash())
        pruned = [int((~mask).sum()) for mask in sparsifier.masks.values()]
        counts.append(pruned)
        for layer in sparsifier.layers:
            held = layer.param.to_local() if isinstance(layer.param, DTensor) else layer.param
            assert not held[~sparsifier.masks[layer.name]].any()
    return {
        "hashes": hashes,
        "norms": norms,
        "counts": counts,
        "sparsity": sparsifier.current_sparsity,
        "records": recorder.records if recorder else [],
        "weights": {n.removeprefix("module."): full(p.detach()).clone() for n, p in model.named_parameters()},
        "is_sharded": sparsifier.is_sharded,
    }


def main() -> None:
    kind, rank, world, store, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results = {}
    for name in METHODS:
        if kind == "fsdp-columns" and name not in COLUMNS:
            continue
        results[name] = run(kind, name, rank, world)
    torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, even of a script without horst


if __name__ == "__main__":
    main()
