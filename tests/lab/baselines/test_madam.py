"""MADAM: its formula, its operator form, and what it is known for."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.madam import Madam
from horst.operators import Entropy, Mirror


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(theta, gradients, lr, beta2=0.999, clip=10.0, bound=3.0):
    """The formula, step by step; also the directions."""
    limit, v, directions = bound * theta.square().mean().sqrt(), torch.zeros_like(theta), []
    for k, g in enumerate(gradients, start=1):
        v = beta2 * v + (1 - beta2) * g**2
        directions.append((g / (v / (1 - beta2**k)).sqrt()).clamp(-clip, clip))
        theta = (theta * torch.exp(-lr * theta.sign() * directions[-1])).clamp(-limit, limit)
    return theta, directions


def run(theta, gradients, **options):
    weight = nn.Parameter(theta.clone())
    optimizer = Madam([weight], **options)
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("options", [{"lr": 0.1}, {"lr": 0.3, "clip": 1.0}, {"lr": 0.5, "bound": 1.0, "beta2": 0.9}])
def test_every_step_is_the_formula(options):
    theta, gradients = normal(4, 5), [normal(4, 5, seed=k) * 10.0 ** (k - 3) for k in range(1, 8)]
    assert_close(run(theta, gradients, **options), reference(theta, gradients, **options)[0], rtol=1e-12, atol=0)


def test_it_is_the_exact_mirror_step_of_the_entropy_along_the_normalised_gradient():
    theta, gradients = normal(6), [normal(6, seed=k) for k in range(1, 6)]
    _, directions = reference(theta, gradients, lr=0.1)
    mirrored = theta
    for d in directions:
        mirrored = Mirror(Entropy()).step(mirrored, d, 0.1)
    assert_close(run(theta, gradients, lr=0.1, bound=1e9), mirrored, rtol=1e-13, atol=0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), st.floats(1e-3, 3.0))
def test_no_sign_ever_changes_and_zero_stays(gradient, lr):
    theta = torch.tensor([1.0, -2.0, 1e-3, 0.0], dtype=torch.float64)
    found = run(theta, [torch.tensor(gradient, dtype=torch.float64)] * 5, lr=lr)
    assert torch.equal(found.sign(), theta.sign())
    assert float(found.abs().max()) <= 3 * float(theta.square().mean().sqrt()) * (1 + 1e-12)


@pytest.mark.parametrize("lr", [0.003, 0.01, 0.03, 0.1])
def test_a_network_trains_with_learning_rates_a_factor_of_thirty_apart(lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = Madam(model.parameters(), lr=lr)
    signs = [p.detach().sign() for p in model.parameters()]
    losses = []
    for _ in range(400):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p.detach().sign(), s) for p, s in zip(model.parameters(), signs, strict=True))


def test_what_cannot_be_meant_is_refused():
    for option in ("lr", "bound", "clip"):
        with pytest.raises(ValueError, match=f"{option} must be a number of at least 0, got nan"):
            Madam([nn.Parameter(torch.ones(2))], **{option: math.nan})
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = Madam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Madam needs dense gradients"):
        optimizer.step()
