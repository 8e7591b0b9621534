"""Theorem 4.7 (theorem:implicit-bias; Theorem C.3 in the appendix) on problems small enough to test."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from horst import cli
from horst.lab.data.max_margin import l1_dual_correlations, max_margin
from horst.lab.data.separable import sparse_teacher_data
from horst.lab.experiments import theorem4_7_implicit_bias
from horst.lab.experiments.methods import factor_gradients
from horst.lab.experiments.result import Result
from horst.lab.experiments.steepest_mirror_flow import integrate, predicted_exponent
from horst.operators import Entropy, LInf, Lp, Mirror, Steepest

START = torch.full((12,), 0.01, dtype=torch.float64)


@pytest.fixture(scope="module")
def z():
    return sparse_teacher_data((0,), n_samples=6, n_features=12).z[0]


def margin_gap(z, theta, solution):
    return 1 - float((z @ theta).min() / theta.abs().sum() * solution.abs().sum())


@pytest.mark.parametrize("p", [2, 3, 4])
def test_theorem_4_7_the_flow_tends_to_the_l1_max_margin_of_its_signs(z, p):
    """The gap shrinks with the norm, without end, at least at the rate the multipliers predict (until rounding)."""
    solution = max_margin(z, "l1", signs=START.sign())
    flow = integrate(z, p, START, log_norm_end=13.0)
    gaps = [margin_gap(z, flow.at(log_norm), solution) for log_norm in (4.0, 7.0, 10.0, 13.0)]
    assert all(gap > 0 for gap in gaps)
    assert all(later < 0.75 * earlier for earlier, later in itertools.pairwise(gaps))
    assert gaps[-1] < 0.03


def test_theorem_4_7_for_two_factors_gets_as_close_as_asked(z):
    solution = max_margin(z, "l1", signs=START.sign())
    flow = integrate(z, 2, START, log_norm_end=14.0)
    assert margin_gap(z, flow.theta[-1], solution) < 1e-3
    assert float(torch.cosine_similarity(flow.theta[-1], solution, dim=0)) > 0.999


def test_theorem_4_7_with_doubled_features_reaches_the_global_solution(z):
    """theta = u - v: no sign is out of reach, and the restricted solution is the global one."""
    doubled, start = torch.cat([z, -z], dim=1), torch.cat([START, START])
    free = max_margin(z, "l1")
    assert float(max_margin(doubled, "l1", signs=start.sign()).sum()) == pytest.approx(float(free.abs().sum()))
    flow = integrate(doubled, 2, start, log_norm_end=13.0)
    theta = flow.theta[-1, :12] - flow.theta[-1, 12:]
    assert margin_gap(z, theta, free) < 0.01


def test_theorem_4_7_as_a_statement_on_theta_needs_the_right_signs():
    """With the sign of a needed feature wrong, the flow stays away from the (convex) problem's only KKT point."""
    z = torch.tensor([[1.0, -4.0], [1.0, -3.0]], dtype=torch.float64)
    free = max_margin(z, "l1")
    assert_close(free, torch.tensor([0.0, -1 / 3], dtype=torch.float64))
    flow = integrate(z, 2, torch.full((2,), 0.01, dtype=torch.float64), log_norm_end=10.0)
    assert_close(flow.theta[-1], torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)


def test_the_open_limit_stands_still_at_p_infinity(z):
    """At p = infinity every feature of the right sign grows alike: the gap stops, and remembers the start."""
    solution = max_margin(z, "l1", signs=START.sign())
    flow = integrate(z, math.inf, START, log_norm_end=12.0)
    early, late = (margin_gap(z, flow.at(value), solution) for value in (8.0, 12.0))
    assert late > 0.05
    assert late > 0.9 * early
    finite = integrate(z, 3, START, log_norm_end=12.0)
    assert margin_gap(z, finite.theta[-1], solution) < 0.5 * late


def test_the_flow_is_the_limit_of_small_steps_of_the_operator(z):
    """The integrator against plain first-order steps of Mirror(Entropy) @ Steepest(Lp): the same path in norm."""
    for p, norm, smoothing in ((2, Lp(2), 1e-3), (3, Lp(3), 1e-6), (math.inf, LInf(), 1e-6)):
        operator, theta = Mirror(Entropy()) @ Steepest(norm), START.clone()
        while float(theta.sum()) < math.exp(2.0):
            g = -(torch.softmax(-(z @ theta), dim=0) @ z)  # a multiple of the gradient; the operator ignores its size
            theta = theta - 2e-3 * operator(theta, g)
        flow = integrate(z, p, START, log_norm_end=2.0, smoothing=smoothing)
        assert_close(flow.theta[-1], theta / theta.sum(), rtol=0, atol=3e-4)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_theorem_c_3_steepest_descent_on_p_balanced_factors_is_the_same_flow(z, p):
    """theorem : appendix implicit bias: the proof's reparameterisation, and the balance it rests on."""
    dt, theta = 1e-3, START.clone()
    factors = (START ** (1 / p)).expand(p, 12).clone()
    for _ in range(2000):
        g = -(torch.softmax(-(z @ theta), dim=0) @ z)
        theta = theta - dt * theta.abs() * g.sign() * g.abs() ** (1 / (p - 1))
        g = -(torch.softmax(-(z @ factors.prod(-2)), dim=0) @ z)
        by_factor = factor_gradients(factors, g)
        # Each of the p factors moves theta, hence dt / p.
        factors = factors - dt / p * by_factor.sign() * by_factor.abs() ** (1 / (p - 1))
    assert_close(factors, factors[:1].expand_as(factors))
    assert_close(factors.prod(-2), theta, rtol=0.01, atol=1e-4)


def test_the_predicted_exponent_falls_with_p_and_vanishes_at_infinity(z):
    c = l1_dual_correlations(z, signs=START.sign())
    values = [predicted_exponent(c, p) for p in (2, 3, 4, 8, 16, math.inf)]
    assert all(later < earlier for earlier, later in itertools.pairwise(values))
    assert values[-1] == 0.0
    assert predicted_exponent(torch.tensor([1.0, -2.0]), 2) == 1.0


def test_a_flow_without_a_solution_says_so():
    z = torch.tensor([[-1.0, -2.0], [-2.0, -1.0]], dtype=torch.float64)  # no positive theta separates it
    with pytest.raises(RuntimeError, match="did not reach a norm"):
        integrate(z, 2, torch.full((2,), 0.01, dtype=torch.float64), log_norm_end=5.0)


def test_bad_flows_are_refused(z):
    with pytest.raises(ValueError, match="p must be at least 2"):
        integrate(z, 1.5, START)
    with pytest.raises(ValueError, match="never leaves zero"):
        integrate(z, 2, torch.zeros(12, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"unknown setups \['negative'\]"):
        theorem4_7_implicit_bias.Config(setups=("negative",))


def test_the_experiment_runs_from_the_command_line(tmp_path):
    out = tmp_path / "result.json"
    options = ["--n-samples", "5", "--n-features", "8", "--seeds", "0", "--log-norm-end", "5", "--p-values", "2", "inf"]
    assert cli.main(["run", "theorem4_7", "--no-figures", *options, "--out", str(out)]) == 0
    result = Result.load(out)
    assert result.config["p_values"] == [2.0, "inf"]
    assert {row["setup"] for row in result.rows} == {"positive", "pairs", "random_signs"}
    assert len([row for row in result.rows if row["p"] == "inf"]) >= 3  # with the two other widths
