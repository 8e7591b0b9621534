"""Norms and potentials by hand, at the ends of their ranges, and refused where they are not defined."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from horst.operators import (
    L1,
    L2,
    CoshEntropy,
    CustomPotential,
    ElasticNet,
    Entropy,
    Euclidean,
    HyperbolicEntropy,
    LInf,
    Lp,
    Mirror,
    Nuclear,
    Spectral,
    Steepest,
)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


g = float64([3.0, -4.0, 0.0])


@pytest.mark.parametrize("norm", [L1(), L2(), Lp(3)])
def test_a_nan_is_not_lost(norm):
    assert bool(norm.argmax(float64([1.0, math.nan, 5.0])).isnan().any())


def test_norms_by_hand():
    assert float(L1()(g)) == 7.0
    assert float(L2()(g)) == pytest.approx(5.0)
    assert float(LInf()(g)) == 4.0
    assert float(Lp(3)(g)) == pytest.approx(91 ** (1 / 3))


def test_ties_go_to_the_first_index_and_sign_of_zero_is_zero():
    assert_close(L1().argmax(float64([2.0, -2.0, 2.0])), float64([1.0, 0.0, 0.0]))
    assert_close(LInf().argmax(float64([-2.0, 0.0, 1e-300])), float64([-1.0, 0.0, 1.0]))


@pytest.mark.parametrize("norm", [L1(), L2(), Lp(3), Lp(1), Lp(math.inf), LInf()])
def test_a_zero_gradient_gives_a_zero_direction(norm):
    assert_close(norm.argmax(torch.zeros(4)), torch.zeros(4))


@pytest.mark.parametrize(("p", "same"), [(1, L1()), (2, L2()), (math.inf, LInf())])
def test_lp_agrees_with_the_named_norms(p, same):
    assert_close(Lp(p)(g), same(g))
    assert_close(Lp(p).argmax(g), same.argmax(g))
    assert_close(Lp(p).dual(g), same.dual(g))


def test_p_to_infinity_tends_to_sign_and_p_to_one_to_coordinate_descent():
    assert_close(Lp(1e9).argmax(g), g.sign(), rtol=0, atol=1e-8)
    assert_close(Lp(1 + 1e-3).argmax(g), L1().argmax(g), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [1.0001, 2, 64, 1e6])
def test_large_p_and_extreme_magnitudes_stay_finite(p, dtype):
    for scale in (1e-30, 1e-6, 1e6, 1e30):
        x = torch.tensor([3.0, -4.0, 0.0], dtype=dtype) * scale
        assert_close(Lp(p).argmax(x), Lp(p).argmax(x / scale))
        assert_close(Lp(p)(x), Lp(p)(x / scale) * scale)
        assert_close(L2().argmax(x), L2().argmax(x / scale))


def test_spectral_is_the_polar_factor():
    G = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    D = Spectral().argmax(G)
    eye = torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
    assert_close(D.mT @ D, eye)
    assert bool((torch.linalg.eigvalsh(D.mT @ G) > 0).all())  # D^T G is symmetric positive definite: the polar form
    assert_close(D.mT @ G, (D.mT @ G).mT)


def test_spectral_of_zero_and_of_low_rank():
    assert_close(Spectral().argmax(torch.zeros(3, 2)), torch.zeros(3, 2))
    u, v = float64([[0.6], [0.8]]), float64([[1.0, 0.0, 0.0]])
    assert_close(Spectral().argmax(1e9 * u @ v), u @ v)
    assert_close(Nuclear().argmax(1e-9 * u @ v), u @ v)


def test_spectral_and_nuclear_are_dual():
    G = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for norm in (Spectral(), Nuclear()):
        assert_close((G * norm.argmax(G)).sum(), norm.dual(G))
        assert_close(norm(norm.argmax(G)), float64(1.0))
        assert norm.dual.dual == norm


POTENTIALS = [Euclidean(), Entropy(), HyperbolicEntropy(0.3), CoshEntropy(), ElasticNet(0.2, 0.7)]


@pytest.mark.parametrize("potential", POTENTIALS)
def test_the_dual_step_moves_the_mirror_map_by_the_direction(potential):
    theta, d = float64([0.5, -2.0, 3.0, -1e-3]), float64([1.0, -0.7, 2.0, 0.3])
    moved = potential.step(theta, d, 0.2)
    assert_close(potential.gradient(moved), potential.gradient(theta) - 0.2 * d)


@pytest.mark.parametrize("potential", POTENTIALS)
def test_both_forms_of_the_mirror_step_agree_to_first_order(potential):
    theta, d, M = float64([0.5, -2.0, 3.0]), float64([1.0, -0.7, 2.0]), Mirror(potential)

    def difference(lr):
        return float((M.step(theta, d, lr) - (theta - lr * M(theta, d))).abs().max())

    assert difference(1e-3) <= 20 * 1e-6
    if isinstance(potential, (Euclidean, ElasticNet)):  # linear between its kinks
        assert difference(1e-3) < 1e-15
    else:  # the difference is of second order: a tenth of lr, a hundredth of it
        assert difference(1e-4) / difference(1e-3) == pytest.approx(0.01, rel=0.05)


def test_the_two_steps_of_the_issue_by_hand():
    theta, d = float64([2.0, -3.0, 0.0]), float64([1.0, 1.0, 1.0])
    assert_close(Mirror(Entropy()).step(theta, d, 0.1), float64([2 * math.exp(-0.1), -3 * math.exp(0.1), 0.0]))
    expected = [0.5 * math.sinh(math.asinh(t / 0.5) - 0.1) for t in theta.tolist()]
    assert_close(Mirror(HyperbolicEntropy(0.5)).step(theta, d, 0.1), float64(expected))


def test_hyperbolic_entropy_with_small_gamma_steps_like_the_entropy():
    theta, d = float64([2.0, -3.0, 0.01]), float64([1.0, -1.0, 0.5])
    assert_close(HyperbolicEntropy(1e-12).step(theta, d, 0.3), Entropy().step(theta, d, 0.3))


def test_cosh_steps_beyond_the_overflow_of_sinh():
    theta = float64([800.0, -800.0, 25.0, -25.0])
    d = float64([1e300, 1e300, 1e10, 1e10])
    moved = CoshEntropy().step(theta, d, 1.0)
    assert bool(torch.isfinite(moved).all())
    assert_close(moved[2:], torch.asinh(torch.sinh(theta[2:]) - d[2:]))
    assert_close(
        CoshEntropy().step(float64([21.0]), float64([5e9]), 1.0), torch.asinh(torch.sinh(float64([21.0])) - 5e9)
    )
    assert_close(CoshEntropy().step(theta, torch.zeros_like(theta), 1.0), theta)


def test_a_custom_potential_gets_its_inverse_hessian_from_autograd():
    theta, d = float64([[0.5, -2.0], [3.0, 1.0]]), float64([[1.0, 2.0], [-1.0, 0.5]])
    for known in (HyperbolicEntropy(0.3), CoshEntropy(), Entropy()):
        custom = CustomPotential(known)
        assert_close(Mirror(custom)(theta, d), Mirror(known)(theta, d))
        assert_close(custom.gradient(theta), known.gradient(theta))
        full = CustomPotential(known, separable=False)
        assert_close(Mirror(full)(theta, d), Mirror(known)(theta, d))


def test_a_non_separable_potential_is_solved_with_its_full_hessian():
    B = float64([[2.0, 1.0], [1.0, 3.0]])
    quadratic = CustomPotential(lambda x: 0.5 * ((x @ B) * x).sum(-1), separable=False)
    theta, d = float64([[0.5, -2.0], [3.0, 1.0]]), float64([[1.0, 2.0], [-1.0, 0.5]])
    assert_close(Mirror(quadratic)(theta, d), torch.linalg.solve(B, d.mT).mT)
    assert Mirror(quadratic).coupled_dims == 1


def test_a_custom_potential_that_is_not_what_it_says_is_refused():
    theta = float64([0.5, -2.0, 1.0])
    coupled = CustomPotential(lambda x: x.square().sum(-1) + x[..., 0] * x[..., 2])
    with pytest.raises(ValueError, match="Pass separable=False"):
        Mirror(coupled)(theta, theta)
    with pytest.raises(ValueError, match="no second derivative"):
        Mirror(CustomPotential(lambda x: (2 * x).sum(-1)))(theta, theta)
    with pytest.raises(ValueError, match="give inverse_mirror_map"):
        Mirror(CustomPotential(CoshEntropy())).step(theta, theta, 0.1)
    with pytest.raises(ValueError, match="non-separable potential does not have"):
        CustomPotential(CoshEntropy(), inverse_hessian=torch.ones_like, separable=False)


def test_a_custom_potential_with_all_its_maps_takes_the_dual_step():
    cosh = CoshEntropy()
    custom = CustomPotential(
        cosh, mirror_map=torch.sinh, inverse_mirror_map=torch.asinh, inverse_hessian=lambda t: 1 / t.cosh()
    )
    theta, d = float64([0.5, -2.0]), float64([1.0, 2.0])
    assert_close(Mirror(custom).step(theta, d, 0.1), Mirror(cosh).step(theta, d, 0.1))
    assert_close(Mirror(custom)(theta, d), Mirror(cosh)(theta, d))


def test_the_gradient_of_a_custom_potential_works_under_no_grad():
    with torch.no_grad():
        assert_close(Mirror(CustomPotential(CoshEntropy()))(g, g), Mirror(CoshEntropy())(g, g))


@pytest.mark.parametrize("p", [0.5, 0, -1, math.nan])
def test_p_below_one_is_refused(p):
    with pytest.raises(ValueError, match=f"p must be at least 1, got {p}"):
        Lp(p)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan])
def test_gamma_must_be_positive(gamma):
    with pytest.raises(ValueError, match=f"gamma must be positive and finite, got {gamma}"):
        HyperbolicEntropy(gamma)


def test_operators_work_in_the_dtype_they_are_given():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.tensor([0.5, -2.0], dtype=dtype)
        for operator in (Steepest(L2()), Steepest(Lp(3)), Mirror(HyperbolicEntropy(0.1)), Mirror(CoshEntropy())):
            assert operator(x, x).dtype == dtype


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(0, 10.0), st.floats(1e-2, 1e2))
def test_the_elastic_nets_maps_are_inverse_to_each_other(values, l1, delta):
    potential, theta = ElasticNet(l1, delta), float64(values)
    dual = potential.gradient(theta)
    assert_close(potential.inverse_gradient(dual), theta, rtol=1e-9, atol=1e-12 * (1 + l1) * delta)
    assert_close(potential.inverse_gradient(theta.clamp(-l1, l1)), torch.zeros_like(theta), rtol=0, atol=0)


def test_the_elastic_nets_gradient_is_that_of_its_value():
    potential, theta = ElasticNet(0.3, 0.5), float64([1.5, -0.2, 3.0]).requires_grad_()
    potential(theta).backward()
    assert_close(potential.gradient(theta.detach()), theta.grad)
    assert float(potential(float64([1.0, -2.0]))) == pytest.approx(0.3 * 3 + 5 / (2 * 0.5))
    assert_close(potential.inverse_hessian(float64([1.0, 0.0])), float64([0.5, 0.0]))
    assert_close(potential.step(theta.detach(), g, 0.0), theta.detach())


def test_the_elastic_net_is_euclidean_without_its_l1_term_and_keeps_zeros_with_it():
    theta, d = float64([1.0, 0.0, -1.0]), float64([0.1, 0.4, -0.3])
    assert_close(ElasticNet(0.0).step(theta, d, 0.5), Euclidean().step(theta, d, 0.5))
    assert_close(ElasticNet(0.5).step(theta, d, 1.0), float64([0.9, 0.0, -0.7]))
    for l1, delta in ((-0.1, 1.0), (math.nan, 1.0), (0.1, 0.0), (0.1, math.inf)):
        with pytest.raises(ValueError, match=r"l1 must be finite|delta must be positive"):
            ElasticNet(l1, delta)
