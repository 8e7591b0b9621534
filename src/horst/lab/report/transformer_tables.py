"""Tables 1, 3, 4 and 6, with the paper's numbers below an optimizer's row, and tables of single trainings."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.quality_tables import quality_table, zeros_among_all
from horst.lab.report.runs import contender
from horst.lab.report.tables import Table, from_rows, number


def one_shot_table(results: Sequence[Result]) -> Table:
    """Table 6: perplexity by optimizer and sparsity, pruned by magnitude."""
    theirs = {name: {level: f"{value:.2f}" for level, value in own.items()} for name, own in paper.TABLE6.items()}
    table = quality_table(results, methods=["magnitude"], paper=theirs)
    return dataclasses.replace(table, rows=[*table.rows, zeros_among_all(results, table)])


def acdc_table(results: Sequence[Result]) -> Table:
    """Tables 1, 3 and 4: accuracy by optimizer, learning rate and sparsity."""
    return quality_table(results, show=["lr"], paper=_paper_accuracies(results[0]))


def digits_table(results: Sequence[Result]) -> Table:
    """The example ``acdc_digits_vit``: mean accuracy over seeds of both optimizers, one row per learning rate."""
    rows = results[0].rows
    names = ("AdamW", "HORST")
    lines = []
    for lr in dict.fromkeys(row["lr"] for row in rows):
        found = [[row["accuracy"] for row in rows if row["lr"] == lr and row["optimizer"] == name] for name in names]
        lines.append([f"{lr:g}", *(f"{statistics.mean(f):.2%} ± {statistics.pstdev(f):.2%}" for f in found)])
    zeros = f"{rows[0]['zeros']:,} of {rows[0]['masked_weights']:,} weights zero"
    return Table(columns=["learning rate", "AdamW", f"HORST, alpha 5 ({zeros} in each run)"], rows=lines)


def speed_table(results: Sequence[Result]) -> Table:
    """What training cost, one row per run."""
    rows = []
    for result in results:
        for row in result.curves.get("training", result.rows):
            unit = "tokens" if "tokens_per_second" in row else "images"
            rate = number(row[f"{unit}_per_second"], ",.0f")  # none in runs too short to measure
            rows.append([contender(row), str(row["seed"]), f"{rate} {unit}", number(row["seconds"], ".0f")])
    return Table(columns=["optimizer", "seed", "per second", "seconds"], rows=rows)


def spread_table(results: Sequence[Result]) -> Table:
    """How the standardised weights of a model are spread, one row per model."""
    return from_rows(
        results[0].rows,
        ("model", "{model}"),
        ("weights", "{weights:,}"),
        ("kurtosis", "{kurtosis:.1f}"),
        ("within 0.1 deviations of zero", "{near_zero:.2%}"),
    )


def _paper_accuracies(result: Result) -> Mapping[str, Mapping[float, str]]:
    """By optimizer and sparsity, as the paper prints them; those of DeiT-base for a model of its width."""
    if result.experiment == "table3_ham":
        return {name: {0.9: f"{value:g}"} for name, value in paper.TABLE3.items()}
    if result.experiment == "table4_long_run":
        return {name: {0.7: f"{value:g}"} for name, value in paper.TABLE4.items()}
    run: Any = result.config["run"]
    model = "DeiT-base" if run["model"]["width"] == 768 else "DeiT-small"
    return {
        name: {level: f"{mean:g} ± {deviation:g}" for level, (mean, deviation) in levels.items()}
        for name, levels in paper.TABLE1[model].items()
    }
