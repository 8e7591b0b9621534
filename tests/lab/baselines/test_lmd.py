"""LMD's public core: two positive parts, the sign of a momentum, a hyperbolic mirror step underneath."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.lmd import LMD
from horst.operators import HyperbolicEntropy, LInf, Mirror, Steepest


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(theta, gradients, **options):
    weight = nn.Parameter(theta.clone())
    optimizer = LMD([weight], **options)
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_every_step_is_the_formula():
    theta, gradients, gamma = normal(5), [normal(5, seed=k) for k in range(1, 9)], 0.1
    root = (theta**2 + 4 * gamma**2).sqrt()
    a, b, m_a, m_b = (root + theta) / 2, (root - theta) / 2, 0.0, 0.0
    for g in gradients:
        m_a, m_b = 0.8 * m_a + 0.2 * a * g, 0.8 * m_b - 0.2 * b * g
        a, b = a * torch.exp(-0.05 * (m_a.sign() + 0.3)), b * torch.exp(-0.05 * (m_b.sign() + 0.3))
    found, _ = run(theta, gradients, lr=0.05, momentum=0.8, weight_decay=0.3, gamma=gamma)
    assert_close(found, a - b, rtol=1e-11, atol=1e-14)


def test_without_memory_it_is_the_exact_mirror_step_of_the_hyperbolic_entropy_along_the_sign():
    theta, gradients = normal(6), [normal(6, seed=k) for k in range(1, 6)]
    mirror, sign, expected = Mirror(HyperbolicEntropy(2 * 0.1)), Steepest(LInf()), theta
    for g in gradients:
        expected = mirror.step(expected, sign(expected, g), 0.05)
    assert_close(run(theta, gradients, lr=0.05, momentum=0.0, gamma=0.1)[0], expected, rtol=1e-10, atol=1e-14)


@given(st.lists(st.floats(-1e3, 1e3), min_size=4, max_size=4), st.floats(1e-3, 0.5), st.floats(0, 1))
def test_both_parts_stay_positive(gradient, lr, decay):
    theta = torch.tensor([1.0, -2.0, 1e-3, 0.0], dtype=torch.float64)
    gradients = [torch.tensor(gradient, dtype=torch.float64)] * 5
    found, state = run(theta, gradients, lr=lr, weight_decay=decay)
    assert bool((state["parts"] > 0).all())
    assert_close(state["parts"][0] - state["parts"][1], found, rtol=0, atol=0)


def test_a_large_weight_keeps_its_small_part():
    _, state = run(torch.tensor([300.0, -300.0]), [torch.zeros(2)], lr=0.0, gamma=1e-3)
    assert_close(state["parts"].prod(0), torch.full((2,), 1e-6))


def test_a_network_trains_and_signs_may_change():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = LMD(model.parameters(), lr=0.02, gamma=0.02)
    signs = model[0].weight.detach().sign()
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert not torch.equal(model[0].weight.detach().sign(), signs)
    assert all(bool((optimizer.state[p]["parts"] > 0).all()) for p in model.parameters())


def test_a_masked_weight_is_split_anew():
    weight = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = LMD([weight], lr=0.1, gamma=0.01)
    for _ in range(2):
        weight.grad = torch.ones(2, dtype=torch.float64)
        optimizer.step()
        with torch.no_grad():
            weight[0] = 0.0
    weight.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    assert_close(weight[0].detach(), -0.02 * torch.sinh(torch.tensor(0.1, dtype=torch.float64)))


def test_parts_of_size_zero_are_refused():
    with pytest.raises(ValueError, match="gamma must be above 0, got 0"):
        LMD([nn.Parameter(torch.ones(2))], gamma=0.0)
