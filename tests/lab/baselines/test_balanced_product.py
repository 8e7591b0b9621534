"""PILoT and Sign-In: the balanced product, its geometry, and what each of the two is known for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.balanced_product import PILoT, SignIn, balanced_factors
from horst.lab.baselines.factored import Factored
from horst.operators import Adam, HyperbolicEntropy, Identity, Mirror


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.floats(-1e6, 1e6).filter(lambda x: x == 0 or abs(x) > 1e-6))
def test_balanced_factors_have_the_product_and_the_difference_of_squares(value):
    m, w = balanced_factors(float64(value))
    assert_close(m * w, float64(value), rtol=1e-14, atol=0)
    assert_close((m - w) * (m + w), float64(1.0), rtol=1e-9 * max(1.0, value**2), atol=0)
    assert m >= 1


@pytest.mark.parametrize("target", [None, 0.9])
def test_every_step_of_pilot_is_the_formula(target):
    theta, gradients = normal(4), [normal(4, seed=k) for k in range(1, 9)]
    weight = nn.Parameter(theta.clone())
    optimizer = PILoT([weight], 0.02, Identity(), strength=0.3, target=target, rate=0.1)
    (m, w), a, raised = balanced_factors(theta), 0.3, []
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        above = target is not None and bool((m * w).abs().sum() > target * theta.abs().sum())
        raised.append(above)
        m, w = m - 0.02 * (g * w + 2 * a * m), w - 0.02 * (g * m + 2 * a * w)
        a = a * np.exp(0.1 if above else -0.1)
        assert_close(weight.detach(), m * w, rtol=1e-11, atol=1e-13)
    assert (True in raised) is (target is not None)


def test_every_step_of_sign_in_is_adam_on_both_factors_with_resets_that_keep_the_weights():
    theta, gradients = normal(4), [normal(4, seed=k) for k in range(1, 8)]
    weight = nn.Parameter(theta.clone())
    optimizer = SignIn([weight], 0.05, 0.3, every=3)
    factors, adam = balanced_factors(theta), Adam()
    state = adam.init(factors)
    for k, g in enumerate(gradients, start=1):
        weight.grad = g.clone()
        optimizer.step()
        direction, state = adam.update(factors, g * factors.flip(0), state)
        factors = (1 - 0.05 * 0.3) * factors - 0.05 * direction
        theta = factors.prod(0)
        assert_close(weight.detach(), theta, rtol=1e-10, atol=1e-12)
        m, w = optimizer.state[weight]["factors"]
        if k % 3 == 0:
            factors = balanced_factors(theta)
            assert_close(m**2 - w**2, torch.ones_like(m))
        else:
            assert (m**2 - w**2 - 1).abs().max() > 1e-3
        assert_close(m * w, weight.detach(), rtol=1e-14, atol=1e-16)


def test_to_first_order_the_product_takes_the_mirror_step_of_the_hyperbolic_entropy():
    theta, g = normal(50), normal(50, seed=1)
    flow = Mirror(HyperbolicEntropy(0.5))(theta, g)
    errors = []
    for lr in (1e-3, 1e-4):
        weight = nn.Parameter(theta.clone())
        optimizer = PILoT([weight], lr, Identity(), strength=0.0)
        weight.grad = g.clone()
        optimizer.step()
        errors.append(float((weight.detach() - (theta - 2 * lr * flow)).abs().max()))
    assert errors[1] == pytest.approx(errors[0] / 100, rel=0.01), "the difference is of second order"


class _EvenProduct(Factored):
    """Factors of the same size: m^2 = w^2."""

    def _split(self, theta, state, group):
        return torch.stack((theta.abs().sqrt(), theta.sign() * theta.abs().sqrt()))


def turn_signs(optimizer, weight, start, steps=600):
    for _ in range(steps):
        weight.grad = weight.detach() + start  # the optimum is the weight with its sign turned
        optimizer.step()
    return weight.detach()


def test_sign_in_flips_signs_that_a_product_of_even_factors_cannot():
    start = normal(20).sign() * torch.linspace(0.5, 2.0, 20, dtype=torch.float64)
    even, sign_in = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    stuck = turn_signs(_EvenProduct([even], lr=0.02, operator=Identity()), even, start)
    assert torch.equal(stuck.sign(), start.sign())
    assert float(stuck.abs().max()) < 1e-3, "it goes to zero and stays there"
    flipped = turn_signs(SignIn([sign_in], 0.02, operator=Identity(), every=50), sign_in, start)
    assert torch.equal(flipped.sign(), -start.sign())
    assert_close(flipped, -start, rtol=1e-3, atol=1e-3)


def test_decay_takes_the_freedom_to_flip_and_a_reset_gives_it_back():
    start = normal(20)
    found = {}
    for every in (50, 10**9):
        weight = nn.Parameter(start.clone())
        optimizer = SignIn([weight], 0.02, 1.0, operator=Identity(), every=every)
        for _ in range(400):  # the weights are held, while decay makes the factors even
            weight.grad = weight.detach() - 1.6 * start
            optimizer.step()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        found[every] = turn_signs(optimizer, weight, start, steps=150).sign() == -start.sign()
    assert found[50].all()
    assert not found[10**9].any()


def test_pilot_moves_from_the_l2_to_the_l1_solution_as_its_decay_acts():
    """Of all solutions of three equations in eight unknowns, the one of least L2 norm, and the one of least L1 norm."""
    X, truth = normal(3, 8), torch.zeros(8, dtype=torch.float64)
    truth[4] = 0.1
    y = X @ truth
    least_l2 = torch.linalg.pinv(X) @ y
    solved = linprog(np.ones(16), A_eq=np.hstack([X, -X]), b_eq=y.numpy())
    least_l1 = torch.from_numpy(solved.x[:8] - solved.x[8:])

    def train(strength):
        weight = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        optimizer = PILoT([weight], 0.3, Identity(), strength=strength, rate=0.018)
        for _ in range(4000):
            weight.grad = X.T @ (X @ weight.detach() - y) / 3
            optimizer.step()
        assert float((X @ weight.detach() - y).norm()) < 0.01 * float(y.norm())
        return weight.detach()

    plain, regularised = train(0.0), train(0.2)
    assert float((plain - least_l2).norm()) < 0.05 * float((least_l1 - least_l2).norm())
    assert float((regularised - least_l1).norm()) < 0.2 * float((least_l1 - least_l2).norm())


def test_a_target_holds_the_l1_norm():
    start = normal(100)
    weight = nn.Parameter(start.clone())
    optimizer = PILoT([weight], 0.02, Identity(), strength=0.05, target=0.5, rate=0.02)
    for _ in range(1500):
        weight.grad = weight.detach() - start
        optimizer.step()
    assert float(weight.detach().abs().sum() / start.abs().sum()) == pytest.approx(0.5, abs=0.05)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        SignIn([nn.Parameter(torch.ones(2))], every=0)
    with pytest.raises(ValueError, match="target must be a number of at least 0, got -1"):
        PILoT([nn.Parameter(torch.ones(2))], target=-1.0)
