"""The quickstart's two tables, and what they say in a sentence each: for the terminal, the README and the report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import markdown
from horst.lab.report.transformer_tables import LABELS, contender, finite, percent, spread

Row = dict[str, Any]
Pairs = dict[Any, tuple[list[float], list[float]]]  # AdamW's and another's numbers, by what sets them apart
OTHERS = ("horst", "horst-proximal")


def rows_of(result: Result, part: str) -> list[Row]:
    """The rows of ``"language"`` or ``"vision"``."""
    return [row for row in result.rows if row["part"] == part]


def language_table(results: Sequence[Result]) -> str:
    """Perplexity by optimizer and sparsity, over the seeds, and the differences of the means."""
    rows = rows_of(results[0], "language")
    levels = sorted({row["sparsity"] for row in rows})
    lines = [
        [name, *(spread([row["perplexity"] for row in own if row["sparsity"] == level], ".2f") for level in levels)]
        for name, own in _by_contender(rows).items()
    ]
    for name in OTHERS:
        change = language_changes(results[0], name)
        if change:
            words = [f"{change[level]:+.1%}" if level in change else "" for level in levels]
            lines.append([f"{LABELS[name]} against AdamW", *words])
    return markdown(["perplexity a byte", *("dense" if not level else f"{level:.0%}" for level in levels)], lines)


def vision_table(results: Sequence[Result]) -> str:
    """Accuracy by optimizer and learning rate, over the seeds, and the difference in points."""
    rows = rows_of(results[0], "vision")
    rates = list(dict.fromkeys(row["lr"] for row in rows))
    cells = {
        name: [[percent(row["top1"]) for row in own if row["lr"] == lr] for lr in rates]
        for name, own in _by_contender(rows).items()
    }
    lines = [[name, *(spread(v, ".1f") if v else "" for v in values)] for name, values in cells.items()]
    points = vision_points(results[0])
    if points:
        lines.append(["HORST against AdamW, points", *(f"{points[lr]:+.1f}" if lr in points else "" for lr in rates)])
    return markdown(["accuracy in %", *(f"learning rate {lr:g}" for lr in rates)], lines)


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
    label = LABELS[name][0].upper() + LABELS[name][1:]
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
