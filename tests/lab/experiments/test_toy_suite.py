"""The batched runner against plain optimizers, and the order of the operators that Appendix D shows."""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from horst import cli
from horst.lab.experiments import figure2_dichotomy, toy_ablation, toy_suite
from horst.lab.experiments.methods import COSH_SWEEP, DiagonalMethod, factor_gradients, methods_by_name
from horst.lab.experiments.result import Result
from horst.operators import Adam, Identity, Mirror
from horst.operators.potentials import Entropy
from horst.optimizers.operator_optimizer import OperatorOptimizer

TINY = {"steps": 40, "seeds": (0, 1), "n_samples": 6, "n_features": 10, "snapshots": 5}


def by_autograd(make_optimizer, z, start, steps):
    """One run the ordinary way: a parameter, the loss, backward, an optimizer."""
    theta = torch.nn.Parameter(start.clone())
    optimizer = make_optimizer([theta])
    for _ in range(steps):
        optimizer.zero_grad()
        torch.exp(-(z @ theta)).mean().backward()
        optimizer.step()
    return theta.detach()


@pytest.mark.parametrize(
    ("name", "make_optimizer"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.01)),
        ("exp_sgd", lambda p: OperatorOptimizer(p, Mirror(Entropy()), lr=0.01, exact_mirror=True)),
        ("exp_adam", lambda p: OperatorOptimizer(p, Mirror(Entropy()) @ Adam(), lr=0.01, exact_mirror=True)),
        ("adam_exp", lambda p: OperatorOptimizer(p, Adam() @ Mirror(Entropy()), lr=0.01)),
    ],
)
def test_the_batched_run_is_the_ordinary_one(name, make_optimizer):
    config = toy_suite.Config(**TINY)
    data, trajectories = toy_suite.simulate_config(config)  # all methods together
    start = toy_suite.start_values(config, 2)
    for i in range(2):
        expected = by_autograd(make_optimizer, data.z[i], start[i], config.steps)
        assert_close(trajectories[name].thetas[-1, i, 0], expected, rtol=1e-10, atol=1e-12)


def test_horst_with_alpha_zero_is_adam_and_alpha_matters():
    config = toy_suite.Config(**TINY, horst_alpha=0.0, ham_alpha=0.0)
    _, found = toy_suite.simulate_config(dataclasses.replace(config, methods=("adam", "horst", "ham")))
    assert_close(found["horst"].thetas, found["adam"].thetas, rtol=1e-10, atol=1e-12)
    assert_close(found["ham"].thetas, found["adam"].thetas, rtol=1e-10, atol=1e-12)
    _, other = toy_suite.simulate_config(toy_suite.Config(**TINY, methods=("horst", "ham")))
    assert not torch.allclose(other["horst"].thetas[-1], found["horst"].thetas[-1])
    assert not torch.allclose(other["ham"].thetas[-1], found["ham"].thetas[-1])


def test_every_learning_rate_of_the_sweep_is_a_run_of_its_own():
    config = toy_suite.Config(**TINY)
    data, swept = toy_suite.simulate_config(dataclasses.replace(config, methods=("cosh",)))
    assert swept["cosh"].thetas.shape[2] == len(COSH_SWEEP)
    cosh = methods_by_name()["cosh"]
    start = toy_suite.start_values(config, 2)
    for i in (0, 7, 11):
        single = dataclasses.replace(cosh, lrs=(COSH_SWEEP[i],))
        alone = toy_suite.simulate([single], data.z, start, steps=config.steps, snapshots=5)["cosh"]
        assert_close(alone.thetas[:, :, 0], swept["cosh"].thetas[:, :, i])


def test_the_best_rate_is_that_of_the_smallest_mean_loss_and_never_one_that_diverged():
    method = methods_by_name()["cosh"]
    losses = torch.tensor([[[float("nan"), -1.0, -2.0], [-9.0, -1.0, -2.0]]])
    assert toy_suite.Trajectory(method, [1], torch.zeros(1, 2, 3, 1), losses).best_rate == 2


