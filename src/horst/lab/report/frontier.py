"""What the report shows of the frontier studies, which go beyond the paper."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure
from horst.lab.report.quality_figures import against_product, against_zeros
from horst.lab.report.quality_tables import EDGE, compare_words, quality_table
from horst.lab.report.runs import cells_of, is_whole
from horst.lab.report.tables import Row, Table

RATES_TUNED = ("lr", "weight_decay")
MAIN_METHODS = ("magnitude", "acdc")
_SEEDS = (
    f"Means over seeds; ± is their standard deviation; {EDGE} marks a setting that is the first or last of three or "
    "more that were tried."
)


def main_contenders(row: Row) -> bool:
    """AdamW and HORST at alpha 5 and auto, as they are and with ``l1``."""
    return row.get("alpha") in (0.0, 5.0, "auto") and is_whole(row) and row["optimizer"] in (
        "adamw", "adamw-l1", "horst", "horst-l1",
    )  # fmt: skip


def tuned_table(results: Sequence[Result], methods: Collection[str] = MAIN_METHODS) -> Table:
    """AdamW and HORST, each at its best learning rate, decay and ``l1`` for every level."""
    one_shot = "perplexity" in results[0].rows[0]  # of sparse training each level is a model of its own
    return quality_table(results, best_over=(*RATES_TUNED, "l1"), where=main_contenders, methods=methods, free=one_shot)


def rate_table(results: Sequence[Result]) -> Table:
    """AdamW and HORST at every learning rate, AdamW at its best decay."""
    kept = ("adamw", "horst")
    return quality_table(
        results,
        best_over=("weight_decay",),
        where=lambda row: main_contenders(row) and row["optimizer"] in kept,
        methods=MAIN_METHODS,
        show=["lr"],
    )


def parts_table(results: Sequence[Result], methods: Collection[str] = ("magnitude",)) -> Table:
    """Runs with one part of HORST's step, beside AdamW and HORST with the same learning rates and ``l1``."""

    def settings(row: Row) -> tuple[Any, ...]:
        return row["lr"], row.get("l1"), row.get("beta2")

    of_parts = {settings(cell.row) for cell in cells_of(results) if not is_whole(cell.row)}

    def where(row: Row) -> bool:
        return not is_whole(row) or (settings(row) in of_parts and row["alpha"] in (0.0, "auto"))

    return quality_table(results, where=where, methods=methods, show=["lr", "mirror step on"])


def language(results: Sequence[Result]) -> Content:
    """Perplexity against alpha * lr, auto against alpha 5 and AdamW, all tuned; one part of the step at a time."""
    levels = sorted({row["sparsity"] for row in results[0].rows})
    shown = list(dict.fromkeys([levels[0], levels[len(levels) // 2], levels[-1]]))
    curves = _curves(results)
    parts = []
    if any(not is_whole(row) for row in results[0].rows):
        parts = [parts_table(results).captioned(f"One part of the step at a time, pruned by magnitude. {_SEEDS}")]
    return _study(results, [*_products(results, "perplexity", shown, levels[:1]), curves], parts)


def vision(results: Sequence[Result]) -> Content:
    """Accuracy against alpha * lr, auto against alpha 5 and AdamW, and ways to train sparse."""
    levels = sorted({row["sparsity"] for row in results[0].rows})[-1:]
    return _study(results, _products(results, "accuracy", levels, levels))


def _curves(results: Sequence[Result]) -> Figure:
    return Figure(
        name="sparsity",
        draw=functools.partial(against_zeros, results, best_over=(*RATES_TUNED, "l1"), where=main_contenders),
        caption="Perplexity against actual zeros, each optimizer at its best settings for the level; dotted: dense "
        "AdamW at its best.",
        alt="Line charts of perplexity against the share of zeros; the tables have the same numbers.",
    )


def _study(results: Sequence[Result], figures: Sequence[Figure], more: Sequence[Table] = ()) -> Content:
    compared = {row["optimizer"] for result in results for row in result.rows if is_whole(row)}
    if not compared:
        return Content(tables=list(more))  # one part of a step at a time, and no contender
    words = compare_words(results, "HORST, alpha auto", "HORST, alpha 5")
    rates = rate_table(results).captioned(f"Every learning rate. {_SEEDS}")
    if "adamw" not in compared:
        return Content(summary=[words], tables=[rates, *more])  # more seeds for HORST alone
    tuned = tuned_table(results).captioned(f"Each optimizer at its best settings for the level. {_SEEDS}")
    return Content(summary=[words], tables=[tuned, rates, *more], figures=figures)


def _products(
    results: Sequence[Result], quality: str, levels: Sequence[float], of_weights: Sequence[float]
) -> list[Figure]:
    how = "One line per learning rate, from AdamW at the left on; stars are auto, faint dots the seeds."
    return [
        Figure(
            name="products",
            draw=functools.partial(against_product, results, levels),
            caption=f"{quality.capitalize()} against alpha times the peak learning rate. {how}",
            alt=f"Line charts of {quality} against alpha times the learning rate; the tables have the best of them.",
        ),
        *(
            Figure(
                name=key,
                draw=functools.partial(against_product, results, of_weights, key),
                caption=f"The {words} of the blocks against alpha times the peak learning rate. {how}",
                alt=f"Line charts of the {words} against alpha times the learning rate, on logarithmic axes.",
            )
            for key, words in (("largest", "largest weight"), ("kurtosis", "kurtosis of the weights"))
        ),
    ]
