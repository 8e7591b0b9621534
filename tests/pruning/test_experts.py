"""Mixture models: every expert is pruned as the matrix it is, on the tokens that were routed to it."""

import copy
import logging
import math
import re

import pytest
import torch
from small_models import padded, tokens
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from horst.pruning import InputNorms, Magnitude, SparseGPT, Wanda, calibrate, prune, sweep
from horst.sparsity import find_layers
from horst.sparsity.masks import Block

METHODS = ["magnitude", "wanda", "sparsegpt"]


def experts_of(model):
    return [matrix for layer in find_layers(model) if layer.experts for matrix in layer.matrices()]


class ExpertProducts(TorchFunctionMode):
    """Notes the left side of every product with one matrix of a stack: what the model itself multiplies."""

    def __init__(self, matrices):
        super().__init__()
        self.names = {matrix.param[matrix.expert].data_ptr(): matrix.name for matrix in matrices}
        self.inputs = {matrix.name: [] for matrix in matrices}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("linear", "matmul", "__matmul__") and args[1].data_ptr() in self.names:
            self.inputs[self.names[args[1].data_ptr()]].append(args[0].clone())
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def routed_inputs(model, batches):
    """The reference: all inputs of each expert's matrices, by the model's own loop over its experts."""
    products = ExpertProducts(experts_of(model))
    before, model.config._experts_implementation = model.config._experts_implementation, "eager"
    for batch in batches:
        with products:
            model(batch)
    model.config._experts_implementation = before
    return {name: torch.cat(found) for name, found in products.inputs.items()}


@pytest.mark.parametrize("method", METHODS)
def test_every_expert_loses_exactly_its_share(mixture, method):
    report = prune(mixture, 0.5, method=method, data=tokens())
    for matrix in experts_of(mixture):
        assert int((matrix.inputs_last == 0).sum()) == matrix.inputs_last.numel() // 2
    weights = {n: p for n, p in mixture.named_parameters() if ".layers." in n and p.dim() > 1 and "bias" not in n}
    dense = {n for n, p in weights.items() if p.all()}
    assert dense == set(report.left_dense) == {n for n in weights if n.endswith((".gate.weight", ".router.weight"))}
    zeros = sum(int((p == 0).sum()) for p in weights.values())
    assert zeros == report.zeros
    assert zeros / sum(p.numel() for p in weights.values()) > 0.48