def test_the_diagonal_network_is_its_factors_trained_the_ordinary_way():
    config = toy_suite.Config(**TINY)
    data, start = toy_suite.problem(config)
    for operator, optimizer_class in ((Identity(), torch.optim.SGD), (Adam(), torch.optim.Adam)):
        method = DiagonalMethod(name="d", label="d", operator=operator, depth=2)
        found = toy_suite.simulate([method], data.z, start, steps=40)["d"].thetas[-1, 0, 0]
        factors = torch.nn.Parameter(torch.full((2, 10), 0.1, dtype=torch.float64))
        optimizer = optimizer_class([factors], lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            torch.exp(-(data.z[0] @ factors.prod(-2))).mean().backward()
            optimizer.step()
        assert_close(found, factors.prod(-2).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_factor_gradients_are_autograds(depth):
    factors = torch.randn(3, depth, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[0, 0, 0] = 0.0  # division by a factor would fail here
    factors.requires_grad_()
    g = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((factors.prod(-2) * g).sum(), factors)[0]
    assert_close(factor_gradients(factors.detach(), g), expected)


def test_measures_by_hand():
    data, _ = toy_suite.problem(toy_suite.Config(**{**TINY, "n_features": 4, "seeds": (0,)}))
    theta = torch.tensor([[2.0, -4.0, 1.0, 0.0]], dtype=torch.float64)
    found = toy_suite.measures(theta, data, {"l1": torch.tensor([[0.0, 0.0, 3.0, 0.0]], dtype=torch.float64)})
    assert float(found["off_support"]) == 0.125  # (1 + 0) / 2 over 4
    assert float(found["off_mass"]) == pytest.approx(1 / 7)
    assert float(found["leads"]) == 1.0
    assert float(found["angle_l1"]) == pytest.approx(77.3956, abs=1e-3)  # acos(1 / sqrt(21))
    assert float(toy_suite.measures(theta.flip(-1), data, {})["leads"]) == 0.0


def test_a_max_margin_solution_has_norm_ratio_one_in_its_own_geometry():
    data, _ = toy_suite.problem(toy_suite.Config(**TINY))
    solutions = toy_suite.solve_max_margins(data)
    for geometry, theta in solutions.items():
        found = toy_suite.measures(theta, data, solutions)
        assert_close(found[f"norm_ratio_{geometry}"], torch.ones(2, dtype=torch.float64))
        assert bool((found[f"angle_{geometry}"] < 1e-5).all())
    unseparated = toy_suite.measures(-solutions["l2"], data, solutions)
    assert bool(torch.isinf(unseparated["norm_ratio_l1"]).all())


def test_the_runner_gives_torch_its_threads_back():
    before = torch.get_num_threads()
    toy_suite.simulate_config(toy_suite.Config(**TINY, methods=("sgd",)))
    assert torch.get_num_threads() == before


def test_snapshots_begin_at_zero_and_end_at_the_last_step():
    _, found = toy_suite.simulate_config(toy_suite.Config(**TINY, methods=("sgd",)))
    times = found["sgd"].times
    assert times[0] == 0
    assert times[-1] == 40
    assert times == sorted(set(times))
    assert len(found["sgd"].thetas) == len(times)


def test_random_starts_differ_by_seed_and_repeat():
    config = toy_suite.Config(**TINY, init="random_signs")
    first, second = toy_suite.start_values(config, 2), toy_suite.start_values(config, 2)
    assert_close(first, second)
    assert not torch.equal(first[0], first[1])
    assert_close(first.abs(), torch.full_like(first, 0.01))


def test_bad_configs_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"unknown methods \['adamw'\]. Choose from"):
        toy_suite.run(toy_suite.Config(**TINY, methods=("adamw",)))
    with pytest.raises(ValueError, match="steps >= 1"):
        toy_suite.Config(steps=0)
    with pytest.raises(ValueError, match="unknown variants"):
        toy_ablation.Config(variants=("float16",))


def test_appendix_d_the_order_of_the_operators_comes_out():
    """The paper's setting, with the mean off-support magnitudes of a float64 prototype."""
    names = ("sgd", "exp_sgd", "hyperbolic", "adam", "exp_adam", "adam_exp", "cosh")
    data, trajectories = toy_suite.simulate_config(toy_suite.Config(snapshots=2, methods=names))
    rows = toy_suite.summary_rows(trajectories, data, toy_suite.solve_max_margins(data))
    found = {row["method"]: row["off_support"] for row in rows}
    expected = {"adam": 0.44, "adam_exp": 0.43, "cosh": 0.24, "sgd": 0.12, "exp_adam": 0.08, "exp_sgd": 0.009}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=0.05)
    assert found["hyperbolic"] == pytest.approx(found["exp_sgd"], rel=0.01)
    best = {row["method"]: row["lr"] for row in rows}
    assert best["cosh"] == 0.9  # Appendix D's best of the sweep
    angles = {row["method"]: {g: row[f"angle_{g}"] for g in ("l1", "l2", "linf")} for row in rows}
    for name, nearest in (("sgd", "l2"), ("exp_sgd", "l1"), ("adam", "linf"), ("adam_exp", "linf")):
        assert min(angles[name], key=angles[name].get) == nearest


@pytest.mark.parametrize(
    ("recipe", "experiment"),
    [
        ("figure1_right", "figure1_diagonal_network"),
        ("figure2", "figure2_dichotomy"),
        ("figure3_right", "figure3_composition_order"),
        ("figure5", "figure5_additive_vs_multiplicative"),
        ("figure6", "figure6_mirror_maps"),
        ("figure7", "figure7_loss_curves"),
        ("toy_ablation", "toy_ablation"),
        ("toy_suite", "toy_suite"),
    ],
)
def test_every_experiment_runs_from_the_command_line(recipe, experiment, tmp_path):
    out = tmp_path / "result.json"
    options = ["--steps", "20", "--n-samples", "6", "--n-features", "10", "--seeds", "0", "1", "--out", str(out)]
    assert cli.main(["run", recipe, "--no-figures", *options]) == 0
    result = Result.load(out)
    assert result.experiment == experiment
    assert result.config["steps"] == 20
    assert result.rows
    assert str(tmp_path) not in out.read_text()


def test_figure_2_the_four_quadrants_come_out_of_the_probes():
    rows = figure2_dichotomy.run(figure2_dichotomy.Config(**TINY)).rows
    by_name = {row["operator"]: row for row in rows}
    for name in ("Sign descent", "Coordinate descent"):
        assert (by_name[name]["linear"], by_name[name]["bounded"]) == (False, True)
    for name in ("cosh entropy", "Hyperbolic entropy"):
        assert (by_name[name]["linear"], by_name[name]["bounded"]) == (True, False)
    assert by_name["cosh entropy"]["coercive"] is False
    assert by_name["Hyperbolic entropy"]["coercive"] is True
    assert by_name["Hyperbolic entropy"]["mu"] == pytest.approx(1e-3)
    assert by_name["Hyperbolic after sign"]["bounded"] is True
    assert by_name["Hyperbolic after Adam"]["bounded"] is True
