"""What the report shows of the quickstart: a headline, its two tables and their figures. The terminal has them too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Sized
from statistics import mean, stdev
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.runs import LABELS, contender, finite, pairs, percent, short_label, spread
from horst.lab.report.tables import Row, Table
from horst.lab.report.transformer_figures import COLOURS, quality_against_sparsity, weight_distributions
from horst.lab.report.transformer_sections import BAND, SHAPES, SPREAD, curve_words, kurtosis_words

Panels = list[tuple[str, Callable[..., Any]]]

NOISE = "* is a difference within the spread over seeds."
PANEL = (5.6, 3.9)


def section(results: Sequence[Result]) -> Content:
    """The headline and its figure, a table for each part that is done, and the weights."""
    result = results[0]
    language, vision = (rows_of(result, part) for part in ("language", "vision"))
    tables = []
    if language:
        theirs = {name: (paper.TABLE6[name][0.0], paper.TABLE6[name][0.5]) for name in ("adamw", "horst")}
        caption = (
            f"Perplexity of the GPT on held-out files after one-shot pruning; less is better. {SPREAD} {NOISE} The "
            f"paper's GPT-2 small goes from {theirs['adamw'][0]:g} dense to {theirs['adamw'][1]:g} at 50% with AdamW, "
            f"and from {theirs['horst'][0]:g} to {theirs['horst'][1]:g} with HORST. The option l1, a soft threshold "
            "after each step, is not the paper's."
        )
        tables.append(language_table(results).captioned(caption))
    if vision:
        small = {name: paper.TABLE1["DeiT-small"][name][0.9][0] for name in ("adamw", "horst")}
        caption = (
            f"Test accuracy of the ViT with {vision[0]['sparsity']:.0%} zeros, trained with AC/DC; more is better. The "
            f"paper's DeiT-small, at 90% and learning rate 0.005, has {small['adamw']:g}% with AdamW and "
            f"{small['horst']:g}% with HORST."
        )
        tables.append(vision_table(results).captioned(caption))
    if rows_of(result, "recovery"):
        tables.append(recovery_table(results).captioned(f"{recovery_words(result)} Perplexity; less is better."))
    panels: Panels = []
    words, alts = [], []
    if language:
        panels.append(("GPT, one-shot pruning", lambda axes: quality_against_sparsity(language, axes=axes)))
        words.append(f"Perplexity on a logarithmic axis; less is better. {BAND}")
        alts.append(f"Line chart of held-out perplexity against the share of zeros. {curve_words(language)}")
    if vision:
        panels.append((f"ViT, AC/DC to {vision[0]['sparsity']:.0%} zeros", lambda axes: accuracy_by_rate(vision, axes)))
        words.append("Accuracy: more is better; each dot is a seed, each stroke their mean.")
        alts.append(f"Dots of test accuracy by learning rate. {vision_words(result)}")
    overview = Figure(name="overview", draw=lambda: beside(panels), caption=" ".join(words), alt=" ".join(alts))
    return Content(
        summary=[headline(result)] if language else [vision_words(result)],
        tables=tables,
        figures=[overview, *_weights(result.curves["histograms"])],
    )


def rows_of(result: Result, part: str) -> list[dict[str, Any]]:
    """The rows of ``"language"`` or ``"vision"``."""
    return [row for row in result.rows if row["part"] == part]


def language_table(results: Sequence[Result]) -> Table:
    """Perplexity by optimizer and sparsity, over the seeds, and HORST's difference to AdamW without and with l1."""
    rows = rows_of(results[0], "language")
    table = quality_table([dataclasses.replace(results[0], rows=rows)])
    lines = list(table.rows)
    levels = sorted({row["sparsity"] for row in rows})
    for words, own in (("difference, HORST to AdamW", rows), ("difference, both with l1", _with_l1(rows))):
        if found := pairs(own, "sparsity", "perplexity"):
            changes = {at: f"{mean(horst) / mean(adamw) - 1:+.1%}" for at, (adamw, horst) in found.items()}
            marks = {at: _noise(*both) for at, both in found.items()}
            lines.append([words, "", *(changes.get(at, "") + marks.get(at, "") for at in levels)])
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
        marks = {lr: _noise(*both) for lr, both in pairs(rows, "lr", "top1").items()}
        words = [f"{points[lr]:+.1f}{marks[lr]}" if lr in points else "" for lr in rates]
        lines.append(["difference in points", "", *words])
    return Table(columns=["accuracy in %", "seeds", *(f"learning rate {lr:g}" for lr in rates)], rows=lines)


def recovery_table(results: Sequence[Result]) -> Table:
    """AdamW's larger GPT dense, pruned at once, and pruned and trained by horst.sparsify."""
    rows = rows_of(results[0], "recovery")
    names = [row["method"] if row["method"] == "dense" else f"{row['sparsity']:.0%}, {row['method']}" for row in rows]
    return Table(
        columns=["perplexity per byte", *names],
        rows=[["a larger GPT of AdamW's, one seed", *(f"{row['perplexity']:.2f}" for row in rows)]],
    )


