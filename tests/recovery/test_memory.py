"""The arithmetic of memory against the tensors of a small run, counted."""

import pytest
import torch
from recovery_runs import make

from horst import HORST, param_groups
from horst.recovery import memory_per_gpu
from horst.recovery.adapters import attach
from horst.recovery.teacher import copy_as_teacher
from horst.sparsity import Static, find_layers


def count(*tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


def step(model, data, optimizer, sparsifier=None):
    model(data).logits.sum().backward()
    optimizer.step()
    if sparsifier is not None:
        sparsifier.step()


def averages(optimizer):
    return [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("name", ["horst", "adamw"])
def test_every_part_is_counted_exactly(name):
    model, data = make("llama")
    teacher = copy_as_teacher(model)
    if name == "horst":
        optimizer = HORST(param_groups(model), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sparsifier = Static(model, optimizer, sparsity=0.5)
    step(model, data, optimizer, sparsifier)
    parameters = sum(p.numel() for p in model.parameters())
    masked = sum(layer.param.numel() for layer in sparsifier.layers)
    memory = memory_per_gpu(parameters, masked=masked, optimizer=name, teacher_dtype="float32")
    assert memory.weights == count(*model.parameters())
    assert memory.gradients == count(*(p.grad for p in model.parameters()))
    assert memory.optimizer == count(*averages(optimizer))
    masks = [*sparsifier._pruned.values(), *(optimizer._masks.values() if name == "horst" else ())]
    assert memory.masks == count(*masks)
    assert memory.teacher == count(*teacher.parameters())
    assert memory.gathered == 0
    assert memory.total == sum(
        (memory.weights, memory.gradients, memory.optimizer, memory.masks, memory.teacher, memory.gathered)
    )


def test_adapters_are_counted_exactly():
    model, data = make("llama")
    layers = find_layers(model)
    parameters, masked = sum(p.numel() for p in model.parameters()), sum(layer.param.numel() for layer in layers)
    trained = attach(model, layers, {layer.name: layer.param != 0 for layer in layers}, 2)
    optimizer = HORST(param_groups(model), lr=1e-3)
    step(model, data, optimizer)
    memory = memory_per_gpu(parameters, masked=masked, adapters=sum(p.numel() for p in trained), parallel="ddp")
    assert memory.weights == count(*model.parameters())
    assert memory.gradients == count(*(p.grad for p in model.parameters() if p.grad is not None))
    assert memory.optimizer == count(*averages(optimizer))
    assert memory.masks == count(*(b for name, b in model.named_buffers() if name.endswith(".mask")))


def test_fsdp_divides_and_ddp_does_not():
    one, eight = (memory_per_gpu(8_000, gpus=gpus, largest_part=100) for gpus in (1, 8))
    for name in ("weights", "gradients", "optimizer", "masks", "teacher"):
        assert getattr(eight, name) * 8 == getattr(one, name)
    assert (one.gathered, eight.gathered) == (0, 1000)  # weights, gradients and teacher: 4 + 4 + 2 bytes
    assert memory_per_gpu(8_000, gpus=8, parallel="ddp") == memory_per_gpu(8_000)
    assert memory_per_gpu(8_000, teacher=0).teacher == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parameters": 0}, "parameters must be at least 1, got 0"),
        ({"parameters": 1, "gpus": 0}, "gpus must be at least 1, got 0"),
        ({"parameters": 1, "masked": -1}, "masked must be at least 0, got -1"),
        ({"parameters": 1, "parallel": "tp"}, "parallel must be one of 'ddp', 'fsdp', got 'tp'"),
        ({"parameters": 1, "teacher_dtype": "int8"}, "teacher_dtype must be one of"),
        ({"parameters": 9, "adapters": 1, "gpus": 2}, "adapters are trained with parallel='ddp'"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        memory_per_gpu(**arguments)
