"""The pictures of the page "How it works" show what the optimizer does, and its table what the file holds."""

import math
import pathlib

import how_it_works
import pytest
import torch
from torch.testing import assert_close

from horst.kernels.horst_step.reference import horst_step_reference
from horst.lab.experiments.result import Result
from horst.lab.experiments.weight_histogram import weight_histogram

ROOT = pathlib.Path(__file__).parents[2]


def test_one_step_is_that_of_the_metric():
    sizes = torch.logspace(-3, 1, 9, dtype=torch.float64)
    for alpha in (0.0, 5.0, 20.0):
        assert_close(how_it_works.step_of_algorithm_2(sizes, alpha), 1 + alpha * sizes, rtol=5e-3, atol=0)


@pytest.mark.parametrize("travelled", [1.0, 3.0, 10.0])
def test_many_steps_leave_small_weights_behind_as_drawn(travelled):
    alpha, steps = 5.0, 4000
    shares = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    lr = travelled / alpha / steps * shares  # each weight goes as far as Adam would have moved it
    theta, m, v = torch.zeros(3, 4, dtype=torch.float64)
    for step in range(1, steps + 1):
        theta, m, v = horst_step_reference(
            theta, -torch.ones_like(theta), m, v, step, lr=lr, beta1=0.9, beta2=0.999, eps=0.0, weight_decay=0.0,
            alpha=alpha, beta=0.0,
        )  # fmt: skip
    drawn = {line.get_label(): line for line in how_it_works.step_sizes().axes[1].lines}
    line = drawn[f"HORST, $\\alpha d$ = {travelled:g}"]
    for share, value in zip(shares, theta / theta[-1], strict=True):
        place = [round(float(x), 9) for x in line.get_xdata()].index(float(share))
        assert line.get_ydata()[place] == pytest.approx(float(value), rel=0.01)
    assert float(theta[-1]) == pytest.approx(math.expm1(travelled) / alpha, rel=0.01)


def test_squares_below_a_level_are_those_of_the_weights():
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3  # heavy tails
    points = how_it_works.squares_below(weight_histogram([x], limit=8.0, bins=1601))
    squares = ((x - x.mean()) / x.std()).square().sort().values
    for level in (0.5, 0.7, 0.9):
        exact = float(squares[: int(level * len(x))].sum() / squares.sum())
        assert how_it_works._at(points, level) == pytest.approx(exact, abs=0.002)
    with pytest.raises(ValueError, match=r"the histogram ends at 0\.99"):
        how_it_works._at(points, 1.0)


def test_the_table_says_what_is_pruned_and_what_is_left():
    result = Result.load(ROOT / "results/transformers/table6_gpt2_wikipedia.json")
    table = how_it_works.pruned_squares_table([result])
    assert len(table.rows) == 4
    for name, cell in zip(("adamw", "horst"), table.column("50%")[2:], strict=True):
        own = [row["perplexity"] for row in result.rows if row["optimizer"] == name and row["sparsity"] == 0.5]
        assert cell == f"{own[0]:.2f}"


def test_every_picture_labels_its_axes():
    order = [Result.load(ROOT / "results/geometry/figure3_composition_order.json")]
    table6 = [Result.load(ROOT / "results/transformers/table6_gpt2_wikipedia.json")]
    for figure in (
        how_it_works.steepest_steps(),
        how_it_works.step_sizes(),
        how_it_works.composition_order(order),
        how_it_works.pruned_squares(table6),
    ):
        assert all(axes.get_xlabel() and axes.lines for axes in figure.axes)
        assert figure.axes[0].get_ylabel()
