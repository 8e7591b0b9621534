"""Sections 3 and 4 and Appendix B, one test a statement, with the numbers of the compiled paper and its labels.

Hypothesis looks for the counter-examples. Theorem 4.7 is in tests/lab/experiments/test_theorem4_7_implicit_bias.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from horst.operators import (
    L1,
    L2,
    Adam,
    CoshEntropy,
    Entropy,
    Euclidean,
    HyperbolicEntropy,
    Identity,
    LInf,
    Lp,
    Mirror,
    Spectral,
    Steepest,
    bracket,
    bregman_divergence,
)
from horst.operators.properties import commutes, inverse_coercivity, is_bounded, is_linear

theory = settings(deadline=None, derandomize=True, max_examples=60)

N = 5
# Zero, or within [1e-6, 1e6]: nothing underflows.
numbers = st.one_of(st.just(0.0), st.floats(1e-6, 1e6), st.floats(-1e6, -1e-6))
gammas = st.floats(1e-3, 10.0)
vector_norms = st.one_of(st.sampled_from([L1(), L2(), LInf()]), st.floats(1.01, 64.0).map(Lp))
potentials = st.one_of(st.sampled_from([Euclidean(), Entropy()]), gammas.map(HyperbolicEntropy))
# cosh overflows beyond 710, so it gets weights of its own size.
moderate = st.one_of(st.just(0.0), st.floats(1e-6, 30.0), st.floats(-30.0, -1e-6))


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def vectors(elements=numbers, n=N):
    return st.lists(elements, min_size=n, max_size=n).map(float64)


def length(x) -> float:
    return float(torch.linalg.vector_norm(x))


@theory
@given(theta=vectors(), g=vectors(), h=vectors(), c=st.floats(-100.0, 100.0), potential=potentials)
def test_definition_3_1_a_linear_operator_adds_and_scales(theta, g, h, c, potential):
    """definition : linear opperator. The mirror operator is the linear one; the probe says the same."""
    M = Mirror(potential)
    scale = length(M(theta, g)) + length(M(theta, h)) + 1e-300
    assert length(M(theta, g + h) - M(theta, g) - M(theta, h)) <= 1e-12 * scale
    assert length(M(theta, c * g) - c * M(theta, g)) <= 1e-12 * abs(c) * scale


def test_definition_3_1_the_probe_finds_a_counter_example_that_is_one():
    verdict = is_linear(Steepest(L2()))
    assert not verdict.holds
    theta, g, h, c = (verdict.witness[key] for key in ("theta", "g", "h", "c"))
    S = Steepest(L2())
    additive = length(S(theta, g + h) - S(theta, g) - S(theta, h))
    homogeneous = length(S(theta, c * g) - c * S(theta, g))
    assert max(additive, homogeneous) > 0.1


@theory
@given(theta=vectors(), g=vectors(), norm=vector_norms)
def test_definition_3_2_a_bounded_operator_has_one_constant_for_all_gradients(theta, g, norm):
    """definition : bounded operator. Steepest descent with C = sqrt(n), whatever theta and g."""
    assert length(Steepest(norm)(theta, g)) <= math.sqrt(N) * (1 + length(theta)) * (1 + 1e-12)


def test_definition_3_2_the_probe_finds_the_constant_of_sign_descent():
    verdict = is_bounded(Steepest(LInf()), shape=(6,))
    assert verdict.holds
    assert verdict.constant == pytest.approx(math.sqrt(6), rel=1e-6)  # at theta = 0, all signs one


@theory
@given(theta=vectors(), g=vectors(), gamma=gammas)
def test_definition_3_3_the_bracket_vanishes_where_operators_commute(theta, g, gamma):
    """definition : commuting. Two separable mirrors commute; the identity commutes with everything."""
    M, K = Mirror(HyperbolicEntropy(gamma)), Mirror(Entropy())
    assert_close(bracket(M, K)(theta, g), torch.zeros_like(g), rtol=0, atol=1e-12 * (1 + length((M @ K)(theta, g))))
    assert_close(bracket(Steepest(L2()), Identity())(theta, g), torch.zeros_like(g))


@theory
@given(g=vectors(), other=vectors(), norm=vector_norms)
def test_definition_3_4_the_steepest_direction_maximises_over_the_unit_ball(g, other, norm):
    """Steepest operator: <g, S> equals the dual norm, S lies in the ball, and no other point of it does better."""
    d = Steepest(norm)(torch.zeros_like(g), g)
    assert float(norm(d)) <= 1 + 1e-9
    assert_close((g * d).sum(), norm.dual(g), rtol=1e-9, atol=0)
    size = float(norm(other))
    if size > 0:
        assert float((g * other / size).sum()) <= float(norm.dual(g)) * (1 + 1e-9)


@theory
@given(G=vectors(n=6).map(lambda x: x.reshape(2, 3)), other=vectors(n=6).map(lambda x: x.reshape(2, 3)))
def test_definition_3_4_holds_for_the_spectral_norm(G, other):
    norm = Spectral()
    D = Steepest(norm)(torch.zeros_like(G), G)
    assert float(norm(D)) <= 1 + 1e-9
    assert_close((G * D).sum(), norm.dual(G), rtol=1e-7, atol=0)
    size = float(norm(other))
    if size > 0:
        assert float((G * other / size).sum()) <= float(norm.dual(G)) * (1 + 1e-9)


@theory
@given(theta=vectors(), g=vectors())
def test_example_3_5_sign_descent(theta, g):
    assert_close(Steepest(LInf())(theta, g), g.sign())


@theory
@given(theta=vectors(), g=vectors())
def test_example_3_6_coordinate_descent(theta, g):
    d = Steepest(L1())(theta, g)
    i = g.abs().tolist().index(float(g.abs().max()))  # the first of the largest
    expected = torch.zeros_like(g)
    expected[i] = g[i].sign()
    assert_close(d, expected)


@theory
@given(theta=vectors(), xi=vectors(), gamma=gammas)
def test_definition_3_7_hyperbolic_entropy_is_inversely_gamma_coercive(theta, xi, gamma):
    """definition : Legendre function (the label of the inverse coercive definition). Euclidean has mu = 1."""
    for potential, mu in ((HyperbolicEntropy(gamma), gamma), (Euclidean(), 1.0)):
        quadratic_form = float((xi * Mirror(potential)(theta, xi)).sum())
        assert quadratic_form >= mu * float((xi * xi).sum()) * (1 - 1e-12)


def test_definition_3_7_the_probe_finds_the_constant_or_the_point_where_it_is_lost():
    for potential, mu in ((Euclidean(), 1.0), (HyperbolicEntropy(0.25), 0.25), (HyperbolicEntropy(1e-6), 1e-6)):
        verdict = inverse_coercivity(potential)
        assert verdict.holds
        assert verdict.constant == pytest.approx(mu, rel=1e-12)
    for potential in (Entropy(), CoshEntropy()):
        verdict = inverse_coercivity(potential)
        theta, xi = verdict.witness["theta"], verdict.witness["xi"]
        assert not verdict.holds
        assert float((xi * Mirror(potential)(theta, xi)).sum()) <= 1e-6


@theory
@given(theta=vectors(moderate), g=vectors(), gamma=gammas)
def test_definition_3_8_the_mirror_operator_solves_with_the_hessian_of_the_potential(theta, g, gamma):
    """Mirror operator: the closed forms agree with autograd's Hessian of R."""
    theta = torch.where(theta == 0, torch.full_like(theta, 0.5), theta)  # inside the domain of the entropy
    for potential in (Euclidean(), Entropy(), HyperbolicEntropy(gamma), CoshEntropy()):
        hessian = torch.autograd.functional.hessian(potential, theta)
        assert_close(hessian @ Mirror(potential)(theta, g), g, rtol=1e-7, atol=1e-9)
        gradient = torch.autograd.functional.jacobian(potential, theta)
        assert_close(potential.gradient(theta), gradient, rtol=1e-9, atol=1e-9)


