"""Tables 1, 3, 4 and 6: ours, and below an optimizer's row the paper's where it has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.quality_tables import quality_table, zeros_among_all
from horst.lab.report.runs import LABELS, contender
from horst.lab.report.tables import Table, from_records, number


def one_shot_table(results: Sequence[Result], method: str = "magnitude") -> Table:
    """Table 6: perplexity by optimizer and sparsity.

    Args:
        results: Files of one-shot pruning.
        method: The way of pruning that is shown.
    """
    theirs = {name: {level: f"{value:.2f}" for level, value in own.items()} for name, own in paper.TABLE6.items()}
    table = quality_table(results, methods=[method], paper=theirs)
    return dataclasses.replace(table, rows=[*table.rows, zeros_among_all(results, table)])


def methods_table(results: Sequence[Result]) -> Table:
    """Perplexity by optimizer, way of pruning and sparsity; what was not measured is left empty."""
    return quality_table(results)


def acdc_table(results: Sequence[Result]) -> Table:
    """Tables 1, 3 and 4: accuracy by optimizer, learning rate and sparsity."""
    return quality_table(results, show=["lr"])


def acdc_comparison(results: Sequence[Result]) -> Table:
    """Tables 1, 3 and 4 with the paper's numbers."""
    return quality_table(results, show=["lr"], paper=_paper_accuracies(results[0]))


def paper_acdc_table(results: Sequence[Result] = ()) -> Table:
    """The paper's Tables 1 and 3 for DeiT-small, to set ours beside."""
    small = paper.TABLE1["DeiT-small"]
    rows = [[LABELS[name], *(f"{mean} ± {deviation}" for mean, deviation in small[name].values())] for name in small]
    rows.insert(1, ["HAM (one seed)", "", "", str(paper.TABLE3["ham"])])
    return Table(columns=["the paper, ImageNet, accuracy in %", "70%", "80%", "90%"], rows=rows)


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
    return from_records(
        [
            {
                "model": row["model"],
                "weights": f"{row['weights']:,}",
                "kurtosis": number(row["kurtosis"], ".1f"),
                "within 0.1 deviations of zero": number(row["near_zero"], ".2%"),
            }
            for row in results[0].rows
        ]
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
