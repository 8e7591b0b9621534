"""What the report shows of the frontier studies, which go beyond the paper."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure
from horst.lab.report.quality_figures import against_product, against_zeros
from horst.lab.report.quality_tables import EDGE, compare_words, quality_table
from horst.lab.report.tables import Row, Table

ALL_TUNED = ("lr", "weight_decay", "alpha", "l1", "strength")
RATES_TUNED = ("lr", "weight_decay")
MAIN_METHODS = ("magnitude", "acdc")
_SEEDS = (
    f"Means over seeds; ± is their standard deviation; {EDGE} marks a setting that is the first or last of three or "
    "more that were tried."
)


def main_contenders(row: Row) -> bool:
    """AdamW and HORST at alpha 5 and auto, as they are and with ``l1``; the mirror step on the default tensors."""
    return row.get("alpha") in (0.0, 5.0, "auto") and default_tensors(row) and row["optimizer"] in (
        "adamw", "adamw-clipped-lr", "adamw-l1", "horst", "horst-l1",
    )  # fmt: skip


def default_tensors(row: Row) -> bool:
    """Whether the mirror step is on the tensors that the studies give it to, or there is none."""
    return row.get("mirror") in (None, "matrices")


def tuned_table(results: Sequence[Result]) -> Table:
    """AdamW and HORST, each at its best learning rate and decay for every level."""
    one_shot = "perplexity" in results[0].rows[0]  # of sparse training each level is a model of its own
    return quality_table(
        results, best_over=(*RATES_TUNED, "l1"), where=main_contenders, methods=MAIN_METHODS, free=one_shot
    )


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


def contenders_table(results: Sequence[Result], **wanted: int) -> Table:
    """Every contender at its best learning rate, decay and strength, pruned by magnitude.

    Args:
        results: Files of language studies.
        wanted: Values that the rows shown must have, such as ``steps=400``.
    """

    def where(row: Row) -> bool:
        return default_tensors(row) and all(row[name] == value for name, value in wanted.items())

    return quality_table(results, best_over=ALL_TUNED, where=where, methods=("magnitude",))


def pruning_table(results: Sequence[Result]) -> Table:
    """AdamW and HORST pruned in every way, each at its best learning rate for the level."""
    kept = ("adamw", "horst")
    return quality_table(
        results, best_over=RATES_TUNED, where=lambda row: row["optimizer"] in kept and main_contenders(row)
    )


def tensors_table(results: Sequence[Result]) -> Table:
    """Which tensors get the mirror step, at the products of alpha and the learning rate that all choices have."""
    everywhere = {(row["alpha"], row["lr"]) for result in results for row in result.rows if row["mirror"] == "all"}
    return quality_table(
        results,
        where=lambda row: (
            row["optimizer"] == "adamw" or (row["optimizer"] == "horst" and (row["alpha"], row["lr"]) in everywhere)
        ),
        methods=("magnitude",),
        show=["lr", "mirror step on"],
    )


def methods_of_training_table(results: Sequence[Result]) -> Table:
    """AC/DC, GMP and RigL with AdamW and HORST, at the settings that all of them have."""
    others = [row for result in results for row in result.rows if row["method"] not in ("dense", "acdc")]
    names = ("lr", "width", "weight_decay", "sparsity")
    same = {tuple(row[name] for name in names) for row in others}
    return quality_table(
        results, where=lambda row: main_contenders(row) and tuple(row[name] for name in names) in same, show=["lr"]
    )


def language(results: Sequence[Result]) -> Content:
    """Perplexity against alpha * lr, auto against alpha 5 and AdamW, all tuned."""
    levels = sorted({row["sparsity"] for row in results[0].rows})
    shown = list(dict.fromkeys([levels[0], levels[len(levels) // 2], levels[-1]]))
    curves = _curves(results, (*RATES_TUNED, "l1"), "settings")
    return _study(results, [*_products(results, "perplexity", shown, levels[:1]), curves])


def vision(results: Sequence[Result]) -> Content:
    """Accuracy against alpha * lr, auto against alpha 5 and AdamW, and ways to train sparse."""
    levels = sorted({row["sparsity"] for row in results[0].rows})[-1:]
    more = []
    if {row["method"] for row in results[0].rows} - {"dense", "acdc"}:
        more = [methods_of_training_table(results).captioned(f"Ways to train sparse. {_SEEDS}")]
    return _study(results, _products(results, "accuracy", levels, levels), more)


def compositions(results: Sequence[Result]) -> Content:
    """Other contenders, other ways to prune, other tensors."""
    methods = [name for name in ("magnitude", "sparsegpt") if name in {row["method"] for row in results[0].rows}]
    return Content(
        tables=[
            contenders_table(results).captioned(f"Every contender at its best, pruned by magnitude. {_SEEDS}"),
            pruning_table(results).captioned(f"Ways to prune, each model at its best learning rate. {_SEEDS}"),
            tensors_table(results).captioned(f"Which tensors get the mirror step, pruned by magnitude. {_SEEDS}"),
        ],
        figures=[_curves(results, RATES_TUNED, "learning rate", methods)],
    )


def _curves(
    results: Sequence[Result], best_over: Sequence[str], tuned: str, methods: Sequence[str] = ("magnitude",)
) -> Figure:
    return Figure(
        name="sparsity",
        draw=functools.partial(against_zeros, results, best_over=best_over, where=main_contenders, methods=methods),
        caption=f"Perplexity against actual zeros, each optimizer at its best {tuned} for the level; dotted: dense "
        "AdamW at its best.",
        alt="Line charts of perplexity against the share of zeros; the tables have the same numbers.",
    )


def _study(results: Sequence[Result], figures: Sequence[Figure], more: Sequence[Table] = ()) -> Content:
    words = compare_words(results, "HORST, alpha auto", "HORST, alpha 5")
    rates = rate_table(results).captioned(f"Every learning rate. {_SEEDS}")
    if not any(row["optimizer"] == "adamw" for result in results for row in result.rows):
        return Content(summary=[words], tables=[rates])  # more seeds for HORST alone: nothing else to compare
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