@theory
@given(theta=vectors(), g=vectors(), gamma=gammas)
def test_examples_3_9_to_3_11_closed_forms(theta, g, gamma):
    assert_close(Mirror(Euclidean())(theta, g), g)
    assert_close(Mirror(HyperbolicEntropy(gamma))(theta, g), (theta**2 + gamma**2).sqrt() * g)
    assert_close(Mirror(CoshEntropy())(theta, g), g / torch.cosh(theta))


@theory
@given(theta=vectors(st.floats(1e-2, 1e4)), g=vectors())
def test_example_3_10_gamma_to_zero_tends_to_the_entropy(theta, g):
    assert_close(Mirror(HyperbolicEntropy(1e-9))(theta, g), Mirror(Entropy())(theta, g), rtol=1e-12, atol=0)


@theory
@given(theta=vectors(), g=vectors(), c=st.floats(0.5, 100.0), norm=vector_norms)
def test_lemma_4_1_the_steepest_operator_is_bounded_but_not_linear(theta, g, c, norm):
    """lemma:steepest-bounded-nonlinear, Lemma C.1: it ignores the size of g, so A(c g) = A(g) and not c A(g)."""
    S = Steepest(norm)
    assert_close(S(theta, c * g), S(theta, g), rtol=1e-9, atol=1e-12)
    assert float(norm(S(theta, g))) <= 1 + 1e-9


@pytest.mark.parametrize("norm", [L1(), L2(), Lp(3), LInf()])
def test_lemma_4_1_by_the_probes(norm):
    assert is_bounded(Steepest(norm)).holds
    assert not is_linear(Steepest(norm)).holds


