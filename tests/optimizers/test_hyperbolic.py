"""HyperbolicAdam: the exact dual step of the hyperbolic entropy along Adam's direction."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from horst.operators import Adam, HyperbolicEntropy, Mirror
from horst.optimizers.composed import Composed
from horst.optimizers.hyperbolic import HyperbolicAdam, hyperbolic_step

number = st.floats(1e-6, 1e3) | st.floats(-1e3, -1e-6) | st.just(0.0)


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in [(4, 3), (5,), ()]]


def train(params, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        sum((p - 0.25 + 0.1 * step).pow(2).sum() for p in params).backward()
        optimizer.step()


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@given(theta=number, u=st.floats(-0.5, 0.5), alpha=st.floats(1e-2, 20.0))
def test_the_step_is_the_dual_step_of_the_hyperbolic_entropy(theta, u, alpha):
    gamma = 1 / alpha
    expected = gamma * math.sinh(math.asinh(theta / gamma) - alpha * u)
    # the reference itself loses what arcsinh and sinh round off: relative to the weight, not to the result
    assert_close(
        hyperbolic_step(float64(theta), float64(u), alpha), float64(expected), rtol=1e-10, atol=1e-10 * abs(theta)
    )


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_the_optimizer_equals_the_operator(alpha):
    ours, theirs = parameters(), parameters()
    train(ours, HyperbolicAdam(ours, lr=0.02, alpha=alpha, weight_decay=0.0), 20)
    operator = Mirror(HyperbolicEntropy(1 / alpha)) @ Adam()
    train(theirs, Composed(theirs, operator, lr=alpha * 0.02, exact_mirror=True), 20)
    assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_alpha_zero_is_adamw():
    ours, theirs = parameters(), parameters()
    train(ours, HyperbolicAdam(ours, lr=0.02, alpha=0.0, weight_decay=0.3), 20)
    train(theirs, torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.3), 20)
    assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@given(theta=number, alpha=st.floats(0.1, 100.0))
def test_a_small_step_moves_a_weight_by_the_root_of_one_plus_its_square(theta, alpha):
    u = 1e-6 / alpha
    moved = theta - float(hyperbolic_step(float64(theta), float64(u), alpha))
    assert moved == pytest.approx(u * math.hypot(1.0, alpha * theta), rel=1e-4, abs=1e-13 * abs(theta))


def test_signs_may_change():
    theta = torch.nn.Parameter(torch.tensor([0.05]))
    optimizer = HyperbolicAdam([theta], lr=0.1, alpha=5.0, weight_decay=0.0)
    theta.sum().backward()
    optimizer.step()
    assert theta.item() == pytest.approx(0.2 * math.sinh(math.asinh(0.25) - 0.5), rel=1e-5)
    assert theta.item() < 0


@pytest.mark.parametrize("theta", [1e30, -1e30])
def test_a_weight_far_above_gamma_shrinks_by_a_factor_and_does_not_overflow(theta):
    """In float32 theta / gamma squared would be infinite, and arcsinh of it off by whole digits."""
    moved = hyperbolic_step(torch.tensor([theta]), torch.tensor([0.01 * math.copysign(1, theta)]), 50.0)
    assert_close(moved, torch.tensor([theta * math.exp(-0.5)]))


def test_gamma_is_read_from_the_group_at_each_step():
    theta = torch.nn.Parameter(float64(0.5))
    optimizer = HyperbolicAdam([theta], lr=0.01, alpha=2.0, weight_decay=0.0, betas=(0.0, 0.0), eps=0.0)
    expected = 0.5
    for alpha in (2.0, 10.0, 0.0):  # a schedule of gamma: 1/2, 1/10, and infinite, which is Adam
        optimizer.param_groups[0]["alpha"] = alpha
        theta.grad = float64(3.0)
        optimizer.step()
        expected = math.sinh(math.asinh(expected * alpha) - 0.01 * alpha) / alpha if alpha else expected - 0.01
        assert theta.item() == pytest.approx(expected, rel=1e-12)
    assert optimizer.state_dict()["param_groups"][0]["alpha"] == 0.0


def test_decay_is_taken_from_the_weight_before_the_step():
    theta = torch.nn.Parameter(float64(1.0))
    optimizer = HyperbolicAdam([theta], lr=0.1, alpha=5.0, weight_decay=0.5, eps=0.0)
    theta.grad = float64(2.0)
    optimizer.step()
    assert theta.item() == pytest.approx(0.2 * math.sinh(math.asinh(5.0) - 0.5) - 0.05, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -1.0}, "alpha must be a number of at least 0, got -1.0; use 0 for plain AdamW"),
        ({"alpha": "auto"}, "alpha must be a number of at least 0, got 'auto'"),
        ({"lr": math.nan}, "lr must be a number of at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must lie in \[0, 1\), got 1.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        HyperbolicAdam(parameters(), **options)
