"""What the report shows of Tables 1, 3, 4 and 6 and of the quickstart: ours, and the paper's beside it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper, quickstart_tables
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.runs import LABELS, Value, by_line, contender, finite, percent
from horst.lab.report.tables import Table, level_name
from horst.lab.report.transformer_figures import (
    COLOURS,
    phases_and_overlap,
    quality_against_sparsity,
    weight_distributions,
)
from horst.lab.report.transformer_tables import (
    acdc_comparison,
    methods_table,
    one_shot_table,
    speed_table,
    spread_table,
)

SPREAD = "± is the standard deviation over seeds; a number without it comes from one seed."
BAND = "A band reaches from the worst to the best seed."
SHAPES = (
    "Each tensor is centred and divided by its own deviation, so the curves compare shapes; a Gaussian's kurtosis is 3."
)


def one_shot(results: Sequence[Result]) -> Content:
    """Table 6, Figures 4 and 8; one figure per way of pruning."""
    rows = [row for result in results for row in result.rows]
    methods = list(dict.fromkeys(row["method"] for row in rows if row["sparsity"]))
    caption = f"Validation perplexity after one-shot pruning, without fine-tuning; less is better. {SPREAD}"
    changes = _changes([row for row in rows if row["method"] in ("dense", "magnitude")])
    table = methods_table(results)
    if methods == ["magnitude"]:
        table = one_shot_table(results)
        if changes:
            table = _with_differences(table, changes)
    figures = [_perplexities(results, method) for method in methods]
    if histograms := _histograms(results):  # there are none if all runs broke down
        figures.append(
            _weights("weights", "Figure 8: the weights of the blocks before pruning, first seed", histograms)
        )
    return Content(
        summary=[_language_words(changes)],
        tables=[table.captioned(caption), speed_table(results).captioned("What training cost")],
        figures=figures,
    )


def sparse_training(results: Sequence[Result]) -> Content:
    """Tables 1, 3 and 4, Figure 3 (left), and the phases of AC/DC."""
    rows = [row for result in results for row in result.rows]
    figures = [
        _weights(
            f"weights-{float(level):.0%}".removesuffix("%"),
            f"Figure 3 (left): the weights that the masks keep at {float(level):.0%} sparsity, first seed",
            histograms,
        )
        for level, histograms in _histograms(results).items()
    ]
    phases = [run for result in results for run in result.curves.get("phases", []) if run["records"]]
    figures += [
        _phases([run for run in phases if run["sparsity"] == level])
        for level in sorted({r["sparsity"] for r in phases})
    ]
    if len({row["sparsity"] for row in rows}) > 1 and len({row["lr"] for row in rows}) == 1:
        shown = Figure(
            name="sparsity",
            draw=lambda: quality_against_sparsity(
                [_with_rows(result, _in_percent(result.rows)) for result in results], "accuracy in %"
            ),
            caption=f"Accuracy against the sparsity that AC/DC trains to. {BAND}",
            alt="Line chart of validation accuracy against sparsity. " + _curves(_in_percent(rows), "accuracy in %"),
        )
        figures.insert(0, shown)
    return Content(
        summary=[_vision_words(rows)],
        tables=[
            acdc_comparison(results).captioned(f"Validation accuracy in %. {SPREAD}"),
            speed_table(results).captioned("What training cost"),
        ],
        figures=figures,
    )


def quickstart(results: Sequence[Result]) -> Content:
    """Both of its tables, and a figure for each."""
    result = results[0]
    language, vision = (quickstart_tables.rows_of(result, part) for part in ("language", "vision"))
    summary, tables, figures = [], [], []
    if language:
        theirs = {name: (paper.TABLE6[name][0.0], paper.TABLE6[name][0.5]) for name in ("adamw", "horst")}
        summary.append(
            f"{quickstart_tables.language_words(result)} The paper's GPT-2 small, half of its inner blocks' weights "
            f"pruned, goes from {theirs['adamw'][0]:g} to {theirs['adamw'][1]:g} with AdamW and from "
            f"{theirs['horst'][0]:g} to {theirs['horst'][1]:g} with HORST."
        )
        caption = f"Perplexity of the GPT on held-out files after one-shot pruning; less is better. {SPREAD}"
        if any(row["optimizer"] == "horst-l1" for row in language):
            caption += " The option l1, a soft threshold after each step, is not the paper's."
        tables.append(quickstart_tables.language_table(results).captioned(caption))
        figures += [
            Figure(
                name="language",
                draw=lambda: quality_against_sparsity([_with_rows(result, language)]),
                caption=f"The GPT's perplexity against sparsity, on a logarithmic axis. {BAND}",
                alt="Line chart of held-out perplexity against the share of zeros. " + _curves(language, "perplexity"),
            ),
            _weights(
                "weights", "The GPT's weights before pruning, first seed", result.curves["histograms"]["language"]
            ),
        ]
    if vision:
        small = {name: paper.TABLE1["DeiT-small"][name][0.9] for name in ("adamw", "horst")}
        summary.append(
            f"{quickstart_tables.vision_words(result)} The paper's DeiT-small on ImageNet, at 90% and learning rate "
            f"0.005, has {small['adamw'][0]:g}% with AdamW and {small['horst'][0]:g}% with HORST."
        )
        caption = f"Test accuracy of the ViT trained with AC/DC; more is better. {SPREAD}"
        tables.append(quickstart_tables.vision_table(results).captioned(caption))
        points = quickstart_tables.vision_points(result)
        figures.append(
            Figure(
                name="vision",
                draw=lambda: accuracy_by_rate(vision),
                caption="The ViT's accuracy by learning rate; each dot is a seed, each stroke their mean.",
                alt="Dots of test accuracy by learning rate. "
                + " ".join(f"At {lr:g} HORST is {p:+.1f} points from AdamW." for lr, p in points.items()),
            )
        )
    return Content(summary=summary, tables=tables, figures=figures)


def weight_spread(results: Sequence[Result]) -> Content:
    """Figure 1 (left)."""
    caption = "Figure 1 (left): the weights of trained networks"
    return Content(
        tables=[spread_table(results).captioned("How the weights of trained networks are spread")],
        figures=[_weights("", caption, results[0].curves["histograms"])],
    )


def accuracy_by_rate(rows: Sequence[Mapping[str, Any]]) -> Any:
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
                axes.hlines(statistics.mean(values), x - 0.1, x + 0.1, color=colour, linewidth=2.5)
                axes.plot([x] * len(values), values, "o", color=colour, alpha=0.7)
    axes.set_xticks(range(len(rates)), [f"{lr:g}" for lr in rates])
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3, axis="y", linewidth=0.5)
    axes.legend(fontsize=9, loc="lower right")
    return figure


def _perplexities(results: Sequence[Result], method: str) -> Figure:
    """Figure 4, for one way of pruning."""
    kept = [_with_rows(result, [r for r in result.rows if r["method"] in ("dense", method)]) for result in results]
    words = _curves([row for result in kept for row in result.rows], "perplexity")
    return Figure(
        name=method,
        draw=lambda: quality_against_sparsity(kept),
        caption=f"Figure 4: perplexity against sparsity, pruned by {method}, on a logarithmic axis. {BAND}",
        alt=f"Line chart of validation perplexity against the share of zeros. {words}",
    )


def _weights(name: str, caption: str, histograms: Mapping[str, Mapping[str, Any]]) -> Figure:
    kurtoses = ", ".join(f"{LABELS.get(key, key)} {histogram['kurtosis']:.1f}" for key, histogram in histograms.items())
    return Figure(
        name=name,
        draw=lambda: weight_distributions(histograms),
        caption=f"{caption}; density on a logarithmic axis. {SHAPES}",
        alt=f"Densities of standardised weights, one curve per optimizer. Kurtosis: {kurtoses}.",
    )


def _phases(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """What happened on the way to one sparsity."""
    level = f"{runs[0]['sparsity']:.0%}"
    words = []
    for name in dict.fromkeys(contender(run) for run in runs):
        kept = [
            [r["overlap"] for r in run["records"] if r["overlap"] is not None] for run in runs if contender(run) == name
        ]
        if all(kept):
            first, last = (statistics.mean(overlaps[i] for overlaps in kept) for i in (0, -1))
            words.append(f"{name}: {first:.0%} in the second sparse phase, {last:.0%} in the last.")
    flips = [r["sign_flips"] for run in runs for r in run["records"] if r["sign_flips"] is not None]
    signs = f" Of the weights kept twice, at most {max(flips):.1%} had changed sign." if flips else ""
    return Figure(
        name=f"phases-{level.removesuffix('%')}",
        draw=lambda: phases_and_overlap(runs),
        caption=f"The phases of AC/DC to {level} sparsity; sparse ones on green ground. Kept again: the share of the "
        f"weights a sparse phase keeps that the sparse phase before it kept too.{signs} A band reaches from "
        "the least to the greatest of the seeds.",
        alt=f"Charts over the epochs: zeros by phase, between 0 and {level}; weights kept again. {' '.join(words)}",
    )


def _histograms(results: Sequence[Result]) -> dict[str, Any]:
    """Histograms by optimizer, or by sparsity and optimizer, each from the first result that has it."""
    found: dict[str, Any] = {}
    for result in results:
        for key, value in result.curves["histograms"].items():
            if "density" in value:
                found.setdefault(key, value)
            else:
                found[key] = {**value, **found.get(key, {})}
    return found


def _language_words(changes: Mapping[float, float]) -> str:
    """At which levels HORST is ahead, and at which it is not."""
    if not changes:
        return "These results do not have numbers of both AdamW and HORST."
    ahead = [_at(level) for level, change in changes.items() if change < 0]
    behind = [_at(level) for level, change in changes.items() if change >= 0]
    parts = [f"below AdamW's {', '.join(ahead)}"] * bool(ahead) + [f"not below it {', '.join(behind)}"] * bool(behind)
    return f"Pruned by magnitude, HORST's mean perplexity is {' and '.join(parts)}."


def _with_differences(table: Table, changes: Mapping[float, float]) -> Table:
    """Table 6 with rows before its last: HORST's perplexity against AdamW's, ours and the paper's."""
    theirs = {level: horst / paper.TABLE6["adamw"][level] - 1 for level, horst in paper.TABLE6["horst"].items()}
    rows = [
        [label, *({level_name(level): f"{value:+.1%}" for level, value in found.items()}.get(c, "") for c in titles)]
        for titles in [table.columns[1:]]
        for label, found in (("difference, HORST to AdamW", changes), ("the paper's", theirs))
    ]
    place = len(table.rows) - 1
    return dataclasses.replace(
        table, rows=[*table.rows[:place], *rows, table.rows[place]], paper=[*table.paper, place + 1]
    )


