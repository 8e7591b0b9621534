"""The figure of a comparison of language models: perplexity against actual zeros."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from horst.lab.experiments.result import Result
from horst.lab.report.compare import DENSE, WAYS, Entry, Place, criterion, entries, levels_of, not_told_apart, pairs
from horst.lab.report.document import Figure
from horst.lab.report.figures import new_figure

SHOWN = 8  # contenders of a panel
CROPPED = 5.0  # times the best dense model's perplexity: the axis ends there
# Okabe and Ito's colours without yellow, which is too pale on white, and with grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B4513")
_MARKS = "osD^vPX*"
_ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)  # ticks of a logarithmic axis


def figure(results: Sequence[Result]) -> Figure:
    """The figure with its caption, to be drawn when it is needed."""
    way = WAYS.get(criterion(results[0])[0], criterion(results[0])[0])
    return Figure(
        name="zeros",
        draw=functools.partial(against_zeros, results),
        caption=(
            f"Perplexity, pruned by {way}, against actual zeros; bars are the range over seeds. Left: dashed without "
            "the mirror step, solid with it. Right: all that are best at some level, or that the best there does not "
            "beat in every seed; the first contender is dotted."
        ),
        alt="Line charts of perplexity against the share of zeros; the table has the same numbers.",
    )


def against_zeros(results: Sequence[Result]) -> Any:
    """Perplexity against the actual share of zeros: what the mirror step adds, and who is best at some level.

    Half of the horizontal axis would be empty, so the part below the first level is compressed.
    """
    result = results[0]
    found = [entry for entry in entries(result) if entry.mean(criterion(result)) is not None]
    places = [DENSE, *((criterion(result)[0], level) for level in levels_of(result))]
    panels = {
        "without (dashed) and with the mirror step": _paired(found),
        "the best at some level": _leading(result, found, places),
    }
    panels = {title: lines for title, lines in panels.items() if lines}
    figure, axes = new_figure(1, len(panels), figsize=(1.0 + 4.8 * len(panels), 4.6), sharey=True)
    best = min(filter(None, (entry.mean(DENSE) for entry in found)), default=1.0)
    low, high = 0.95 * best, CROPPED * best
    levels = [0.0, *(100 * level for level in levels_of(result))]
    for panel, (title, lines) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        _axes(panel, levels, low, high)
        panel.set_title(title, fontsize=10)
        ends = {}
        for entry, look in lines:
            ends[entry.name] = (_line(panel, entry, places, look), look["color"])
        _label(panel, ends, low, high)
    way = WAYS.get(criterion(result)[0], criterion(result)[0])
    figure.axes[0].set_ylabel(f"perplexity, pruned by {way}")
    return figure


def _paired(found: Sequence[Entry]) -> list[tuple[Entry, dict[str, Any]]]:
    """Both of each pair in one colour: dashed without the mirror step, solid with it."""
    by_name = {entry.name: entry for entry in found}
    lines: list[tuple[Entry, dict[str, Any]]] = []
    for (name, other), colour, mark in zip(pairs(by_name).items(), _COLOURS, _MARKS, strict=False):
        lines.append((by_name[other], {"color": colour, "marker": mark, "linestyle": "--", "markerfacecolor": "white"}))
        lines.append((by_name[name], {"color": colour, "marker": mark, "linestyle": "-"}))
    return lines


def _leading(result: Result, found: Sequence[Entry], places: Sequence[Place]) -> list[tuple[Entry, dict[str, Any]]]:
    """Those that are not beaten at some place, and the first contender, dotted; without seeds the best few."""
    first = next(iter(result.curves["costs"]))
    leaders = {name for place in places for name in not_told_apart(found, place)}
    chosen = [entry for entry in found if entry.name in leaders and entry.name != first] or list(found)
    lines: list[tuple[Entry, dict[str, Any]]] = [
        (entry, {"color": colour, "marker": mark, "linestyle": "-"})
        for entry, colour, mark in zip(chosen[:SHOWN], _COLOURS, _MARKS, strict=False)
    ]
    shown = {entry.name for entry, _ in lines}
    dotted = [entry for entry in found if entry.name == first and entry.name not in shown]
    return [*lines, *((entry, {"color": "#000000", "linestyle": ":"}) for entry in dotted)]


def _line(axes: Any, entry: Entry, places: Sequence[Place], look: dict[str, Any]) -> float:
    """Draw a contender; return where its line ends."""
    means = {place: mean for place in places if (mean := entry.mean(place)) is not None}
    x = [100 * (entry.zeros(place) or 0.0) for place in means]
    axes.plot(x, list(means.values()), **look, markersize=5, linewidth=1.6, label=entry.name)
    for at, place in zip(x, means, strict=True):
        values = list(entry.values(place).values())
        if len(values) > 1:
            axes.vlines(at, min(values), max(values), color=look["color"], alpha=0.4, linewidth=2.5, zorder=1)
    return list(means.values())[-1]


def _axes(axes: Any, levels: Sequence[float], low: float, high: float) -> None:
    """Perplexity on a logarithmic axis with round ticks; zeros in percent, compressed below the first level."""
    places = [0.0, *(1.5 + (level - levels[1]) / 10 for level in levels[1:])]
    # a little room on both sides for marks
    x, at = [levels[0] - 10, *levels, levels[-1] + 10], [places[0] - 0.3, *places, places[-1] + 1]
    axes.set_xscale("function", functions=(lambda v: np.interp(v, x, at), lambda v: np.interp(v, at, x)))
    axes.set_xlim(levels[0] - 3, levels[-1] + 1)
    axes.set_xticks(list(levels), [f"{level:.0f}" for level in levels])
    axes.set_xlabel("zeros among the pruned weights, %")
    axes.set_yscale("log")
    ticks = [value for power in range(-2, 7) for each in _ROUND if low <= (value := each * 10.0**power) <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.grid(alpha=0.3, linewidth=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(axes: Any, ends: dict[str, tuple[float, str]], low: float, high: float) -> None:
    """Names beside the ends of the lines, apart from each other."""
    apart = 0.05
    order = sorted(ends, key=lambda name: ends[name][0])
    heights: list[float] = []
    for name in order:
        height = np.log(min(ends[name][0], high) / low) / np.log(high / low)
        heights.append(max(height, heights[-1] + apart) if heights else height)
    over = max(0.0, heights[-1] - 1.0)
    for name, height in zip(order, heights, strict=True):
        axes.annotate(
            name, (1.0, height - over), xycoords="axes fraction", xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=9, color=ends[name][1], annotation_clip=False,
        )  # fmt: skip
