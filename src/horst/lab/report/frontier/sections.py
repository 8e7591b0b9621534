"""What the report shows of the frontier studies, which go beyond the paper."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure, Table
from horst.lab.report.frontier.cells import EDGE, at, best, budget_words, by_budget, cells_of, of
from horst.lab.report.frontier.figures import quality_against_product, tuned_against_sparsity, weights_against_product
from horst.lab.report.frontier.headline import free_table, sparse_against_dense_table
from horst.lab.report.frontier.tables import (
    auto_table,
    auto_words,
    contenders_table,
    pruning_table,
    tensors_table,
    training_methods_table,
    tuned_table,
)

SEEDS = "Means over seeds; ± is their standard deviation."
EDGES = f"{EDGE} marks a setting that is the first or last of three or more that were tried."
_LINES = (
    "One line a learning rate, from AdamW at the left on; squares are alpha 5, stars auto, faint dots the seeds; at "
    "the top, a cross is a run that broke down and a triangle one that lies above"
)
_FREE = (
    "How sparse a pruned model may be and still be as good as dense AdamW at its best, on straight lines between the "
    "measured levels."
)


def language(results: Sequence[Result]) -> Content:
    """Perplexity against alpha * lr, auto against alpha 5 and AdamW, all tuned, and the headline."""
    if not _has_adamw(results):
        return _rule_alone(results)
    return Content(
        summary=[auto_words(results)],
        tables=[
            Table.of(_FREE, free_table(results)),
            _rule(results),
            Table.of(f"Each optimizer at its best, by sparsity, with its settings. {EDGES}", tuned_table(results)),
        ],
        figures=[
            *_products(results, "perplexity", (0.0, *_middle_and_last(results))),
            _curves(results, ("magnitude",)),
        ],
    )


def vision(results: Sequence[Result]) -> Content:
    """Accuracy against alpha * lr, auto against alpha 5 and AdamW, and ways to train sparse."""
    if not _has_adamw(results):
        return _rule_alone(results)
    levels = [level for level in sorted({row["sparsity"] for row in results[0].rows}) if level]
    tables = [
        Table.of(f"Sparse and dense, each at its best. {EDGES}", sparse_against_dense_table(results)),
        _rule(results),
        Table.of(f"Each optimizer at its best, with its settings. {EDGES}", tuned_table(results)),
    ]
    if {row["method"] for row in results[0].rows} - {"dense", "acdc"}:
        tables.append(Table.of(f"Ways to train sparse. {SEEDS}", training_methods_table(results)))
    return Content(summary=[auto_words(results)], tables=tables, figures=_products(results, "accuracy", tuple(levels)))


def compositions(results: Sequence[Result]) -> Content:
    """Other contenders, other ways to prune, other tensors."""
    methods = [method for method in ("magnitude", "sparsegpt") if method in {row["method"] for row in results[0].rows}]
    return Content(
        tables=[
            Table.of(f"Every contender at its best, pruned by magnitude. {EDGES}", contenders_table(results)),
            Table.of(f"Ways to prune, each model at its best learning rate. {SEEDS}", pruning_table(results)),
            Table.of(f"Which tensors get the mirror step, pruned by magnitude. {SEEDS}", tensors_table(results)),
            Table.of(f"{_FREE} AdamW's weight decay is tuned in another study.", free_table(results)),
        ],
        figures=[_curves(results, methods)],
    )


def _rule(results: Sequence[Result]) -> Table:
    return Table.of(f"HORST's own rule at every learning rate. {SEEDS}", auto_table(results))


def _has_adamw(results: Sequence[Result]) -> bool:
    return any(row["optimizer"] == "adamw" for result in results for row in result.rows)


def _rule_alone(results: Sequence[Result]) -> Content:
    """Of a study without AdamW, such as one of more seeds for the rule: there is nothing else to compare."""
    return Content(summary=[auto_words(results)], tables=[_rule(results)], figures=[])


def _middle_and_last(results: Sequence[Result]) -> list[float]:
    """Two sparsities to draw: the least, and 70 % or the greatest."""
    levels = sorted({row["sparsity"] for row in results[0].rows if row["sparsity"]})
    return list(dict.fromkeys([levels[0], 0.7 if 0.7 in levels else levels[-1]]))


def _products(results: Sequence[Result], quality: str, levels: Sequence[float]) -> list[Figure]:
    """Quality and the spread of the weights, against alpha * lr."""
    words = []
    cells = cells_of(results)
    for given, of_budget in by_budget(cells).items():
        own = at(of_budget, sparsity=levels[-1])
        found = {name: best(of(own, name)) for name in ("AdamW", "HORST, alpha 5", "HORST, auto")}
        at_best = ", ".join(f"{name} {cell.mean:.2f}" for name, cell in found.items() if cell is not None)
        words.append(f"{budget_words(given)} at {levels[-1]:.0%}: {at_best or 'all broke down'}.")
    return [
        Figure(
            name="products",
            draw=functools.partial(quality_against_product, results, levels),
            caption=f"{quality.capitalize()} against alpha times the peak learning rate. {_LINES}.",
            alt=f"Line charts of {quality} against alpha times the learning rate. Best means: {' '.join(words)}",
        ),
        Figure(
            name="weights",
            draw=functools.partial(weights_against_product, results),
            caption="Where weights run away: the largest weight in the blocks and their kurtosis. Auto has a bounded "
            f"geometry, all else the paper's. {_LINES}.",
            alt="Line charts of the largest weight and of the kurtosis against alpha times the learning rate, on "
            "logarithmic axes.",
        ),
    ]


def _curves(results: Sequence[Result], methods: Sequence[str]) -> Figure:
    return Figure(
        name="sparsity",
        draw=functools.partial(tuned_against_sparsity, results, methods),
        caption="Perplexity against sparsity, each optimizer at its best learning rate and weight decay for the level; "
        "the dotted line is dense AdamW at its best.",
        alt="Line charts of perplexity against the share of zeros; the tables have the same numbers.",
    )
