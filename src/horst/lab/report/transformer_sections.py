"""What the report shows of Tables 1, 3, 4 and 6: ours, and the paper's beside it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.document import Content, Figure
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.runs import by_level, by_line, contender, pairs, percent, perplexity_changes, short_label
from horst.lab.report.tables import Row, Table, level_name
from horst.lab.report.transformer_figures import phases_and_overlap, quality_against_sparsity, weight_distributions
from horst.lab.report.transformer_tables import acdc_table, one_shot_table, speed_table, spread_table

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
    changes = perplexity_changes([row for row in rows if row["method"] in ("dense", "magnitude")])
    table = quality_table(results)
    if methods == ["magnitude"]:
        table = one_shot_table(results)
        if changes:
            table = _with_differences(table, changes)
    figures = [_perplexities(rows, method) for method in methods]
    if histograms := _histograms(results):  # there are none if all runs broke down
        figures.append(
            weights_figure("weights", "Figure 8: the weights of the blocks before pruning, first seed", histograms)
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
        weights_figure(
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
        accuracies = [{**row, "accuracy in %": percent(row["top1"])} for row in rows]
        shown = Figure(
            name="sparsity",
            draw=lambda: quality_against_sparsity(accuracies, "accuracy in %"),
            caption=f"Accuracy against the sparsity that AC/DC trains to. {BAND}",
            alt=f"Line chart of validation accuracy against sparsity. {curve_words(accuracies, 'accuracy in %')}",
        )
        figures.insert(0, shown)
    return Content(
        summary=[_vision_words(rows)],
        tables=[
            acdc_table(results).captioned(f"Validation accuracy in %. {SPREAD}"),
            speed_table(results).captioned("What training cost"),
        ],
        figures=figures,
    )


def weight_spread(results: Sequence[Result]) -> Content:
    """Figure 1 (left)."""
    caption = "Figure 1 (left): the weights of trained networks"
    return Content(
        tables=[spread_table(results).captioned("How the weights of trained networks are spread")],
        figures=[weights_figure("", caption, results[0].curves["histograms"])],
    )


def _perplexities(rows: Sequence[Row], method: str) -> Figure:
    """Figure 4, for one way of pruning."""
    kept = [row for row in rows if row["method"] in ("dense", method)]
    return Figure(
        name=method,
        draw=lambda: quality_against_sparsity(kept),
        caption=f"Figure 4: perplexity against sparsity, pruned by {method}, on a logarithmic axis. {BAND}",
        alt=f"Line chart of validation perplexity against the share of zeros. {curve_words(kept)}",
    )


def weights_figure(name: str, caption: str, histograms: Mapping[str, Row]) -> Figure:
    """The densities of standardised weights, one curve per optimizer."""
    return Figure(
        name=name,
        draw=lambda: weight_distributions(histograms),
        caption=f"{caption}; density on a logarithmic axis. {SHAPES}",
        alt=f"Densities of standardised weights, one curve per optimizer. Kurtosis: {kurtosis_words(histograms)}.",
    )


def kurtosis_words(histograms: Mapping[str, Row]) -> str:
    """The kurtosis of each optimizer's weights."""
    return ", ".join(f"{short_label(name)} {histogram['kurtosis']:.1f}" for name, histogram in histograms.items())


def _phases(runs: Sequence[Row]) -> Figure:
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


def _at(level: float) -> str:
    return f"at {level:.0%}" if level else "dense"


def _vision_words(rows: Sequence[Row]) -> str:
    parts = []
    for lr in sorted({row["lr"] for row in rows}):
        for level, (adamw, horst) in pairs([row for row in rows if row["lr"] == lr], "sparsity", "top1").items():
            points = 100 * (statistics.mean(horst) - statistics.mean(adamw))
            parts.append(f"{points:+.2f} {_at(level)} (learning rate {lr:g})")
    if not parts:
        return "These results do not have numbers of both AdamW and HORST."
    return f"HORST's accuracy less AdamW's, in points: {'; '.join(parts)}."


def curve_words(rows: Sequence[Row], quality: str = "perplexity") -> str:
    """The lines of a figure in words: each one's mean at its first and last level."""
    words = []
    for name, own in by_line(rows).items():
        means = [(level, statistics.mean(values)) for level, values in by_level(own, quality).items()]
        ends = ", ".join(f"{mean:.2f} at {level:.0%}" for level, mean in (means[:1] + means[-1:]))
        words.append(f"{name}: {ends}." if means else f"{name} broke down.")
    return " ".join(words)
