"""The quickstart's two tables, and what each says in a sentence, for the terminal, the README and the report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.quality_tables import TOLERANCE
from horst.lab.report.runs import contender, finite, percent, spread, zeros
from horst.lab.report.tables import Table, level_name

Row = dict[str, Any]
Pairs = dict[Any, tuple[list[float], list[float]]]  # AdamW's and another's numbers, by what sets them apart
OTHERS = ("horst", "horst-l1")


def rows_of(result: Result, part: str) -> list[Row]:
    """The rows of ``"language"`` or ``"vision"``."""
    return [row for row in result.rows if row["part"] == part]


def language_table(results: Sequence[Result]) -> Table:
    """Perplexity by optimizer and sparsity, over the seeds, and the differences of the means."""
    rows = rows_of(results[0], "language")
    levels = sorted({row["sparsity"] for row in rows})
    lines = []
    for name, own in _by_contender(rows).items():
        cells = [_perplexity([row for row in own if row["sparsity"] == level]) for level in levels]
        lines.append([name, _seed_count(own), *cells])
    for name in OTHERS:
        change = language_changes(results[0], name)
        if change:
            words = [f"{change[level]:+.1%}" if level in change else "" for level in levels]
            lines.append([f"{_name(rows, name)} against AdamW", "", *words])
    return Table(columns=["perplexity per byte", "seeds", *map(level_name, levels)], rows=lines)


def vision_table(results: Sequence[Result]) -> Table:
    """Accuracy by optimizer and learning rate, over the seeds, and the difference in points."""
    rows = rows_of(results[0], "vision")
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    lines = []
    for name, own in _by_contender(rows).items():
        cells = [[percent(row["top1"]) for row in own if row["lr"] == lr] for lr in rates]
        lines.append([name, _seed_count(own), *(spread(values, ".1f") if values else "" for values in cells)])
    points = vision_points(results[0])
    if points:
        words = [f"{points[lr]:+.1f}" if lr in points else "" for lr in rates]
        lines.append(["HORST against AdamW, points", "", *words])
    return Table(columns=["accuracy in %", "seeds", *(f"learning rate {lr:g}" for lr in rates)], rows=lines)


def _perplexity(rows: list[Row]) -> str:
    """Mean and deviation over the seeds, and the actual zeros where they are not the level asked for."""
    if not rows:
        return ""
    words = spread([row["perplexity"] for row in rows], ".2f")
    share = mean(map(zeros, rows))
    return words if abs(share - rows[0]["sparsity"]) < TOLERANCE else f"{words} ({share:.0%} zeros)"


def _seed_count(rows: list[Row]) -> str:
    return str(len({row["seed"] for row in rows}))


def _name(rows: list[Row], optimizer: str) -> str:
    """The name of a contender with its strength."""
    return next((contender(row) for row in rows if row["optimizer"] == optimizer), optimizer)


def language_changes(result: Result, name: str = "horst") -> dict[float, float]:
    """By sparsity: an optimizer's mean perplexity over AdamW's, less one. Seeds that both have."""
    return {level: mean(own) / mean(adamw) - 1 for level, (adamw, own) in _perplexities(result, name).items()}


def vision_points(result: Result) -> dict[float, float]:
    """By learning rate: HORST's mean accuracy less AdamW's, in points. Seeds that both have."""
    return {lr: 100 * (mean(horst) - mean(adamw)) for lr, (adamw, horst) in _accuracies(result).items()}


def language_words(result: Result) -> str:
    """What the language table says."""
    found = [words for name in OTHERS if (words := _language_words(result, name))]
    return " ".join(found) or "No language model of both optimizers is done yet."


def _language_words(result: Result, name: str) -> str:
    pairs, change = _perplexities(result, name), language_changes(result, name)
    parts = [
        f"{change[level]:+.1%} {f'at {level:.0%}' if level else 'dense'}{_doubt(*pairs[level])}" for level in change
    ]
    label = "HORST" if name == "horst" else _name(rows_of(result, "language"), name)
    return f"{label}'s mean perplexity against AdamW's{_seeds(pairs)}: {', '.join(parts)}." if parts else ""


def vision_words(result: Result) -> str:
    """What the vision table says, wherever it points."""
    pairs, points = _accuracies(result), vision_points(result)
    if not points:
        return "No vision model of both optimizers is done yet."
    parts = [f"{points[lr]:+.1f} at learning rate {lr:g}{_doubt(*pairs[lr])}" for lr in points]
    sparsity = rows_of(result, "vision")[0]["sparsity"]
    return (
        f"HORST's mean accuracy less AdamW's{_seeds(pairs)}, in points, with {sparsity:.0%} zeros: {', '.join(parts)}."
    )


def _seeds(pairs: Pairs) -> str:
    fewest = min(len(adamw) for adamw, _ in pairs.values())
    return " (one seed)" if fewest == 1 else ""


def _doubt(adamw: list[float], horst: list[float]) -> str:
    """A difference no larger than the deviation over seeds must not be read as one."""
    if len(adamw) == 1:
        return ""
    within = abs(mean(horst) - mean(adamw)) <= max(stdev(adamw), stdev(horst))
    return " (within the spread over seeds)" if within else ""


def _perplexities(result: Result, name: str) -> Pairs:
    return _pairs(rows_of(result, "language"), "sparsity", "perplexity", name)


def _accuracies(result: Result) -> Pairs:
    return _pairs(rows_of(result, "vision"), "lr", "top1", "horst")


def _pairs(rows: list[Row], key: str, quality: str, other: str) -> Pairs:
    """By ``key``: the quality of AdamW and of another, for the seeds that both have and with which none broke down."""
    found: Pairs = {}
    for value in sorted({row[key] for row in rows}):
        adamw, own = (
            {
                row["seed"]: row[quality]
                for row in rows
                if row[key] == value and row["optimizer"] == name and finite([row[quality]])
            }
            for name in ("adamw", other)
        )
        seeds = sorted(set(adamw) & set(own))
        if seeds:
            found[value] = [adamw[seed] for seed in seeds], [own[seed] for seed in seeds]
    return found


def _by_contender(rows: list[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(contender(row) for row in rows)
    return {name: [row for row in rows if contender(row) == name] for name in names}
