"""On a GPU: a teacher in bfloat16, compiled, in bfloat16; bit for bit when resumed with deterministic algorithms."""

import pytest
import torch
from recovery_runs import MODELS, SHORT, equal, make, weights

import horst
from horst.recovery.teacher import copy_as_teacher
from horst.sparsity import find_layers
from horst.training import LoopConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_every_kind_of_model_becomes_sparse(name, compiled):
    model, data = make(name)
    before = weights(model)
    loop = LoopConfig(clip_norm=1.0, compile=compiled)
    report = horst.sparsify(model.cuda(), data, sparsity=0.5, **{**SHORT, "loop": loop})
    assert report.sparsity == 0.5
    for layer in find_layers(model):
        assert int((layer.param == 0).sum()) == layer.param.numel() // 2
    # Pruning leaves vectors as they are: where none has moved, the compiled loss gave no gradients.
    vectors = {name: value.cpu() for name, value in weights(model).items() if value.dim() == 1}
    assert any(not torch.equal(before[name], value) for name, value in vectors.items())


def test_the_teacher_is_kept_in_bfloat16_and_its_buffers_are_not():
    model, _ = make("llama")
    buffers = {name: b.dtype for name, b in model.named_buffers()}
    teacher = copy_as_teacher(model.cuda())
    assert {p.dtype for p in teacher.parameters()} == {torch.bfloat16}
    assert {name: b.dtype for name, b in teacher.named_buffers()} == buffers


def test_two_runs_are_equal_bit_for_bit(tmp_path):
    loop = LoopConfig(clip_norm=1.0, compile="off", deterministic=True)
    found = []
    for _ in range(2):
        model, data = make("llama")
        horst.sparsify(model.cuda(), data, sparsity=0.75, stages=(0.5,), **{**SHORT, "loop": loop})
        found.append(weights(model))
    assert equal(*found)
