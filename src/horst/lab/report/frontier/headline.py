"""The headline of the frontier studies: how sparse a model may be and still match dense AdamW of the same budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.frontier.cells import (
    CONTENDERS,
    IDENTITY,
    Cell,
    any_adamw,
    at,
    best,
    budget_words,
    by_budget,
    cells_of,
    default_tensors,
    level_names,
    levels_of,
    of,
    one_way,
    with_settings,
)
from horst.lab.report.tables import markdown
from horst.lab.report.transformer_tables import LABELS

WITHIN = 0.01  # of dense AdamW's perplexity: what the headline still calls as good


def free_table(results: Sequence[Result], methods: Sequence[str] = ("magnitude", "sparsegpt")) -> str:
    """The headline: how sparse a pruned model may be and still match *dense* AdamW of the same budget at its best.

    Args:
        results: Of one-shot pruning, from as many files as have models of the same budget.
        methods: Ways of pruning; those that no model was pruned by are left out.
    """
    cells = cells_of(results)
    settings = ["lr", *(["beta2"] if len({cell.row["beta2"] for cell in cells}) > 1 else [])]
    lines = []
    for given, own in by_budget(cells).items():
        dense = dense_adamw(own, given)
        for method in methods:
            for name, tried in contenders(own).items():
                found = models(tried, method)
                if found:
                    words = ["", ""]  # a model that broke down is nothing to match
                    if not dense.broken:
                        limits = (dense.mean, dense.mean * (1 + WITHIN))
                        words = [_free_words(found, limit, settings) for limit in limits]
                    reference = "broke down" if dense.broken else f"{dense.mean:.2f}"
                    lines.append([f"{budget_words(given)}: {reference}", name, method, *words])
    return markdown(
        ["dense AdamW's perplexity", "trained by", "pruned by", "no worse up to", f"within {WITHIN:.0%} up to"], lines
    )


def contenders(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The main comparison's, the same strengths with the mirror step on other tensors, those with a soft threshold."""
    found = {name: of(cells, name) for name in CONTENDERS}
    for cell in cells:
        row = cell.row
        if row["optimizer"] == "horst" and row["alpha"] in (5.0, "auto") and not default_tensors(cell):
            strength = "auto" if row["alpha"] == "auto" else "alpha 5"
            found.setdefault(f"HORST, {strength}, mirror step on {row['mirror']}", []).append(cell)
        elif row["optimizer"] in ("adamw-held", "adamw-proximal"):
            found.setdefault(LABELS[row["optimizer"]], []).append(cell)
        elif row["optimizer"] == "horst-proximal":
            tensors = "" if default_tensors(cell) else f", mirror step on {row['mirror']}"
            found.setdefault(f"proximal HORST, {row['alpha']}{tensors}", []).append(cell)
    return found


def dense_adamw(cells: Iterable[Cell], given: tuple[int, int, str]) -> Cell:
    """AdamW's best dense model of a budget; where all broke down, one that did.

    Raises:
        ValueError: There is none.
    """
    tried = at(any_adamw(cells), method="dense")
    if not tried:
        raise ValueError(
            f"there is no dense AdamW of {budget_words(given)} to compare with. Give the result that has it as well."
        )
    return best(tried) or tried[0]


def sparse_against_dense_table(results: Sequence[Result]) -> str:
    """The headline of sparse training: AC/DC's accuracy and how far it is from dense AdamW's, each at its best."""
    cells = one_way(results)
    lines = []
    for given, own in by_budget(cells).items():
        dense = dense_adamw(own, given)
        for name in CONTENDERS:
            for level in levels_of(own):
                tried = at(of(own, name), sparsity=level)
                if tried:
                    found = best(tried)
                    words = with_settings(tried, decays=name == "AdamW", products=False)
                    points = "" if found is None or dense.broken else f"{found.mean - dense.mean:+.1f}"
                    lines.append([budget_words(given), name, *level_names([level]), words, points])
    return markdown(["budget", "optimizer", "zeros", "accuracy in %", "points to dense AdamW"], lines)


def models(cells: Iterable[Cell], method: str) -> list[dict[float, Cell]]:
    """Every model that was pruned by a method: its cells by sparsity, the dense model's at 0."""
    found: dict[tuple[Any, ...], dict[float, Cell]] = {}
    for cell in cells:
        if cell.row["method"] in ("dense", method):
            same = tuple(cell.row.get(name) for name in IDENTITY if name not in ("method", "sparsity"))
            found.setdefault(same, {})[cell.row["sparsity"]] = cell
    return [levels for levels in found.values() if 0.0 in levels and len(levels) > 1]


def free_sparsity(costs: Mapping[float, float], limit: float) -> float | None:
    """The largest sparsity up to which the cost stays within a limit, on straight lines between measured levels.

    Args:
        costs: By sparsity.
        limit: What is allowed.

    Returns:
        None if the least sparsity has more than allowed; the largest one measured if none has.

    Example:
        >>> free_sparsity({0.0: 8.0, 0.5: 9.0, 0.7: 13.0}, limit=10.0)
        0.55
        >>> free_sparsity({0.0: 8.0, 0.5: 9.0}, limit=10.0), free_sparsity({0.0: 8.0, 0.5: 9.0}, limit=7.0)
        (0.5, None)
    """
    levels = sorted(costs)
    if not costs[levels[0]] <= limit:
        return None
    for low, high in itertools.pairwise(levels):
        if not costs[high] <= limit:
            rise = costs[high] - costs[low]
            share = (limit - costs[low]) / rise if math.isfinite(rise) else 0.0
            return low + (high - low) * share
    return levels[-1]


def _free_words(found: Sequence[Mapping[float, Cell]], limit: float, settings: Sequence[str]) -> str:
    """The model that can be pruned furthest, how far, and those settings of it."""
    free = {i: free_sparsity({level: cell.cost for level, cell in m.items()}, limit) for i, m in enumerate(found)}
    known = {i: sparsity for i, sparsity in free.items() if sparsity is not None}
    if not known:
        return "not even dense"
    chosen = max(known, key=lambda i: known[i])
    most = known[chosen] == max(found[chosen])
    row = found[chosen][0.0].row
    words = ", ".join(f"{name} {row[name]:g}" for name in settings)
    return f"{'at least ' if most else ''}{known[chosen]:.0%} ({words})"