@pytest.mark.parametrize("potential", [Euclidean(), Entropy(), HyperbolicEntropy(0.1), CoshEntropy()])
def test_lemma_4_2_the_mirror_operator_is_linear_and_unbounded(potential):
    """lemma:mirror-linear-unbounded, Lemma C.2: the ratio grows with the gradient without end."""
    M = Mirror(potential)
    assert is_linear(M).holds
    verdict = is_bounded(M)
    assert not verdict.holds
    theta, g = verdict.witness["theta"], verdict.witness["g"]
    assert length(M(theta, 1e6 * g)) > 1e5 * length(M(theta, g))


@theory
@given(theta=vectors(), g=vectors(), gamma=gammas)
def test_lemma_4_3_sign_ignores_a_separable_mirror_applied_first(theta, g, gamma):
    """lemma : sign mirror redundant mirror."""
    S, M = Steepest(LInf()), Mirror(HyperbolicEntropy(gamma))
    assert_close((S @ M)(theta, g), S(theta, g))


@theory
@given(theta=vectors(st.floats(-700.0, 700.0)), g=vectors())
def test_lemma_4_3_holds_for_cosh_up_to_its_overflow(theta, g):
    S, M = Steepest(LInf()), Mirror(CoshEntropy())
    assert_close((S @ M)(theta, g), S(theta, g))


def test_lemma_4_3_needs_a_positive_definite_hessian():
    """At theta = 0 the entropy's inverse Hessian is 0: the lemma's proof does not cover it, and it fails there."""
    S, M = Steepest(LInf()), Mirror(Entropy())
    theta, g = float64([0.0, 1.0]), float64([1.0, 1.0])
    assert_close((S @ M)(theta, g), float64([0.0, 1.0]))


@theory
@given(theta=vectors(), g=vectors(st.floats(1e-6, 1e6)), gamma=gammas)
def test_corollary_4_4_mirror_and_steepest_do_not_commute(theta, g, gamma):
    """lemma : commuting operators. SM = S, but MS rescales the sign wherever the inverse Hessian is not 1."""
    S, M = Steepest(LInf()), Mirror(HyperbolicEntropy(gamma))
    assert_close(bracket(S, M)(theta, g), S(theta, g) - (theta**2 + gamma**2).sqrt() * g.sign())


def test_corollary_4_4_by_the_probe():
    assert commutes(Steepest(LInf()), Mirror(Euclidean())).holds
    for norm in (L1(), L2(), Lp(3), LInf()):
        for potential in (Entropy(), HyperbolicEntropy(0.5), CoshEntropy()):
            verdict = commutes(Steepest(norm), Mirror(potential))
            theta, g = verdict.witness["theta"], verdict.witness["g"]
            assert not verdict.holds
            assert length(bracket(Steepest(norm), Mirror(potential))(theta, g)) > 0


@theory
@given(theta=vectors(), g=vectors(), gamma=gammas, norm=vector_norms)
def test_corollary_4_5_a_mirror_after_a_steepest_step_is_bounded(theta, g, gamma, norm):
    """corollary:composition-bounded, with C = max(1, gamma) times the size of the unit ball."""
    direction = (Mirror(HyperbolicEntropy(gamma)) @ Steepest(norm))(theta, g)
    assert length(direction) <= math.sqrt(N) * max(1.0, gamma) * (1 + length(theta)) * (1 + 1e-9)


@pytest.mark.parametrize("potential", [Euclidean(), Entropy(), HyperbolicEntropy(0.1), CoshEntropy()])
@pytest.mark.parametrize("inner", [Steepest(L2()), Steepest(LInf()), Adam()])
def test_corollary_4_5_by_the_probe_and_for_adam(potential, inner):
    assert is_bounded(Mirror(potential) @ inner).holds
    assert is_linear(Mirror(potential) @ inner).holds is False


@theory
@given(theta=vectors(), gamma=gammas)
def test_remark_4_6_the_inverse_hessians_grow_at_most_linearly(theta, gamma):
    """The growth condition of Corollary 4.5 for every example potential, with its constant."""
    for potential, C in ((Euclidean(), 1.0), (HyperbolicEntropy(gamma), max(1.0, gamma)), (CoshEntropy(), 1.0)):
        assert float(potential.inverse_hessian(theta).max()) <= C * (1 + length(theta)) * (1 + 1e-12)