def recovery_words(result: Result) -> str:
    """What horst.sparsify made of AdamW's larger GPT, in a sentence."""
    dense, at_once, trained = (row["perplexity"] for row in rows_of(result, "recovery"))
    level = rows_of(result, "recovery")[0]["sparsity"]
    steps = result.config["recovery_steps"]
    return (
        f"horst.sparsify takes a larger GPT of AdamW's to {level:.0%} zeros in {steps} more steps: {trained:.2f}, "
        f"where SparseGPT alone has {at_once:.2f} and the dense model, without more steps, {dense:.2f}."
    )


def vision_points(result: Result) -> dict[float, float]:
    """By learning rate: HORST's mean accuracy less AdamW's, in points. Seeds that both have."""
    found = pairs(rows_of(result, "vision"), "lr", "top1")
    return {lr: 100 * (mean(horst) - mean(adamw)) for lr, (adamw, horst) in found.items()}


def headline(result: Result) -> str:
    """The sparsest language models in a sentence, the best first, for the seeds that all of them have."""
    rows = rows_of(result, "language")
    level = max(row["sparsity"] for row in rows)
    found: dict[str, dict[int, float]] = {}
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        own = [row for row in rows if row["optimizer"] == name and row["sparsity"] == level]
        if own and finite([row["perplexity"] for row in own]):
            found[name] = {row["seed"]: row["perplexity"] for row in own}
    seeds = set.intersection(*map(set, found.values())) if found else set()
    if len(found) < 2 or not seeds or "adamw" not in found:
        return "No language model of both optimizers is done yet."
    means = {name: mean(values[seed] for seed in seeds) for name, values in found.items()}
    *first, last = (
        f"{means[name]:.2f} with {short_label(name)}" for name in sorted(means, key=lambda name: means[name])
    )
    pruned = f"With {level:.0%} of its weights pruned" if level else "Dense"
    dense = [row["perplexity"] for row in rows if row["optimizer"] == "adamw" and not row["sparsity"]]
    before = f"; before pruning, AdamW has {mean(finite(dense)):.2f}" if level and finite(dense) else ""
    return f"{pruned}, the GPT's mean perplexity is {', '.join(first)} and {last}{before}{_one_seed(seeds)}."


def language_words(result: Result) -> str:
    """What a terminal says below the language table: the headline, and what a star in the table means."""
    starred = any("*" in cell for row in language_table([result]).rows for cell in row)
    return headline(result) + (f" {NOISE}" if starred else "")


def vision_words(result: Result) -> str:
    """The vision part in a sentence, wherever it points."""
    rows = rows_of(result, "vision")
    found = pairs(rows, "lr", "top1")
    if not found:
        return "No vision model of both optimizers is done yet."
    parts = []
    for lr, (adamw, horst) in found.items():
        doubt = ", within the spread over seeds" if _noise(adamw, horst) else ""
        parts.append(f"{100 * (mean(horst) - mean(adamw)):+.1f} at learning rate {lr:g}{doubt}")
    one = _one_seed(min((adamw for adamw, _ in found.values()), key=len))
    return (
        f"HORST's mean accuracy less AdamW's, in points, with {rows[0]['sparsity']:.0%} zeros: {'; '.join(parts)}{one}."
    )


def accuracy_by_rate(rows: Sequence[Row], axes: Any) -> None:
    """Accuracy by learning rate: every seed a dot, the mean a bar beneath."""
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
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


def beside(panels: Panels) -> Any:
    """One figure of panels side by side: each a title, and a function that draws on its axes."""
    figure, axes = new_figure(1, len(panels), figsize=(PANEL[0] * len(panels), PANEL[1]))
    for (title, draw), place in zip(panels, [axes] if len(panels) == 1 else axes, strict=True):
        draw(axes=place)
        place.set_title(title, fontsize=10)
    return figure


def _weights(histograms: Mapping[str, Any]) -> list[Figure]:
    """The weights of both parts side by side; nothing where all runs broke down."""
    titles = {"language": "GPT, before pruning", "vision": "ViT, weights that AC/DC kept"}
    shown = {titles[part]: own for part, own in histograms.items() if own}
    if not shown:
        return []
    panels: Panels = [(title, functools.partial(weight_distributions, own)) for title, own in shown.items()]
    alts = [f"{title}: {kurtosis_words(own)}." for title, own in shown.items()]
    caption = f"The weights of the first seed; density on a logarithmic axis. {SHAPES}"
    alt = f"Densities of standardised weights, one curve per optimizer. Kurtosis: {' '.join(alts)}"
    return [Figure(name="weights", draw=lambda: beside(panels), caption=caption, alt=alt)]


def _with_l1(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of AdamW and HORST with l1, named like those without."""
    own = [row for row in rows if row["optimizer"].endswith("-l1")]
    return [{**row, "optimizer": row["optimizer"].removesuffix("-l1")} for row in own]


def _noise(adamw: Sequence[float], other: Sequence[float]) -> str:
    """A star: a difference no larger than the deviation over seeds must not be read as one."""
    within = len(adamw) > 1 and abs(mean(other) - mean(adamw)) <= max(stdev(adamw), stdev(other))
    return "*" if within else ""


def _one_seed(values: Sized) -> str:
    return "; one seed" if len(values) == 1 else ""
