"""DDP, FSDP2, tensor parallelism and distributed checkpoints, with gloo processes on a CPU against one process."""

import copy
import os
import pathlib
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from horst import HAM, HORST, with_mirror_step
from horst.optimizers.l1 import soft_threshold
from horst.sparsity import Static

MAKE = {
    "horst": lambda p: HORST(p, lr=1e-2, weight_decay=0.1, beta=0.2),
    "horst_foreach": lambda p: HORST(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "horst_fused": lambda p: HORST(p, lr=1e-2, fused=True),
    "horst_auto": lambda p: HORST(p, lr=1e-2, alpha="auto"),
    "horst_l1": lambda p: HORST(p, lr=1e-2, l1=0.5),
    "ham": lambda p: HAM(p, lr=1e-2, alpha=20.0),
    "adamw_soft_threshold": lambda p: _soft_thresholded(torch.optim.AdamW([{"params": p, "l1": 0.5}], lr=1e-2)),
    "adamw_with_mirror_step": lambda p: with_mirror_step(torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
}


def _soft_thresholded(optimizer):
    soft_threshold(optimizer)
    return optimizer


if torch.cuda.is_available():  # these run on CPU tensors, where the kernel needs Triton's interpreter
    del MAKE["horst_fused"]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))  # 7, 3 and 1 rows: uneven shards


def train(model, optimizer, steps, first=0):
    for k in range(first, first + steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t.detach()


def sharded_training_equals_single(rank, folder):
    mesh = init_device_mesh("cpu", (2,))  # by default it would be the GPU's, where there is one
    for name, make in MAKE.items():
        single = make_model()
        alone = make(single.parameters())
        train(single, alone, 4)
        model = make_model()
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters())
        if name == "horst_auto":  # from the size of whole weights, not of this rank's shards
            for option in ("alpha", "max_step"):
                assert optimizer.param_groups[0][option] == pytest.approx(alone.param_groups[0][option])
        train(model, optimizer, 4)
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            state = optimizer.state[p]
            assert isinstance(state["exp_avg"], DTensor), name
        zeros = sum(int((full(p) == 0).sum()) for p in model.parameters())
        assert (zeros > 0) == ("l1" in optimizer.param_groups[0] and optimizer.param_groups[0]["l1"] > 0), name


def checkpoint_continues_exactly(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    for name in MAKE:
        path = pathlib.Path(folder) / name

        def sharded(name=name):
            model = make_model()
            fully_shard(model, mesh=mesh)
            return model, MAKE[name](model.parameters())

        model, optimizer = sharded()
        train(model, optimizer, 3)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        train(model, optimizer, 2, first=3)

        other, resumed = sharded()
        train(other, resumed, 1, first=50)  # somewhere else
        weights, state = get_state_dict(other, resumed)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
        train(other, resumed, 2, first=3)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(full(p), full(q)), name


def replicas_stay_equal_under_stochastic_rounding(rank, folder):
    torch.manual_seed(rank)  # what a generator would draw from differs between ranks
    p = nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
    optimizer = HORST([p], lr=1e-3, stochastic_rounding=True)
    for k in range(20):
        p.grad = torch.randn(500, generator=torch.Generator().manual_seed(k)).bfloat16()
        optimizer.step()
    other = [torch.empty_like(p) for _ in range(2)]
    dist.all_gather(other, p.detach())
    assert torch.equal(other[0], other[1])
    assert p.unique().numel() > 2


def partial_gradients_are_reduced(rank, folder):
    """Tensor parallelism may hand over a gradient that is placed unlike its parameter."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight, grad = torch.randn(5, 4), torch.randn(5, 4)
    p = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    p.grad = distribute_tensor(grad, mesh, [Shard(1)]).redistribute(mesh, [Shard(0)])
    q = nn.Parameter(weight.clone())
    q.grad = grad.clone()
    for param in (p, q):
        HORST([param], lr=1e-2).step()
    torch.testing.assert_close(full(p), q.detach())


def load(path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def the_same_checkpoint_loads_twice(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    for name, make in {**MAKE, "adamw": torch.optim.AdamW}.items():
        path = pathlib.Path(folder) / name
        model = make_model()
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
        ends = []
        for _ in range(2):
            load(path, model, optimizer)
            train(model, optimizer, 2, first=2)
            ends.append([full(p).clone() for p in model.parameters()])
        assert all(map(torch.equal, *ends)), name


def wrapped(kind):
    model = make_model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, MAKE["horst"](model.parameters())


def begin(kind, path):
    model, optimizer = wrapped(kind)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def resume_equals_single(kind, path):
    single = make_model()
    train(single, MAKE["horst"](single.parameters()), 5)
    model, optimizer = wrapped(kind)
    load(path, model, optimizer)
    train(model, optimizer, 2, first=3)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6)


def runs_of_two_ranks(rank, folder):
    for kind in ("fsdp", "ddp"):
        begin(kind, f"{folder}/{kind}-2")
        resume_equals_single(kind, f"{folder}/one")
    resume_equals_single("fsdp", f"{folder}/fsdp-2")


def three_ranks_resume_two(rank, folder):
    resume_equals_single("fsdp", f"{folder}/fsdp-2")


def two_dimensional_meshes_train_and_refuse_masks(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    single = nn.Sequential(make_model()[0], nn.Linear(7, 8, bias=False))
    model = copy.deepcopy(single)
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=mesh["data"])
    assert model[1].weight.device_mesh.ndim == 2
    for net in (single, model):
        train(net, MAKE["horst"](net.parameters()), 4)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(p), q.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match=r"1\.weight cannot be masked: .* sharded along one mesh dimension"):
        Static(model, MAKE["horst"](model.parameters()), sparsity=0.5, layers="all_linear")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def spawn(name, folder, world):
    mp.spawn(worker, args=(free_port(), str(folder), [name], world), nprocs=world)


def worker(rank, port, folder, names, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for name in names:
        globals()[name](rank, folder)
    dist.barrier()  # on a busy machine a rank that leaves while the other is still talking aborts it
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then


@pytest.mark.parametrize(
    "name",
    [
        "sharded_training_equals_single",
        "checkpoint_continues_exactly",
        "replicas_stay_equal_under_stochastic_rounding",
        "partial_gradients_are_reduced",
        "the_same_checkpoint_loads_twice",
    ],
)
def test_on_two_processes(name, tmp_path):
    spawn(name, tmp_path, 2)


def test_two_dimensional_meshes_train_and_refuse_masks(tmp_path):
    spawn("two_dimensional_meshes_train_and_refuse_masks", tmp_path, 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_a_checkpoint_resumes_on_another_number_of_ranks(tmp_path):
    """FSDP2 on 2 to 1, 2 and 3, 1 to 2; DDP on 2 to 1 and 1 to 2."""
    begin("one", tmp_path / "one")
    spawn("runs_of_two_ranks", tmp_path, 2)
    spawn("three_ranks_resume_two", tmp_path, 3)
    for kind in ("fsdp", "ddp"):
        resume_equals_single("one", tmp_path / f"{kind}-2")


def test_state_dict_of_a_sharded_run_has_adamws_keys():
    model = make_model()
    optimizer = MAKE["horst"](model.parameters())
    train(model, optimizer, 1)
    assert set(copy.deepcopy(optimizer.state_dict())["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
