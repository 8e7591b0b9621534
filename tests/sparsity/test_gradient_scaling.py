"""SparseOpt's scaling: the formula, the layouts of a weight, whose gradients are scaled, what Adam leaves of it."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_methods import DROP_GROW, TOTAL, Tiny, batch, loss_of, train_step
from torch import nn

from horst import HORST
from horst.parameters.sharding import Shard
from horst.sparsity import AtInit, RigL, Static
from horst.sparsity.gradient_scaling import row_factors
from horst.sparsity.layers import Layer


def by_the_formula(mask):
    """sqrt(1 - s_i) / sqrt(1 - mean of s) of each row of a matrix."""
    s = [1 - sum(row) / len(row) for row in mask.tolist()]
    mean = sum(s) / len(s)
    return torch.tensor([math.sqrt(1 - one) / math.sqrt(1 - mean) for one in s], dtype=torch.float64)


def factors(mask, input_dim=1, experts=0):
    layer = Layer("w", nn.Parameter(torch.zeros(mask.shape, dtype=torch.float64)), input_dim, experts)
    return row_factors(mask, layer, Shard.of(layer.param))


def masks(seed, *shape, sparsity=0.7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > sparsity


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 7), columns=st.integers(1, 9))
def test_factors_are_the_formula_and_their_squares_average_to_one(seed, rows, columns):
    mask = masks(seed, rows, columns, sparsity=0.5)
    mask[0, 0] = True  # the formula divides by the layer's density
    found = factors(mask)
    assert found.shape == (rows, 1)
    torch.testing.assert_close(found.flatten(), by_the_formula(mask), rtol=1e-12, atol=0)
    assert float(found.square().mean()) == pytest.approx(1.0, rel=1e-12)


def test_a_row_or_a_layer_that_keeps_nothing_has_factor_zero():
    mask = torch.tensor([[True, True], [False, False]])
    assert factors(mask).flatten().tolist() == [math.sqrt(2), 0.0]
    assert factors(torch.zeros(2, 2, dtype=torch.bool)).flatten().tolist() == [0.0, 0.0]


def test_a_neuron_is_an_output_in_every_layout():
    mask = masks(1, 5, 6)
    one = by_the_formula(mask)
    assert torch.equal(factors(mask.T, input_dim=0), factors(mask).T)  # Hugging Face's Conv1D
    convolution = masks(2, 4, 3, 2, 2)
    torch.testing.assert_close(factors(convolution).flatten(), by_the_formula(convolution.flatten(1)))
    stack = torch.stack([mask, masks(3, 5, 6)])  # each expert by itself
    found = factors(stack, input_dim=2, experts=2)
    torch.testing.assert_close(found.squeeze(-1), torch.stack([one, by_the_formula(stack[1])]))
    found = factors(stack.transpose(1, 2), input_dim=1, experts=2)
    torch.testing.assert_close(found.squeeze(1), torch.stack([one, by_the_formula(stack[1])]))


def test_momentum_is_that_of_scaled_gradients_and_p_grad_is_put_back_to_the_bit():
    mask = masks(0, 4, 6)
    model = nn.Linear(6, 4).double()
    w, b = model.weight.detach().clone() * mask, model.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sparsifier = Static(model, optimizer, masks={"weight": mask}, layers="all_linear", scale_gradients=True)
    f, momentum, bias_momentum = by_the_formula(mask).unsqueeze(1), 0, 0
    for step in range(5):
        x = batch(step).double()
        optimizer.zero_grad()
        model(x).sin().sum().backward()
        shown = [p.grad for p in model.parameters()]
        before = [grad.clone() for grad in shown]
        out = torch.cos(x @ w.T + b)
        momentum = 0.9 * momentum + f * (out.T @ x) * mask
        bias_momentum = 0.9 * bias_momentum + out.sum(0)
        w, b = w - 0.1 * momentum, b - 0.1 * bias_momentum
        optimizer.step()
        sparsifier.step()
        for p, grad, old in zip(model.parameters(), shown, before, strict=True):
            assert p.grad is grad
            assert torch.equal(grad, old)
    torch.testing.assert_close(model.weight.detach(), w, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.bias.detach(), b, rtol=1e-12, atol=1e-14)


ADAMS = {
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, **k),
    "horst": lambda p, **k: HORST(p, lr=0.02, weight_decay=0.1, alpha=5.0, **k),
}


def trained(make_optimizer, make_sparsifier, scaled):
    model = Tiny().double()
    optimizer = make_optimizer(model.parameters())
    sparsifier = make_sparsifier(model, optimizer, scale_gradients=scaled)
    for step in range(TOTAL):
        optimizer.zero_grad()
        x = batch(step).double()
        (model(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def random_mask(model, optimizer, **options):
    return AtInit(model, optimizer, sparsity=0.7, score="random", **options)


@pytest.mark.parametrize("name", ADAMS)
def test_under_adam_a_fixed_mask_leaves_nothing_of_the_scaling_but_eps(name):
    def difference(**options):
        plain, scaled = (trained(lambda p: ADAMS[name](p, **options), random_mask, on) for on in (False, True))
        return float((plain - scaled).abs().max())

    assert difference(eps=1e-30) < 1e-9
    assert 1e-12 < difference(eps=1e-8) < 1e-4
    assert difference(eps=1e-2) > 1e-3


def test_under_sgd_the_scaling_matters():
    sgd = lambda p: torch.optim.SGD(p, lr=0.05)  # noqa: E731
    plain, scaled = (trained(sgd, random_mask, on) for on in (False, True))
    assert float((plain - scaled).abs().max()) > 1e-3


def test_under_adam_rigl_leaves_the_steps_after_an_exchange():
    def rigl(model, optimizer, **options):
        return RigL(model, optimizer, sparsity=0.8, schedule=DROP_GROW, **options)

    make = lambda p: ADAMS["adamw"](p, eps=1e-30)  # noqa: E731
    plain, scaled = (trained(make, rigl, on) for on in (False, True))
    assert float((plain - scaled).abs().max()) > 1e-4


def test_weights_grow_by_the_true_gradient():
    hashes = {}
    for scaled in (False, True):
        model = Tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights are the same in both
        sparsifier = RigL(model, optimizer, sparsity=0.8, schedule=DROP_GROW, scale_gradients=scaled)
        found = []
        for step in range(TOTAL):
            if scaled and step == 4:  # what would grow by the scaled gradient is something else
                twin = copy.deepcopy(model)
                loss_of(twin, step).backward()
                others = 0
                for layer in sparsifier.layers:
                    grad = twin.get_parameter(layer.name).grad
                    each = [
                        sparsifier._chooser.exchange(
                            layer.name, sparsifier._pruned[layer.name], layer.param.detach(), g, 0.46
                        )
                        for g in (grad, grad * sparsifier._row_factors[layer.name])
                    ]
                    others += int((each[0] != each[1]).sum())
                assert others > 0
            train_step(model, [optimizer], sparsifier, step)
            found.append(sparsifier.mask_hash())
        hashes[scaled] = found
    assert hashes[True] == hashes[False]
    assert len(set(hashes[True])) > 3