@theory
@given(theta=vectors(moderate), xi=vectors(moderate), gamma=gammas)
def test_definition_b_1_the_bregman_divergence_is_positive_and_zero_only_on_the_diagonal(theta, xi, gamma):
    for potential in (Euclidean(), HyperbolicEntropy(gamma), CoshEntropy()):
        values = potential(theta).abs() + potential(xi).abs()
        divergence = bregman_divergence(potential, theta, xi)
        inner = ((potential.gradient(xi) * (theta - xi)).abs()).sum()
        assert float(divergence) >= -1e-14 * float(values + inner)
        assert float(bregman_divergence(potential, xi, xi)) == 0.0
        if length(theta - xi) > 1e-3 * (1 + length(xi)) and isinstance(potential, Euclidean):
            assert_close(divergence, 0.5 * (theta - xi).square().sum())


@theory
@given(a=moderate, b=moderate, gamma=gammas)
def test_definition_b_2_the_mirror_maps_are_strictly_monotone(a, b, gamma):
    """def : legendre bregman, first half: R is strictly convex, so its gradient increases strictly."""
    low, high = sorted((a, b))
    if high - low > 1e-6 * (1 + abs(low)):
        for potential in (Euclidean(), HyperbolicEntropy(gamma), CoshEntropy()):
            assert float(potential.gradient(float64([high]))) > float(potential.gradient(float64([low])))
        if low > 0:
            assert float(Entropy().gradient(float64([high]))) > float(Entropy().gradient(float64([low])))


def test_definition_b_2_legendre_the_gradient_diverges_at_the_boundary():
    far = float64([10.0**k for k in range(0, 301, 30)]).unsqueeze(-1)
    for potential in (Euclidean(), HyperbolicEntropy(0.1)):
        sizes = potential.gradient(far).squeeze(-1)
        assert bool((sizes.diff() > 0).all())
        assert sizes[-1] > 500
    assert bool(torch.isinf(CoshEntropy().gradient(float64([1000.0]))).all())
    toward_zero = Entropy().gradient(1 / far[1:]).abs().squeeze(-1)
    assert bool((toward_zero.diff() > 0).all())
    assert toward_zero[-1] > 500


@pytest.mark.parametrize("potential", [Euclidean(), Entropy(), HyperbolicEntropy(0.1), CoshEntropy()])
def test_definition_b_2_bregman_level_sets_are_bounded_and_the_divergence_is_continuous(potential):
    theta = float64([2.0])
    far = float64([[10.0**k] for k in (1, 1.5, 2, 2.5)])
    divergences = bregman_divergence(potential, theta.expand_as(far), far)
    assert bool((divergences.diff() > 0).all())  # xi outside a large ball has a large divergence
    assert divergences[-1] > 100
    near = theta + float64([[10.0**-k] for k in range(1, 6)])
    assert float(bregman_divergence(potential, theta.expand_as(near), near)[-1]) < 1e-9


@theory
@given(eigenvalues=vectors(st.floats(0.1, 10.0)), theta=vectors())
def test_definition_b_3_a_quadratic_satisfies_the_pl_inequality(eigenvalues, theta):
    """definition : PL inequality, with Lambda the smallest eigenvalue."""
    loss = 0.5 * (eigenvalues * theta * theta).sum()
    gradient = eigenvalues * theta
    assert float(gradient.square().sum()) >= 2 * float(eigenvalues.min()) * float(loss) * (1 - 1e-12)


@theory
@given(eigenvalues=vectors(st.floats(0.1, 2.0)), start=vectors(st.floats(-3.0, 3.0)), gamma=st.floats(0.1, 2.0))
def test_appendix_b_mirror_flow_converges_linearly_under_pl_and_inverse_coercivity(eigenvalues, start, gamma):
    """L(t) <= L(0) exp(-2 mu Lambda t) along the flow, integrated by the classical Runge-Kutta method."""
    mu, smallest, dt = gamma, float(eigenvalues.min()), 0.01
    M = Mirror(HyperbolicEntropy(gamma))

    def loss(theta):
        return 0.5 * float((eigenvalues * theta * theta).sum())

    def velocity(theta):
        return -M(theta, eigenvalues * theta)

    theta, first = start, loss(start)
    for k in range(1, 301):
        a = velocity(theta)
        b = velocity(theta + dt / 2 * a)
        c = velocity(theta + dt / 2 * b)
        d = velocity(theta + dt * c)
        theta = theta + dt / 6 * (a + 2 * b + 2 * c + d)
        assert loss(theta) <= first * math.exp(-2 * mu * smallest * k * dt) * (1 + 1e-6) + 1e-300


def test_appendix_b_cosh_loses_the_linear_rate_far_out():
    """Example 3.11's slow convergence: from theta = 12 the loss has hardly moved when gradient flow is done."""
    dt, steps = 0.01, 1000
    theta_cosh = theta_euclidean = float64([12.0])
    for _ in range(steps):
        theta_cosh = theta_cosh - dt * Mirror(CoshEntropy())(theta_cosh, theta_cosh)
        theta_euclidean = theta_euclidean - dt * theta_euclidean
    assert float(theta_euclidean) < 1e-3
    assert float(theta_cosh) > 11.9
