"""States of a sharded model (FSDP2, on one rank) and of a plain one are good for each other, for every method."""

import copy

import pytest
import torch
import torch.distributed as dist
from sparse_methods import EVERY_METHOD, TOTAL, Tiny, differences, loss_of, optimizer_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from horst.parameters.sharding import part_of
from horst.sparsity import Recorder


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


# Those that remember more than their masks always, the others with the slow tests.
QUICK = ("acdc", "acdc-values", "rigl", "imp", "srste", "ast", "admm", "elsa", "cast")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVERY_METHOD]


def build(name, mesh=None):
    model = Tiny()
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(name, model.parameters())
    sparsifier = EVERY_METHOD[name](model, optimizer)
    Recorder(sparsifier, quantiles=())  # its state is part of the sparsifier's
    return model, optimizer, sparsifier


def train(model, optimizer, sparsifier, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        sparsifier.step()
        if step in (5, 14):
            sparsifier.record(float(step))


def whole(value):
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [whole(entry) for entry in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def tensors(value):
    if isinstance(value, dict):
        return [t for entry in value.values() for t in tensors(entry)]
    if isinstance(value, list):
        return [t for entry in value for t in tensors(entry)]
    return [value] if isinstance(value, torch.Tensor) else []


@torch.no_grad()
def copy_state(source, target):
    """Weights and optimizer state of one run into another, whichever of them is sharded."""
    for p, q in zip(source[0].parameters(), target[0].parameters(), strict=True):
        (q.to_local() if isinstance(q, DTensor) else q).copy_(whole(p))
        state = {k: whole(v) for k, v in source[1].state[p].items()}
        for key, value in state.items():
            is_part = isinstance(q, DTensor) and value.shape == q.shape
            part = DTensor.from_local(value, q.device_mesh, q.placements) if is_part else value
            target[1].state[q][key] = copy.deepcopy(part)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to_sharded", [False, True])
def test_a_state_goes_from_sharded_to_plain_and_back(name, to_sharded, mesh):
    source, target = (build(name, mesh if sharded else None) for sharded in (not to_sharded, to_sharded))
    assert source[2].is_sharded != target[2].is_sharded
    train(*source, range(15))
    copy_state(source, target)
    state = source[2].state_dict()
    if not to_sharded:  # what is shaped like a weight is sharded like it, so that a checkpoint can cut it anew
        shaped_like_weights = [t for part in ("pruned", "best", "observers") for t in tensors(state[part])]
        assert all(isinstance(t, DTensor) for t in shaped_like_weights)
    target[2].load_state_dict(copy.deepcopy(whole(state)))  # as a checkpoint gives it to one rank
    target[2].load_state_dict(copy.deepcopy(state) if to_sharded else state)  # as it is
    assert target[2].mask_hash() == source[2].mask_hash()
    for run in (source, target):
        train(*run, range(15, TOTAL))
    assert target[2].mask_hash() == source[2].mask_hash()
    for p, q in zip(source[0].parameters(), target[0].parameters(), strict=True):
        torch.testing.assert_close(whole(p), whole(q), rtol=1e-5, atol=1e-6)
    assert target[2].observers[0].records == source[2].observers[0].records
    a, b = (run[2].best for run in (source, target))
    assert a.keys() == b.keys()
    assert differences({k: v.weights for k, v in a.items()}, {k: v.weights for k, v in b.items()}) == []


def test_a_part_as_cut_for_another_number_of_ranks_is_refused(mesh):
    other = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)], run_check=False, shape=(2, 3), stride=(3, 1))
    with pytest.raises(ValueError, match=r"cut as on another number of ranks: this rank's part is \(1, 3\) there"):
        part_of(torch.zeros(2, 3), other)
