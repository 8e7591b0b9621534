"""Figures 1 (left), 3 (left), 4 and 8, and the phases of AC/DC, from result files."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.report.figures import new_figure
from horst.lab.report.runs import LABELS, by_level, by_line, contender, short_label, zeros
from horst.lab.report.tables import Row

COLOURS = {
    "adamw": "#0072B2",
    "ham": "#E69F00",
    "horst": "#D55E00",
    "hyperbolic": "#CC79A7",
    "muon": "#009E73",
    "horst-muon": "#8C510A",
    "adamw-penalty": "#56B4E9",
    "adamw-l1": "#6A51A3",
    "horst-l1": "#A50F15",
    "muon-l1": "#00441B",
    "muon-l1-horst": "#E7298A",
    "horst-muon-l1": "#543005",
    "spred": "#737373",
    "dwf": "#252525",
    "pilot": "#BF812D",
    "sign-in": "#35978F",
    "madam": "#F781BF",
    "lmd": "#984EA3",
    "linbreg": "#4DAF4A",
    "adabreg": "#A6D854",
    "scion": "#377EB8",
    "cast": "#FB8072",
    "pat": "#B3B3B3",
    "adamw-clipped-lr": "#1B9E9E",  # in old results alone
}
STYLES = ("-", "--", ":", "-.")


def quality_against_sparsity(rows: Sequence[Row], quality: str = "perplexity", axes: Any = None) -> Any:
    """Figure 4: quality against actual zeros, one line per optimizer, a band over its seeds; on given axes if any."""
    figure, axes = (axes.figure, axes) if axes else new_figure(1, 1, figsize=(5.6, 3.9))
    lines = by_line(rows)
    for name, own in lines.items():
        measured = by_level(own, quality)
        shares = [100 * statistics.mean(zeros(row) for row in own if row["sparsity"] == level) for level in measured]
        found = list(measured.values())
        optimizer = own[0]["optimizer"]
        style = STYLES[[n for n, o in lines.items() if o[0]["optimizer"] == optimizer].index(name) % len(STYLES)]
        look = {"color": COLOURS[optimizer], "linestyle": style, "marker": "o", "markersize": 3.5, "label": name}
        axes.plot(shares, [statistics.mean(values) for values in found], **look)
        if any(len(values) > 1 for values in found):
            low, high = [min(values) for values in found], [max(values) for values in found]
            axes.fill_between(shares, low, high, color=COLOURS[optimizer], alpha=0.2, linewidth=0)
    axes.set_xlabel("zeros among the pruned weights, %")
    axes.set_ylabel(f"validation {quality}")
    if quality == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=9)
    return figure


def weight_distributions(histograms: Mapping[str, Mapping[str, Any]], title: str = "", axes: Any = None) -> Any:
    """Figures 1 (left), 3 (left) and 8: densities of standardised weights on a logarithmic axis.

    Args:
        histograms: What :func:`horst.lab.experiments.weight_histogram.weight_histogram` returns, by label.
        title: Title above the figure.
        axes: Axes to draw on; None makes a figure.
    """
    figure, axes = (axes.figure, axes) if axes else new_figure(1, 1, figsize=(5.6, 3.9))
    for i, (name, histogram) in enumerate(histograms.items()):
        edges, density = histogram["edges"], histogram["density"]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        label = f"{short_label(name)} (kurtosis {histogram['kurtosis']:.1f})"
        colour = COLOURS.get(name, list(COLOURS.values())[i % len(COLOURS)])
        shown = [(x, y) for x, y in zip(middles, density, strict=True) if y > 0]
        axes.plot([x for x, _ in shown], [y for _, y in shown], color=colour, label=label, linewidth=1.3)
    axes.set_yscale("log")
    axes.set_xlabel("weight, in deviations of its tensor")
    axes.set_ylabel("density")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, linewidth=0.5)
    axes.legend(fontsize=9)
    return figure


def phases_and_overlap(phases: Sequence[Mapping[str, Any]]) -> Any:
    """Runs of AC/DC to one sparsity: when masks are on, how much of each the next one keeps, accuracy over time.

    Args:
        phases: Runs of ``curves["phases"]`` of a result. Accuracy is drawn where it was measured on the way.
    """
    several_rates = len({run["lr"] for run in phases}) > 1
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for run in phases:
        name = f"{contender(run)}, lr {run['lr']:g}" if several_rates else contender(run)
        runs.setdefault(name, []).append(run)
    measured = all(len(run["accuracy"]) > 1 for run in phases)
    figure, panels = new_figure(2 + measured, 1, figsize=(6.4, 4.4 + 1.6 * measured))
    changes = phases[0]["records"]
    end = max([record["epoch"] for record in changes] + [point["epoch"] for point in phases[0]["accuracy"]])
    steps = [(0.0, 0.0), *((record["epoch"], 100 * record["sparsity"]) for record in changes)]
    for axes in panels:
        for record, after in zip(changes, [*changes[1:], {"epoch": end}], strict=True):
            if record["phase"] == "sparse":
                axes.axvspan(record["epoch"], after["epoch"], color="#009E73", alpha=0.12, linewidth=0)
        axes.set_xlim(0, end)
        axes.grid(alpha=0.3, linewidth=0.5)
    panels[0].step([*(x for x, _ in steps), end], [*(y for _, y in steps), steps[-1][1]], where="post", color="#009E73")
    panels[0].set_ylim(-4, 104)
    panels[0].set_ylabel("zeros, %")
    names = list(runs)
    for name, own in runs.items():
        optimizer = own[0]["optimizer"]
        style = STYLES[[n for n in names if n.startswith(LABELS[optimizer])].index(name) % len(STYLES)]
        look = {"color": COLOURS[optimizer], "linestyle": style, "label": name}
        overlaps = [
            [(r["epoch"], 100 * r["overlap"]) for r in run["records"] if r["overlap"] is not None] for run in own
        ]
        _line_with_band(panels[1], overlaps, marker="o", markersize=3.5, **look)
        if measured:
            points = [[(point["epoch"], 100 * point["top1"]) for point in run["accuracy"]] for run in own]
            _line_with_band(panels[2], points, linewidth=1.2, **look)
    panels[-1].set_xlabel("epoch")
    panels[1].set_ylabel("kept again, %")
    panels[1].legend(fontsize=9, loc="lower right")
    if measured:
        panels[2].set_ylabel("accuracy, %")
    return figure


def _line_with_band(axes: Any, curves: Sequence[Sequence[tuple[float, float]]], **look: Any) -> None:
    """The mean of curves that share their abscissae, and a band from the least to the greatest."""
    places = [x for x, _ in curves[0]]
    columns = [list(values) for values in zip(*([y for _, y in curve] for curve in curves), strict=True)]
    axes.plot(places, [statistics.mean(values) for values in columns], **look)
    if len(curves) > 1:
        low, high = [min(values) for values in columns], [max(values) for values in columns]
        axes.fill_between(places, low, high, color=look["color"], alpha=0.2, linewidth=0)
