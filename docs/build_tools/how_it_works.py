"""The pictures of the page "How it works": two from formulas, two from result files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horst.kernels.horst_step.reference import horst_step_reference
from horst.lab.experiments.result import Result
from horst.lab.report.figures import figure3, new_figure
from horst.lab.report.runs import LABELS, spread
from horst.lab.report.tables import Table
from horst.lab.report.transformer_figures import COLOURS
from horst.operators import L1, L2, LInf, Norm, Steepest

ALPHA = 5.0  # the paper's
_GRADIENT = (1.0, 0.4)
_GREEN, _GREY = "#009E73", "0.45"


def steepest_steps(_: Sequence[Result] = ()) -> Any:
    """Definition 3.4 for two weights: the unit ball of three norms, a gradient, and the step each takes along it."""
    circle = [(math.cos(2 * math.pi * k / 90), math.sin(2 * math.pi * k / 90)) for k in range(91)]
    panels: list[tuple[str, Norm, list[tuple[float, float]]]] = [
        ("$L_\\infty$: sign descent, and nearly Adam", LInf(), [(1, 1), (1, -1), (-1, -1), (-1, 1), (1, 1)]),
        ("$L_2$: the gradient, normalised", L2(), circle),
        ("$L_1$: coordinate descent", L1(), [(1, 0), (0, -1), (-1, 0), (0, 1), (1, 0)]),
    ]
    figure, all_axes = new_figure(1, 3, figsize=(9.6, 3.5), sharey=True)
    for axes, (title, norm, ball) in zip(all_axes, panels, strict=True):
        axes.fill([x for x, _ in ball], [y for _, y in ball], color=_GREEN, alpha=0.15, linewidth=0)
        axes.plot([x for x, _ in ball], [y for _, y in ball], color=_GREEN, linewidth=1)
        _arrow(axes, [1.55 * part for part in _GRADIENT], _GREY, "gradient")
        step = Steepest(norm)(torch.zeros(2), torch.tensor(_GRADIENT))
        _arrow(axes, step.tolist(), COLOURS["horst"], "step")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("first weight")
        axes.set_xlim(-1.25, 1.8)
        axes.set_ylim(-1.25, 1.25)
        axes.set_aspect("equal")
        axes.grid(alpha=0.3, linewidth=0.5)
    all_axes[0].set_ylabel("second weight")
    all_axes[0].legend(fontsize=9, loc="lower right")
    return figure


def step_sizes(_: Sequence[Result] = ()) -> Any:
    """One step by the size of the weight, and what many of them make of weights that Adam would have spread evenly."""
    figure, (left, right) = new_figure(1, 2, figsize=(9.6, 3.9))
    sizes = torch.logspace(-2, 1, 61, dtype=torch.float64)
    left.axvline(1 / ALPHA, color=_GREY, linewidth=1, linestyle=":")
    left.annotate(
        "$1/\\alpha$", (1 / ALPHA, 0.055), xytext=(4, 0), textcoords="offset points", color="0.35", fontsize=9
    )
    left.plot(sizes, torch.ones_like(sizes), color=COLOURS["adamw"], label="AdamW: 1")
    left.plot(sizes, ALPHA * sizes, color=COLOURS["ham"], label="mirror step: $\\alpha|\\theta|$")
    left.plot(sizes, 1 + ALPHA * sizes, color=COLOURS["horst"], label="HORST: $1 + \\alpha|\\theta|$")
    few = sizes[::6]
    left.plot(
        few, step_of_algorithm_2(few, ALPHA), "o", color=COLOURS["horst"], markersize=3.5, label="Algorithm 2, one step"
    )
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("size of the weight, $|\\theta|$")
    left.set_ylabel("step, in learning rates")
    left.set_title(f"(a) one step, $\\alpha$ = {ALPHA:g}", fontsize=10)
    left.legend(fontsize=9)
    shares = torch.linspace(0, 1, 101, dtype=torch.float64)
    right.plot(shares, shares, color=COLOURS["adamw"], label="AdamW")
    for travelled, style in ((1.0, ":"), (3.0, "--"), (10.0, "-")):
        values = torch.expm1(travelled * shares) / math.expm1(travelled)
        right.plot(shares, values, color=COLOURS["horst"], linestyle=style, label=f"HORST, $\\alpha d$ = {travelled:g}")
    right.set_xlabel("Adam's weight, as a share of its largest")
    right.set_ylabel("HORST's, as a share of its largest")
    right.set_title("(b) many steps: small weights fall behind", fontsize=10)
    right.legend(fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.5)
    return figure


def step_of_algorithm_2(sizes: torch.Tensor, alpha: float, lr: float = 1e-4) -> torch.Tensor:
    """How far HORST's first step moves weights of these sizes that their gradient pushes outwards, in learning rates.

    Example:
        >>> step_of_algorithm_2(torch.tensor([0.0, 1.0], dtype=torch.float64), alpha=5.0).round(decimals=2).tolist()
        [1.0, 6.0]
    """
    zeros = torch.zeros_like(sizes)
    settings = {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 0.0, "weight_decay": 0.0, "alpha": alpha, "beta": 0.0}
    moved, _, _ = horst_step_reference(sizes, -torch.ones_like(sizes), zeros, zeros, 1, **settings)
    return (moved - sizes) / lr


def composition_order(results: Sequence[Result]) -> Any:
    """Figure 3 (right): the mirror before Adam, and after it."""
    return figure3(results[0])


def pruned_squares(results: Sequence[Result]) -> Any:
    """How much of the squared weights the smallest ones hold, of the models of Table 6 before pruning."""
    figure, axes = new_figure(1, 1, figsize=(5.6, 3.9))
    histograms = results[0].curves["histograms"]
    for name in ("adamw", "horst"):
        points = squares_below(histograms[name])
        label = f"{LABELS[name]} (kurtosis {histograms[name]['kurtosis']:.1f})"
        axes.plot([100 * x for x, _ in points], [100 * y for _, y in points], color=COLOURS[name], label=label)
    axes.set_xlim(0, 90)
    axes.set_ylim(0, 60)
    axes.set_xlabel("smallest weights, % of each tensor")
    axes.set_ylabel("what they hold of the sum of squares, %")
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=9, loc="upper left")
    return figure


def pruned_squares_table(results: Sequence[Result]) -> Table:
    """What pruning takes of the squares, and what is left of the quality: Table 6's file again."""
    rows, histograms = results[0].rows, results[0].curves["histograms"]
    levels = sorted({row["sparsity"] for row in rows if row["sparsity"]})
    lines = []
    for name in ("adamw", "horst"):
        points = squares_below(histograms[name])
        lines.append([f"{LABELS[name]}, squares removed", *(f"{_at(points, level):.1%}" for level in levels)])
    for name in ("adamw", "horst"):
        own = {row["sparsity"]: row["perplexity"] for row in rows if row["optimizer"] == name}
        lines.append([f"{LABELS[name]}, perplexity", *(spread([own[level]], ".2f") for level in levels)])
    return Table(columns=["smallest weights pruned (one seed)", *(f"{level:.0%}" for level in levels)], rows=lines)