@pytest.mark.parametrize("method", [Wanda(), SparseGPT()])
def test_an_expert_is_pruned_as_a_plain_matrix_on_its_routed_inputs(mixture, method):
    model, batches = mixture.double(), tokens(batches=4, size=4)
    model.config._experts_implementation = "batched_mm"  # torch has no grouped product in float64
    reference, inputs = copy.deepcopy(model), routed_inputs(model, batches)
    prune(model, 0.5, method=method, data=batches, sequential=False)
    for matrix, dense in zip(experts_of(model), experts_of(reference), strict=True):
        W, X = dense.inputs_last.clone(), inputs[dense.name]
        statistic = method.statistic(W.shape[1])
        statistic.add(X)
        method.prune(W, method.prepare(W, statistic, dense.name), Block(), W.numel() // 2)
        assert torch.equal(matrix.inputs_last == 0, W == 0), dense.name
        assert_close(matrix.inputs_last, W, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_two_of_four_along_the_inputs_of_each_expert(mixture, method):
    prune(mixture, pattern="2:4", method=method, data=tokens())
    is_in_by_out = type(mixture).__name__.startswith("GptOss")
    for layer in mixture.model.layers:
        for stack, inputs in ((layer.mlp.experts.gate_up_proj, 16), (layer.mlp.experts.down_proj, None)):
            along_inputs = stack.transpose(1, 2) if is_in_by_out else stack
            assert inputs in (None, along_inputs.shape[2])
            assert bool(((along_inputs.reshape(-1, 4) != 0).sum(dim=1) == 2).all())


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("mixture", ["gpt_oss"], indirect=True)
def test_an_expert_without_tokens_is_pruned_by_magnitude_and_named(mixture, method, caplog):
    with torch.no_grad():
        mixture.model.layers[1].mlp.router.bias[2] = -1e4
    dense = copy.deepcopy(mixture)
    report = prune(mixture, 0.5, method=method, data=tokens())
    told = [r.getMessage() for r in caplog.records if "no calibration token" in r.getMessage()]
    assert [text.split(":")[0] for text in told] == [
        "model.layers.1.mlp.experts.gate_up_proj.2",
        "model.layers.1.mlp.experts.down_proj.2",
    ]
    for name in ("gate_up_proj", "down_proj"):
        W = getattr(dense.model.layers[1].mlp.experts, name).detach()[2]
        Magnitude().prune(W, {}, Block(), W.numel() // 2)
        assert torch.equal(getattr(mixture.model.layers[1].mlp.experts, name)[2], W)
    assert report.sparsity_of_pruned_layers == 0.5
    prune(dense, 0.5, method="wanda", data=tokens(), distribution="global")  # no expert goes whole
    assert all(bool(matrix.inputs_last.any()) for matrix in experts_of(dense))


def test_padded_tokens_do_not_count_and_every_other_counts_for_each_of_its_experts(mixture):
    batches, rows = padded(), {}

    def visit(layers, statistics):
        rows.update({layer.name: statistics[layer.name].rows for layer in layers})

    calibrate(mixture, batches, experts_of(mixture), statistic=InputNorms, visit=visit, sequential=False)
    for layer in (0, 1):
        for stack in ("gate_up_proj", "down_proj"):
            found = [rows[f"model.layers.{layer}.mlp.experts.{stack}.{i}"] for i in range(4)]
            assert sum(found) == 2 * sum(int(batch["attention_mask"].sum()) for batch in batches)


def test_distributions_divide_among_experts(mixture):
    data = tokens()
    for distribution in ("erk", "global", "owl"):
        report = prune(copy.deepcopy(mixture), 0.5, method="wanda", data=data, distribution=distribution)
        assert abs(report.sparsity_of_pruned_layers - 0.5) < 0.03
    prune(
        mixture, distribution={"*.experts.down_proj": 0.75, "model.layers.0.mlp.experts.gate_up_proj.1": 0.25, "*": 0}
    )
    for matrix in experts_of(mixture):
        is_second = matrix.name == "model.layers.0.mlp.experts.gate_up_proj.1"
        share = 0.75 if "down_proj" in matrix.name else 0.25 if is_second else 0.0
        assert int((matrix.inputs_last == 0).sum()) == share * matrix.inputs_last.numel()


@pytest.mark.parametrize("sequential", [True, False])
def test_a_sweep_prunes_experts_and_restores_them(mixture, sequential):
    data, dense = tokens(), copy.deepcopy(mixture)
    zeros = lambda model: {"zeros": sum(int((m.inputs_last == 0).sum()) for m in experts_of(model))}  # noqa: E731
    rows = sweep(mixture, [0.25, 0.5], evaluate=zeros, method="sparsegpt", data=data, sequential=sequential)
    weights = sum(matrix.inputs_last.numel() for matrix in experts_of(mixture))
    assert [row["zeros"] for row in rows] == [0, weights // 4, weights // 2]
    assert all(torch.equal(a, b) for a, b in zip(mixture.parameters(), dense.parameters(), strict=True))


def test_what_is_left_dense_in_the_blocks_is_told_and_reported(mixture, caplog):
    report = prune(mixture, 0.5)
    told = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(told) == 1
    assert told[0].getMessage().startswith("2 weights of two or more dimensions inside the blocks (128 parameters)")
    for name, count in report.left_dense.items():
        assert name in told[0].getMessage()
        assert f"left dense in the blocks: {name} ({count} weights)" in report.summary()
    caplog.clear()
    report = prune(mixture, 0.5, exclude=["*.gate.weight" if "model.layers.0.mlp.gate.weight" in report.left_dense else
                                          "*.router.weight"])  # fmt: skip
    assert not caplog.records
    assert not report.left_dense


def test_llama_4_gives_its_experts_a_copy_of_the_tokens_each():
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, intermediate_size_mlp=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=1, pad_token_id=0,
    )  # fmt: skip
    model = transformers.Llama4ForCausalLM(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    rows = {}

    def visit(layers, statistics):
        rows.update({layer.name: statistics[layer.name].rows for layer in layers})

    calibrate(model, tokens(), experts_of(model), statistic=InputNorms, visit=visit, sequential=False)
    assert sum(n for name, n in rows.items() if ".0.feed_forward.experts.down_proj" in name) == 3 * 2 * 8
    report = prune(model, pattern="2:4", method="wanda", data=tokens())
    assert report.sparsity_of_pruned_layers == 0.5
    for layer in model.model.layers:
        down = layer.feed_forward.experts.down_proj  # experts x in x out
        assert bool(((down.transpose(1, 2).reshape(-1, 4) != 0).sum(dim=1) == 2).all())


def test_weights_that_are_not_finite_name_the_stack_once(mixture):
    stack = next(layer for layer in find_layers(mixture) if layer.experts)
    stack.param.data[1, 0, 0] = math.nan
    with pytest.warns(UserWarning, match=rf"NaN or infinite weights in {re.escape(stack.name)}: they count"):
        prune(mixture, 0.5)
