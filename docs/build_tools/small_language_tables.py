"""Tables of the study of small language models: AdamW, HORST and Muon after three lengths of training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from horst.lab.experiments.result import Result
from horst.lab.report import frontier
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.runs import at, best, cells_of
from horst.lab.report.tables import Row, Table

SHORT, LONG, LONGEST = 800, 3200, 12_800  # steps
WIDTH, SMALLER = 64, 40  # of the model; and of one with about as many weights as 30 % of its blocks
TOKENS_PER_STEP, WEIGHTS = 16 * 64, 217_728
DENSE_70_80 = (0.0, 0.5, 0.7, 0.8)


def tuned(results: Sequence[Result], steps: int = SHORT) -> Table:
    """AdamW and HORST, each at its best, after so many steps."""
    return quality_table(
        results, best_over=(*frontier.RATES_TUNED, "l1"), methods=("magnitude", "sparsegpt", "sparsegpt-global"),
        free=True,
        where=lambda row: frontier.main_contenders(row) and row["beta2"] == 0.95 and row["steps"] == steps,
    )  # fmt: skip


long = functools.partial(tuned, steps=LONG)


def rates(results: Sequence[Result]) -> Table:
    """AdamW and HORST at every learning rate."""
    kept = [row for row in results[0].rows if row["steps"] == SHORT and row["beta2"] == 0.95]
    return frontier.rate_table([dataclasses.replace(results[0], rows=kept)])


def parts(results: Sequence[Result]) -> list[Table]:
    """Parts of the step: without ``l1`` pruned by magnitude, with it by SparseGPT, global."""
    found = []
    for method, with_l1 in (("magnitude", False), ("sparsegpt-global", True)):
        kept = [
            dataclasses.replace(result, rows=[
                row for row in result.rows
                if row["sparsity"] in DENSE_70_80 and row["steps"] == SHORT and row["beta2"] == 0.95
                and bool(row.get("l1")) == with_l1
            ])
            for result in results
        ]  # fmt: skip
        found.append(frontier.parts_table(kept, methods=(method,)))
    return found


def beta2(results: Sequence[Result]) -> Table:
    """Both second betas, at the learning rates that have both."""
    return quality_table(
        results, methods=("sparsegpt",), show=["lr", "beta2"],
        where=lambda row: frontier.main_contenders(row) and row["lr"] in (4e-3, 8e-3) and row["alpha"] != 5.0
        and row.get("l1") in (None, 0.0, 0.04) and row["steps"] == SHORT,
    )  # fmt: skip


def muon(results: Sequence[Result]) -> Table:
    """Muon beside AdamW and HORST under the same settings, pruned by SparseGPT, global."""

    def compared(row: Row) -> bool:
        with_muon = row["optimizer"] in ("muon", "muon-l1")
        return (with_muon or frontier.main_contenders(row)) and row.get("alpha") != 5.0 and row["steps"] == SHORT

    return quality_table(
        results, best_over=(*frontier.RATES_TUNED, "l1"), methods=("sparsegpt-global",), where=compared, show=["beta2"]
    )


def lengths(results: Sequence[Result]) -> Table:
    """At 70 % by SparseGPT, global, beside two dense models, each at its best after three lengths of training."""
    pruned = {"method": "sparsegpt-global", "sparsity": 0.7}
    wanted = {
        "AdamW, dense": {"width": WIDTH, "optimizer": "adamw", "method": "dense"},
        f"dense, width {SMALLER}": {"width": SMALLER, "method": "dense"},
        "AdamW, 70%": {"width": WIDTH, "optimizer": "adamw", **pruned},
        "AdamW, l1, 70%": {"width": WIDTH, "optimizer": "adamw-l1", **pruned},
        "HORST, 70%": {"width": WIDTH, "optimizer": "horst", **pruned},
        "HORST, l1, 70%": {"width": WIDTH, "optimizer": "horst-l1", **pruned},
    }
    rows = []
    for steps in (SHORT, LONG, LONGEST):
        own = [cell for cell in at(cells_of(results), steps=steps, beta2=0.95) if frontier.main_contenders(cell.row)]
        own = [cell for cell in own if cell.row["alpha"] != 5.0]
        found = [best(at(own, **settings)) for settings in wanted.values()]
        seeds = str(min(len(cell.rows) for cell in found if cell))
        rows.append([f"{steps:,}", f"{steps * TOKENS_PER_STEP / WEIGHTS:.0f}", seeds, *map(str, found)])
    return Table(columns=["steps", "tokens per weight", "seeds", *wanted], rows=rows)


def longest(results: Sequence[Result]) -> Table:
    """AdamW and HORST after the longest training, each at its best learning rate, with each second beta."""
    return quality_table(
        results, best_over=frontier.RATES_TUNED, methods=("magnitude", "sparsegpt-global"), show=["beta2"],
        where=lambda row: frontier.main_contenders(row) and row["steps"] == LONGEST and row["width"] == WIDTH,
    )  # fmt: skip
