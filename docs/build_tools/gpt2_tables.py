"""Tables and the figure of GPT-2 small: AdamW and HORST, without and with ``l1``, pruned in the way that suits each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.quality_figures import against_zeros
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.tables import Row, Table

HEADLINE_LEVELS = (0.0, 0.5, 0.6, 0.7, 0.8)
HEADLINE_SETTINGS = ("lr", "beta2", "decay", "decay on")


# One sparsity for each tensor, or one threshold for all tensors: which is better depends on l1.
WAYS = {
    "magnitude": "magnitude", "magnitude-global": "magnitude, one threshold",
    "sparsegpt": "SparseGPT", "sparsegpt-global": "SparseGPT, one threshold",
}  # fmt: skip


def as_recommended(results: Sequence[Result], names: Mapping[str, str] = WAYS) -> list[Result]:
    """The rows of models pruned as the guides say: with ``l1`` by one threshold for all tensors where that was run."""

    def kept(result: Result) -> Result:
        one_threshold = any(row.get("l1") and row["method"].endswith("-global") for row in result.rows)
        rows = [
            {**row, "method": names.get(row["method"], row["method"])}
            for row in result.rows
            if row["method"] == "dense" or row["method"].endswith("-global") == one_threshold
        ]
        return dataclasses.replace(result, rows=rows)

    return [kept(result) for result in results]


def headline_rows(row: Row) -> bool:
    """AdamW and HORST, each without l1 and with it, at the levels of the README's table."""
    return row["optimizer"] in ("adamw", "adamw-l1", "horst", "horst-l1") and row["sparsity"] in HEADLINE_LEVELS


def gpt2_headline(results: Sequence[Result]) -> Table:
    """The README's table: GPT-2 small pruned by magnitude and by SparseGPT, with settings, actual zeros and seeds."""
    table = quality_table(
        as_recommended(results), where=headline_rows, methods=tuple(WAYS.values()),
        show=(*HEADLINE_SETTINGS, "pruned by"),
    )  # fmt: skip
    # settings that all rows share stand once, in the title
    shared = {name: table.rows[0][i] for i, name in enumerate(table.columns)
              if name in HEADLINE_SETTINGS and len({row[i] for row in table.rows}) == 1}  # fmt: skip
    hidden = {*shared, "mirror step on"}
    kept = [i for i, name in enumerate(table.columns) if i and name not in hidden]
    title = "; ".join([table.columns[0], ", ".join(f"{name} {value}" for name, value in shared.items())])
    rows = sorted([row[0], *(row[i] for i in kept)] for row in table.rows)
    return Table(columns=[title, *(table.columns[i] for i in kept)], rows=rows)


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
    return against_zeros(
        as_recommended(results, {"sparsegpt-global": "sparsegpt"}),
        where=lambda row: headline_rows(row) and row.get("l1") != 0.01,
        methods=("sparsegpt",),
        panels=lambda row: "GPT-2 small, pruned once by SparseGPT",
    )


def with_earlier_alpha(results: Sequence[Result]) -> list[Result]:
    """The runs of GPT-2 at a second beta of 0.999 whose ``auto`` was an earlier rule's: an alpha * lr of 0.016."""

    def named(result: Result) -> Result:
        rows = [{**row, "alpha": 15.8} if row["alpha"] == "auto" else row for row in result.rows]
        return dataclasses.replace(result, rows=rows) if result.environment["commit"][:7] == "ea2b902" else result

    return [named(result) for result in results]


def gpt2_table(results: Sequence[Result]) -> Table:
    """AdamW and HORST by way of pruning; Table 6 has HAM, and one threshold for all tensors has its own table."""
    return quality_table(
        with_earlier_alpha(results),
        where=lambda row: row["optimizer"] != "ham" and row["sparsity"] in (*HEADLINE_LEVELS, 0.3),
        methods=("magnitude", "sparsegpt"), free=True,
    )  # fmt: skip