def squares_below(histogram: Mapping[str, Any]) -> list[tuple[float, float]]:
    """For each magnitude at a bin's edge: the share of weights below it, and their share of the sum of squares.

    Within a bin weights count as evenly spread. The sum is known although tails are cut: weights of deviation 1 have a
    mean square of 1.

    Args:
        histogram: Histogram of :func:`horst.lab.experiments.weight_histogram.weight_histogram`.

    Example:
        >>> evenly = {"edges": [-(3**0.5), 0.0, 3**0.5], "density": [12**-0.5] * 2}
        >>> [(round(x, 9), round(y, 9)) for x, y in squares_below(evenly)]
        [(0.0, 0.0), (1.0, 1.0)]
    """
    bins: dict[float, tuple[float, float]] = {}  # by outer edge: share of the weights, and of the squares
    for (low, high), density in zip(itertools.pairwise(histogram["edges"]), histogram["density"], strict=True):
        weights, squares = density * (high - low), density * (high**3 - low**3) / 3
        outer = round(max(abs(low), abs(high)), 9)
        before = bins.get(outer, (0.0, 0.0))
        bins[outer] = (before[0] + weights, before[1] + squares)
    points = [(0.0, 0.0)]
    for outer in sorted(bins):
        points.append((points[-1][0] + bins[outer][0], points[-1][1] + bins[outer][1]))
    return points


def _at(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of the line through ``points``."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low + (high - low) * (x - left) / (right - left)
    raise ValueError(f"the histogram ends at {points[-1][0]:.3f} of the weights, {x} is beyond it.")


def _arrow(axes: Any, to: Sequence[float], colour: str, label: str) -> None:
    axes.plot([0, to[0]], [0, to[1]], color=colour, linewidth=2, label=label, solid_capstyle="butt")
    axes.annotate("", to, xytext=(0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 2})
