"""Tables and the figure of GPT-2 small: AdamW, HORST and Muon, pruned in the way that suits each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.quality_figures import against_zeros
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.runs import Cell, at, cells_of, contender
from horst.lab.report.tables import Row, Table

HEADLINE_LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8)
HEADLINE_SETTINGS = ("lr", "beta2", "decay", "decay on")
APART = 0.055  # of the axis between two labels
SPARSEGPT = ("sparsegpt", "sparsegpt-global")
COMPARED = ("magnitude", "magnitude-global", *SPARSEGPT)


def as_recommended(results: Sequence[Result]) -> list[Result]:
    """The rows of models pruned as the guides say: those with ``l1`` globally where that was run, others uniformly."""

    def kept(result: Result) -> Result:
        with_global = any(row.get("l1") and row["method"].endswith("-global") for row in result.rows)
        rows = [
            row for row in result.rows if row["method"] == "dense" or row["method"].endswith("-global") == with_global
        ]
        return dataclasses.replace(result, rows=rows)

    return [kept(result) for result in results]


def headline_rows(row: Row) -> bool:
    """AdamW and HORST, each without l1 and with it, and Muon, at the levels of the README's table."""
    known = ("adamw", "adamw-l1", "horst", "horst-l1", "muon")
    return row["optimizer"] in known and row["sparsity"] in HEADLINE_LEVELS


def gpt2_headline(results: Sequence[Result]) -> Table:
    """The README's table: GPT-2 small pruned by SparseGPT, the dense column over all seeds that were trained."""
    table = _with_shared_settings(results, headline_rows, SPARSEGPT)
    names, seeds, dense = _muon_names(results), *map(list(table.columns).index, ("seeds", "dense"))
    trained: dict[str, list[Cell]] = {}
    for cell in at(cells_of(results), method="dense"):
        trained.setdefault(names.get(contender(cell.row), contender(cell.row)), []).append(cell)
    for row in table.rows:
        cells = trained.get(row[0], [])
        if len(cells) == 1 and len(cells[0].rows) > int(row[seeds].split()[-1]):
            row[seeds] += f" (dense: {len(cells[0].rows)})"
            row[dense] = str(cells[0])
    return table


def compare_gpt2(results: Sequence[Result]) -> Table:
    """Muon and HORST-Muon beside AdamW and HORST; a run that broke down has one row that says so."""
    known = [result for result in results if any(row["perplexity"] is not None for row in result.rows)]
    table = _with_shared_settings(known, lambda row: row["sparsity"] in HEADLINE_LEVELS, COMPARED)
    broken = [result for result in results if result not in known]
    for result in broken:
        row = result.rows[0]
        names = _muon_names([result])
        cells = dict(zip(table.columns, [""] * len(table.columns), strict=True))
        cells |= {table.columns[0]: names.get(contender(row), contender(row)), "seeds": "1"}
        table.rows.append([*(cells | {"dense": f"broke down: {row['broke_down']}"}).values()])
    return table


def _with_shared_settings(results: Sequence[Result], where: Any, methods: Sequence[str]) -> Table:
    """A table sorted by name whose title has the settings that all rows share."""
    table = quality_table(as_recommended(results), where=where, methods=methods, show=(*HEADLINE_SETTINGS, "pruned by"))
    shared = {name: table.rows[0][i] for i, name in enumerate(table.columns)
              if name in HEADLINE_SETTINGS and len({row[i] for row in table.rows}) == 1}  # fmt: skip
    hidden = {*shared, "mirror step on"}
    kept = [i for i, name in enumerate(table.columns) if i and name not in hidden]
    title = "; ".join([table.columns[0], ", ".join(f"{name} {value}" for name, value in shared.items())])
    names = _muon_names(results)
    rows = sorted([names.get(row[0], row[0]), *(row[i] for i in kept)] for row in table.rows)
    return Table(columns=[title, *(table.columns[i] for i in kept)], rows=rows)


def _muon_names(results: Sequence[Result]) -> dict[str, str]:
    """Names of the runs with Muon, by their names without the learning rate that Muon has in the blocks."""
    names = {}
    for result in results:
        row = result.rows[0]
        if "muon" in row["optimizer"]:
            given = result.config["run"]["optimization"]
            names[contender(row)] = f"{contender(row)}, lr {given['lr'] * given['muon_lr_ratio']:g} in the blocks"
    return names


def whose_gain_table(results: Sequence[Result]) -> Table:
    """One part at a time: nothing, l1, the mirror step on some tensors or on all, both."""
    return quality_table(
        results,
        where=lambda row: row["optimizer"] != "ham" and row["sparsity"] in HEADLINE_LEVELS,
        methods=("magnitude", "sparsegpt"),
        show=("mirror step on",),
    )


def gpt2_headline_figure(results: Sequence[Result]) -> Any:
    """The README's figure: perplexity against actual zeros, pruned by SparseGPT in the way that suits the model."""
    alike = [
        dataclasses.replace(one, rows=[{**row, "method": row["method"].removesuffix("-global")} for row in one.rows])
        for one in as_recommended(results)
    ]
    figure = against_zeros(
        alike,
        where=headline_rows,
        methods=("sparsegpt",),
        panels=lambda row: "GPT-2 small, pruned once by SparseGPT",
    )
    _label_lines(figure)
    return figure


def _label_lines(figure: Any) -> None:
    """Names beside the ends of the lines instead of a legend, far enough apart to be read; Muon is dashed."""
    (axes,) = figure.axes
    for legend in list(figure.legends):
        legend.remove()
    lines = {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}
    if "Muon" in lines:
        lines["Muon"].set_linestyle("--")
    low, high = axes.get_ylim()
    above = high
    for name, line in sorted(lines.items(), key=lambda item: -item[1].get_ydata()[-1]):
        height = min(line.get_ydata()[-1], above - APART * (high - low))
        axes.annotate(
            name, (1.0, height), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
            va="center", fontsize=9, color=line.get_color(), annotation_clip=False,
        )  # fmt: skip
        above = height


def with_earlier_alpha(results: Sequence[Result]) -> list[Result]:
    """The runs of GPT-2 at a beta2 of 0.999 whose ``auto`` was an earlier rule's: an alpha * lr of 0.016."""

    def named(result: Result) -> Result:
        rows = [{**row, "alpha": 15.8} if row["alpha"] == "auto" else row for row in result.rows]
        return dataclasses.replace(result, rows=rows) if result.environment["commit"][:7] == "ea2b902" else result

    return [named(result) for result in results]


def gpt2_table(results: Sequence[Result]) -> Table:
    """AdamW and HORST by way of pruning; Table 6 has HAM, and global pruning has its own table."""
    return quality_table(
        with_earlier_alpha(results),
        where=lambda row: row["optimizer"] != "ham" and row["sparsity"] in (*HEADLINE_LEVELS, 0.3),
        methods=("magnitude", "sparsegpt"), free=True,
    )  # fmt: skip