def _changes(rows: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """By sparsity: HORST's mean perplexity over AdamW's, less one."""
    means = _means(rows, "perplexity")
    shared = sorted(set(means.get("adamw", {})) & set(means.get("horst", {})))
    return {level: means["horst"][level] / means["adamw"][level] - 1 for level in shared}


def _at(level: float) -> str:
    return f"at {level:.0%}" if level else "dense"


def _vision_words(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for lr in sorted({row["lr"] for row in rows}):
        means = _means([row for row in rows if row["lr"] == lr], "top1")
        for level in sorted(set(means.get("adamw", {})) & set(means.get("horst", {}))):
            points = 100 * (means["horst"][level] - means["adamw"][level])
            parts.append(f"{points:+.2f} {_at(level)} (learning rate {lr:g})")
    if not parts:
        return "These results do not have numbers of both AdamW and HORST."
    return f"HORST's accuracy less AdamW's, in points: {'; '.join(parts)}."


def _means(rows: Sequence[Mapping[str, Any]], quality: str) -> dict[str, dict[float, float]]:
    """By optimizer and sparsity; of several strengths of one optimizer at a sparsity, the first.

    Nothing where a run broke down.
    """
    found: dict[str, dict[float, list[Value]]] = {}
    strengths: dict[tuple[str, float], str] = {}
    for row in rows:
        if strengths.setdefault((row["optimizer"], row["sparsity"]), contender(row)) == contender(row):
            found.setdefault(row["optimizer"], {}).setdefault(row["sparsity"], []).append(row[quality])
    return {
        name: {k: statistics.mean(finite(v)) for k, v in levels.items() if finite(v)} for name, levels in found.items()
    }


def _curves(rows: Sequence[Mapping[str, Any]], quality: str) -> str:
    """The lines of a figure in words: each one's value at its first and last level."""
    words = []
    for name, own in by_line(rows).items():
        (means,) = _means(own, quality).values()
        if not means:
            words.append(f"{name} broke down.")
            continue
        first, last = min(means), max(means)
        words.append(f"{name}: {means[first]:.2f} at {first:.0%}, {means[last]:.2f} at {last:.0%}.")
    return " ".join(words)


def _with_rows(result: Result, rows: list[dict[str, Any]]) -> Result:
    return dataclasses.replace(result, rows=rows)


def _in_percent(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "accuracy in %": percent(row["top1"])} for row in rows]
