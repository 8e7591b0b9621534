"""Figures 1 (left), 3 (left), 4 and 8: weight distributions and quality against sparsity, from result files."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.experiments.result import Result
from horst.report.figures import new_figure
from horst.report.transformer_tables import LABELS, contender

COLOURS = {"adamw": "#0072B2", "ham": "#E69F00", "horst": "#D55E00"}
STYLES = ("-", "--", ":", "-.")


def quality_against_sparsity(results: Sequence[Result], quality: str = "perplexity") -> Any:
    """Figure 4: a line an optimizer, a band over its seeds."""
    rows = [row for result in results for row in result.rows]
    figure, axes = new_figure(1, 1, figsize=(5.6, 3.9))
    names = list(dict.fromkeys(contender(row) for row in rows))
    for name in names:
        own = [row for row in rows if contender(row) == name]
        levels = sorted({row["sparsity"] for row in own})
        found = [[row[quality] for row in own if row["sparsity"] == level] for level in levels]
        optimizer = own[0]["optimizer"]
        style = STYLES[[n for n in names if n.startswith(LABELS[optimizer])].index(name)]
        colour = COLOURS[optimizer]
        axes.plot(
            [100 * level for level in levels], [statistics.mean(values) for values in found], color=colour,
            linestyle=style, marker="o", markersize=3.5, label=name,
        )  # fmt: skip
        if any(len(values) > 1 for values in found):
            axes.fill_between(
                [100 * level for level in levels], [min(v) for v in found], [max(v) for v in found], color=colour,
                alpha=0.2, linewidth=0,
            )  # fmt: skip
    axes.set_xlabel("zeros in the pruned tensors, %")
    axes.set_ylabel(f"validation {quality}")
    if quality == "perplexity":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.3g}")
        axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=9)
    return figure


def weight_distributions(histograms: Mapping[str, Mapping[str, Any]], title: str = "") -> Any:
    """Figures 1 (left), 3 (left) and 8: densities of standardised weights on a logarithmic axis.

    Args:
        histograms: By label, what :func:`horst.experiments.weight_histogram.weight_histogram` returns.
        title: Above the figure.
    """
    figure, axes = new_figure(1, 1, figsize=(5.6, 3.9))
    for i, (name, histogram) in enumerate(histograms.items()):
        edges, density = histogram["edges"], histogram["density"]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        label = f"{LABELS.get(name, name)} (kurtosis {histogram['kurtosis']:.1f})"
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
