"""Adapters that leave zeros alone: the formula, the merge, and a run with them."""

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from recovery_runs import SHORT, make, score, weights
from torch import nn
from torch.nn.utils import parametrize

import horst
from horst.recovery.adapters import SCALE, MaskedAdapter, attach, merge
from horst.sparsity import find_layers


@given(seed=st.integers(0, 1000), rank=st.integers(1, 3), stacked=st.booleans())
def test_an_adapter_is_the_formula(seed, rank, stacked):
    torch.manual_seed(seed)
    W = torch.randn(2, 4, 3) if stacked else torch.randn(4, 3)
    M = torch.rand(W.shape) < 0.5
    adapter = MaskedAdapter(W, M, rank, stacked=stacked)
    torch.testing.assert_close(adapter(W), W, rtol=0, atol=0)  # B is zero at first
    nn.init.normal_(adapter.B)
    expected = W.double() + M * SCALE * torch.einsum("...or,...ri->...oi", adapter.B.double(), adapter.A.double())
    torch.testing.assert_close(adapter(W).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
def test_what_is_merged_is_what_was_trained_and_zeros_stay(name):
    model, data = make(name)
    inputs = data[0] if isinstance(data, tuple) else data
    horst.pruning.prune(model, 0.5)
    masks = {layer.name: layer.param.detach() != 0 for layer in find_layers(model)}
    names = [name for name, _ in model.named_parameters()]
    trained = attach(model, find_layers(model), masks, rank=2)
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained}
    for p in trained:
        nn.init.normal_(p)
    with torch.no_grad():
        expected = model(inputs)
        merged_masks = merge(model)
        found = model(inputs)
    torch.testing.assert_close(*(getattr(x, "logits", x) for x in (expected, found)), rtol=0, atol=0)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert [name for name, _ in model.named_parameters()] == names
    assert merged_masks.keys() == masks.keys()
    for layer in find_layers(model, frozen=True):
        assert torch.equal(layer.param != 0, masks[layer.name])


def test_a_mixture_of_experts_has_an_update_per_expert(mixture):
    layers = find_layers(mixture)
    stack = next(layer for layer in layers if layer.experts)
    masks = {layer.name: torch.ones_like(layer.param, dtype=torch.bool) for layer in layers}
    attach(mixture, layers, masks, rank=2)
    adapters = {n: m for n, m in mixture.named_modules() if isinstance(m, MaskedAdapter)}
    assert len(adapters) == len(layers)
    assert any(adapter.A.shape[:2] == (stack.experts, 2) for adapter in adapters.values())
    merge(mixture)


def test_only_pruned_layers_change_and_the_model_recovers():
    model, data = make("llama")
    dense = copy.deepcopy(model)
    report = horst.sparsify(model, data, sparsity=0.5, lora=4, evaluate=score, **{**SHORT, "steps": 40, "lr": 1e-2})
    pruned = {layer.name for layer in report.layers.layers}
    for name, value in weights(model).items():
        assert torch.equal(value, weights(dense)[name]) == (name not in pruned), name
    assert report.after["loss"] < report.stages[0].pruned["loss"]
    assert report.sparsity == 0.5
    assert all(p.requires_grad for p in model.parameters())


def test_tied_weights_are_refused_before_anything_is_pruned():
    model, data = make("gpt2")
    before = weights(model)
    settings = {**SHORT, "sparsity": 0.5, "lora": 2, "layers": "all_linear"}
    with pytest.raises(ValueError, match=r"lora=2 cannot train transformer\.wte\.weight, which several modules share"):
        horst.sparsify(model, data, **settings)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    assert horst.sparsify(model, data, exclude=["transformer.wte.weight"], **settings).sparsity == 0.5


def test_an_error_takes_the_adapters_away(monkeypatch):
    model, data = make("plain")
    monkeypatch.setattr("horst.recovery.distillation._CHUNK", None)  # any error while training
    names = list(weights(model))
    with pytest.raises(TypeError):
        horst.sparsify(model, data, sparsity=0.5, lora=2, **SHORT)
    assert list(weights(model)) == names
