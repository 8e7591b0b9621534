"""What the report shows of the quickstart: a headline, its two tables and their figures. The terminal has them too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.runs import LABELS, contender, finite, pairs, percent, perplexity_changes, spread
from horst.lab.report.tables import Row, Table
from horst.lab.report.transformer_figures import COLOURS, quality_against_sparsity
from horst.lab.report.transformer_sections import BAND, SPREAD, curve_words, weights_figure

OTHERS = ("horst", "horst-l1")


def section(results: Sequence[Result]) -> Content:
    """A sentence, a table and a figure for each part that is done."""
    result = results[0]
    language, vision = (rows_of(result, part) for part in ("language", "vision"))
    summary, tables, figures = [], [], []
    if language:
        theirs = {name: (paper.TABLE6[name][0.0], paper.TABLE6[name][0.5]) for name in ("adamw", "horst")}
        caption = (
            f"Perplexity of the GPT on held-out files after one-shot pruning; less is better. {SPREAD} The paper's "
            f"GPT-2 small goes from {theirs['adamw'][0]:g} dense to {theirs['adamw'][1]:g} at 50% with AdamW, and from "
            f"{theirs['horst'][0]:g} to {theirs['horst'][1]:g} with HORST."
        )
        if any(row["optimizer"] == "horst-l1" for row in language):
            caption += " The option l1, a soft threshold after each step, is not the paper's."
        summary.append(language_words(result))
        tables.append(language_table(results).captioned(caption))
        figures += [
            Figure(
                name="language",
                draw=lambda: quality_against_sparsity(language),
                caption=f"The GPT's perplexity against sparsity, on a logarithmic axis. {BAND}",
                alt=f"Line chart of held-out perplexity against the share of zeros. {curve_words(language)}",
            ),
            weights_figure(
                "weights", "The GPT's weights before pruning, first seed", result.curves["histograms"]["language"]
            ),
        ]
    if vision:
        small = {name: paper.TABLE1["DeiT-small"][name][0.9][0] for name in ("adamw", "horst")}
        caption = (
            f"Test accuracy of the ViT trained with AC/DC; more is better. {SPREAD} The paper's DeiT-small, at 90% and "
            f"learning rate 0.005, has {small['adamw']:g}% with AdamW and {small['horst']:g}% with HORST."
        )
        summary.append(vision_words(result))
        tables.append(vision_table(results).captioned(caption))
        figures.append(
            Figure(
                name="vision",
                draw=lambda: accuracy_by_rate(vision),
                caption="The ViT's accuracy by learning rate; each dot is a seed, each stroke their mean.",
                alt=f"Dots of test accuracy by learning rate. {vision_words(result)}",
            )
        )
    return Content(summary=summary, tables=tables, figures=figures)


def rows_of(result: Result, part: str) -> list[dict[str, Any]]:
    """The rows of ``"language"`` or ``"vision"``."""
    return [row for row in result.rows if row["part"] == part]


def language_table(results: Sequence[Result]) -> Table:
    """Perplexity by optimizer and sparsity, over the seeds, and the differences of the means."""
    rows = rows_of(results[0], "language")
    table = quality_table([dataclasses.replace(results[0], rows=rows)])
    lines = list(table.rows)
    for name in OTHERS:
        if change := perplexity_changes(rows, name):
            levels = sorted({row["sparsity"] for row in rows})
            words = [f"{change[level]:+.1%}" if level in change else "" for level in levels]
            lines.append([f"{_name(rows, name)} against AdamW", "", *words])
    return Table(columns=["perplexity per byte", *table.columns[1:]], rows=lines)


def vision_table(results: Sequence[Result]) -> Table:
    """Accuracy by optimizer and learning rate, over the seeds, and the difference in points."""
    rows = rows_of(results[0], "vision")
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    lines = []
    for name in dict.fromkeys(map(contender, rows)):
        own = [row for row in rows if contender(row) == name]
        cells = [[percent(row["top1"]) for row in own if row["lr"] == lr] for lr in rates]
        seeds = str(len({row["seed"] for row in own}))
        lines.append([name, seeds, *(spread(values, ".1f") if values else "" for values in cells)])
    if points := vision_points(results[0]):
        words = [f"{points[lr]:+.1f}" if lr in points else "" for lr in rates]
        lines.append(["HORST against AdamW, points", "", *words])
    return Table(columns=["accuracy in %", "seeds", *(f"learning rate {lr:g}" for lr in rates)], rows=lines)


def vision_points(result: Result) -> dict[float, float]:
    """By learning rate: HORST's mean accuracy less AdamW's, in points. Seeds that both have."""
    found = pairs(rows_of(result, "vision"), "lr", "top1")
    return {lr: 100 * (mean(horst) - mean(adamw)) for lr, (adamw, horst) in found.items()}


def language_words(result: Result) -> str:
    """The language part in a sentence: the sparsest models that are done."""
    rows = rows_of(result, "language")
    found = {name: own for name in OTHERS if (own := pairs(rows, "sparsity", "perplexity", name))}
    if not found:
        return "No language model of both optimizers is done yet."
    level = max(max(own) for own in found.values())
    parts = []
    for name in (name for name in found if level in found[name]):
        adamw, other = found[name][level]
        change = f"{mean(other) / mean(adamw) - 1:+.1%}{_doubt(adamw, other)}"
        parts.append(f"{mean(other):.2f} with {_name(rows, name)} ({change})")
    pruned = f"With {level:.0%} of its weights pruned" if level else "Dense"
    words = f"the GPT's mean perplexity is {mean(adamw):.2f} with AdamW and {', and '.join(parts)}"
    return f"{pruned}, {words}{'; one seed' if len(adamw) == 1 else ''}."


def vision_words(result: Result) -> str:
    """The vision part in a sentence, wherever it points."""
    rows = rows_of(result, "vision")
    found = pairs(rows, "lr", "top1")
    if not found:
        return "No vision model of both optimizers is done yet."
    parts = []
    for lr, (adamw, horst) in found.items():
        parts.append(f"{100 * (mean(horst) - mean(adamw)):+.1f} at learning rate {lr:g}{_doubt(adamw, horst)}")
    one = " (one seed)" if min(len(adamw) for adamw, _ in found.values()) == 1 else ""
    zeros = f"{rows[0]['sparsity']:.0%} zeros"
    return f"HORST's mean accuracy less AdamW's{one}, in points, with {zeros}: {'; '.join(parts)}."


def accuracy_by_rate(rows: Sequence[Row]) -> Any:
    """Accuracy by learning rate: every seed a dot, the mean a bar beneath."""
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure, axes = new_figure(1, 1, figsize=(5.6, 3.9))
    for i, name in enumerate(names):
        axes.plot([], [], "o", color=COLOURS[name], alpha=0.7, label=LABELS[name])  # for the legend
        for j, lr in enumerate(rates):
            values = finite([percent(row["top1"]) for row in rows if row["optimizer"] == name and row["lr"] == lr])
            if values:
                x, colour = j + 0.3 * (i - (len(names) - 1) / 2), COLOURS[name]
                axes.hlines(mean(values), x - 0.1, x + 0.1, color=colour, linewidth=2.5)
                axes.plot([x] * len(values), values, "o", color=colour, alpha=0.7)
    axes.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3, axis="y", linewidth=0.5)
    axes.legend(fontsize=9, loc="lower right")
    return figure


def _name(rows: Sequence[Row], optimizer: str) -> str:
    """The name of a contender with its strength."""
    return next(contender(row) for row in rows if row["optimizer"] == optimizer)


def _doubt(adamw: Sequence[float], other: Sequence[float]) -> str:
    """A difference no larger than the deviation over seeds must not be read as one."""
    within = len(adamw) > 1 and abs(mean(other) - mean(adamw)) <= max(stdev(adamw), stdev(other))
    return ", within the spread over seeds" if within else ""
