"""Adam as an operator against torch's, and the verdicts of the probes."""

import pytest
import torch
from torch.testing import assert_close

from horst.operators import (
    L2,
    Adam,
    CoshEntropy,
    CustomPotential,
    Entropy,
    Euclidean,
    HyperbolicEntropy,
    Identity,
    LInf,
    Memoryless,
    Mirror,
    Spectral,
    Steepest,
)
from horst.operators.properties import Verdict, commutes, inverse_coercivity, is_bounded, is_linear


@pytest.mark.parametrize(("betas", "eps"), [((0.9, 0.999), 1e-8), ((0.0, 0.5), 1e-3), ((0.9, 0.95), 1e-8)])
def test_adam_steps_like_torchs(betas, eps):
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(7, generator=generator, dtype=torch.float64)
    p = torch.nn.Parameter(theta.clone())
    torch_adam = torch.optim.Adam([p], lr=0.1, betas=betas, eps=eps)
    adam = Adam(betas, eps)
    state = adam.init(theta)
    for _ in range(50):
        g = torch.randn(7, generator=generator, dtype=torch.float64)
        p.grad = g.clone()
        torch_adam.step()
        direction, state = adam.update(theta, g, state)
        theta = theta - 0.1 * direction
        assert_close(theta, p.detach(), rtol=1e-12, atol=1e-13)
    for key in ("exp_avg", "exp_avg_sq"):
        assert_close(state[key], torch_adam.state[p][key])


def test_adam_in_bfloat16_counts_beyond_256():
    adam, theta = Adam(), torch.zeros(2, dtype=torch.bfloat16)
    state = adam.init(theta)
    for _ in range(300):
        _, state = adam.update(theta, torch.ones_like(theta), state)
    assert float(state["step"]) == 300


def test_adam_with_eps_zero_and_no_gradient_stays():
    adam, theta = Adam(eps=0.0), torch.zeros(2)
    direction, _ = adam.update(theta, torch.tensor([0.0, -3.0]), adam.init(theta))
    assert_close(direction, torch.tensor([0.0, -1.0]))


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9,), (float("nan"), 0.9)])
def test_adam_refuses_bad_betas(betas):
    with pytest.raises(ValueError, match="betas must be two numbers"):
        Adam(betas)


def test_adam_refuses_bad_eps_and_a_foreign_state():
    with pytest.raises(ValueError, match="eps must be at least 0"):
        Adam(eps=-1.0)
    with pytest.raises(ValueError, match=r"lacks \['exp_avg', 'exp_avg_sq', 'step'\]"):
        Adam().update(torch.ones(2), torch.ones(2), {})


def test_a_verdict_is_not_a_bool():
    verdict = is_linear(Identity())
    assert isinstance(verdict, Verdict)
    with pytest.raises(TypeError, match=r"Read verdict\.holds"):
        bool(verdict)


def test_adam_is_bounded_by_its_largest_direction_after_a_quiet_spell():
    # One large gradient after silence: m = (1 - b1) g and v = (1 - b2) g^2, up to the bias corrections at step 2001.
    verdict = is_bounded(Adam(eps=0.0), shape=(1,), history=2000)
    expected = (0.1 / (1 - 0.9**2001)) / (0.001 / (1 - 0.999**2001)) ** 0.5
    assert expected > 2.9  # 1 at the first step
    assert verdict.holds
    assert verdict.constant == pytest.approx(expected, rel=1e-4)
    assert not is_linear(Adam()).holds


def test_growth_that_is_slow_is_still_unbounded():
    class Log(Memoryless):
        def __call__(self, theta, g):
            return g.sign() * torch.log1p(g.abs())

    assert not is_bounded(Log()).holds


def test_the_probes_take_matrices():
    assert is_bounded(Steepest(Spectral()), shape=(3, 4)).holds
    assert not is_linear(Steepest(Spectral()), shape=(3, 4)).holds
    assert not commutes(Steepest(Spectral()), Mirror(Entropy()), shape=(3, 4)).holds


def test_mirrors_commute_with_each_other_and_scaling_with_the_linear_ones():
    assert commutes(Mirror(Entropy()), Mirror(CoshEntropy())).holds
    assert commutes(Mirror(Entropy()), 3.0 * Identity()).holds
    assert not commutes(Steepest(L2()), 3.0 * Identity()).holds
    assert commutes(Steepest(LInf()), Mirror(Euclidean())).holds


def test_inverse_coercivity_of_a_potential_of_ones_own():
    B = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    quadratic = CustomPotential(lambda x: 0.5 * ((x @ B) * x).sum(-1), separable=False)
    verdict = inverse_coercivity(quadratic, n=2)
    assert verdict.holds
    assert verdict.constant == pytest.approx(1 / float(torch.linalg.eigvalsh(B)[-1]))
    quartic = CustomPotential(lambda x: (x**4 / 4 + x**2 / 2).sum(-1))
    assert not inverse_coercivity(quartic).holds  # 1 / (1 + 3 x^2) vanishes far out


def test_probes_are_reproducible():
    first, second = (is_bounded(Mirror(HyperbolicEntropy(0.1)) @ Steepest(L2()), seed=3) for _ in range(2))
    assert first.constant == second.constant
    assert_close(first.witness["theta"], second.witness["theta"])
