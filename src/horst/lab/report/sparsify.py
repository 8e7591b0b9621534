"""What the page of ``horst sparsify`` shows: what was lost and won back, stage by stage; the zeros of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.document import Content, Figure
from horst.lab.report.figures import new_figure
from horst.lab.report.tables import Row, Table, number

NAMES = {
    "perplexity": "Perplexity",
    "cosine": "Cosine to the dense model",
    "top1": "Accuracy",
    "top5": "Top-5 accuracy",
}
ENOUGH_TOKENS = 10_000  # to judge a perplexity by
MOST_PASSES = 3  # over a text before a model learns it by heart
_UNITS = {"tokens": "tokens", "images": "images", "rows": "texts"}


def section(results: Sequence[Result]) -> Content:
    """The sentence, the curve, the stages, the layers."""
    result = results[0]
    better = "more" if result.curves["higher_is_better"] else "less"
    metric = NAMES.get(result.curves["metric"], result.curves["metric"])
    stages = stages_table(result).captioned(f"{metric} on data that was not trained on; {better} is better.")
    layers = layers_table(result).captioned("Zeros of each layer, counted after the training.")
    curve = Figure(
        name="curve",
        draw=lambda: draw_curve(result),
        caption=f"{metric} while training; the dashed line is the dense model.",
        alt=f"Line chart of {metric.lower()} against what was trained on. {words(result)}",
    )
    return Content(summary=[words(result)], tables=[stages, layers], figures=[curve])


def stages_table(result: Result) -> Table:
    """The dense model, each pruned one, each trained one."""
    metrics = [name for name in result.rows[0] if name in NAMES or name == result.curves["metric"]]
    unit = _UNITS.get(result.curves["unit"], result.curves["unit"])
    rows = [
        [_stage(row), str(row["steps"] or ""), f"{row['units']:,}" if row["units"] else "", *_numbers(row, metrics)]
        for row in result.rows
    ]
    return Table(columns=["model", "steps", unit, *(NAMES.get(name, name).lower() for name in metrics)], rows=rows)


def layers_table(result: Result) -> Table:
    """One row for each pruned layer."""
    rows = [
        [layer["layer"], " x ".join(map(str, layer["shape"])), number(layer["sparsity"], ".1%")]
        for layer in result.curves["layers"]
    ]
    return Table(columns=["layer", "shape", "zeros"], rows=rows)


def words(result: Result) -> str:
    """One sentence: before, after pruning, after training.

    Example:
        >>> rows = [{"stage": s, "sparsity": 0.5, "perplexity": p}
        ...         for s, p in (("dense", 20.0), ("pruned", 30.0), ("trained", 22.0))]
        >>> rows[-1]["sparsity_of_pruned_layers"] = 0.5
        >>> curves = {"metric": "perplexity", "higher_is_better": False}
        >>> rest = {"config": {}, "notes": [], "environment": {}, "seconds": 1.0}
        >>> words(Result(experiment="sparsify", rows=rows, curves=curves, **rest))
        'Perplexity 20 dense, 22 with 50 % zeros; 30 before training, so 80 % of the loss is won back.'
    """
    metric, more = result.curves["metric"], result.curves["higher_is_better"]
    # The row before the last is the pruned model, or the dense one where training starts from it.
    dense, pruned, trained = (result.rows[place][metric] for place in (0, -2, -1))
    share = result.rows[-1]["sparsity_of_pruned_layers"]
    text = f"{NAMES.get(metric, metric)} {dense:.4g} dense, {trained:.4g} with {100 * share:.3g} % zeros"
    asked = result.rows[-1]["sparsity"]
    if share > asked + 0.005:
        text += f" (the model had more than the {100 * asked:.3g} % asked for)"
    if doubts := doubts_of(result.curves.get("judged_on"), result.curves.get("passes", 0.0)):
        return f"{text}. {doubts}"
    lost, left = (dense - value if more else value - dense for value in (pruned, trained))
    if left <= 0:
        # Not "has never seen": the model may have been pretrained on the same data.
        data = "these images" if result.curves["unit"] == "images" else "this text"
        return f"{text}: no worse than dense, but only the sparse model was trained further on {data}."
    if len(result.rows) > 3 or left >= lost:  # of several stages, the last pruning is not what pruning at once costs
        return f"{text}."
    return f"{text}; {pruned:.4g} before training, so {100 * (1 - left / lost):.0f} % of the loss is won back."


def doubts_of(judged_on: int | None, passes: float) -> str:
    """Why a verdict would rest on too little text; empty if it would not.

    Args:
        judged_on: Tokens that the perplexity is measured on; None for another metric.
        passes: How often the training text is read.

    Example:
        >>> doubts_of(128, 1.0)
        'Judged on 128 tokens: fewer than 10,000 say little about other text. Give --eval-data.'
    """
    found = []
    if judged_on is not None and judged_on < ENOUGH_TOKENS:
        found.append(
            f"Judged on {judged_on:,} tokens: fewer than {ENOUGH_TOKENS:,} say little about other text. Give "
            "--eval-data."
        )
    if passes > MOST_PASSES:
        found.append(
            f"The training text is read about {passes:.0f} times, so it may be learnt by heart. Give more text, or "
            "train for fewer steps."
        )
    return " ".join(found)


def draw_curve(result: Result) -> Any:
    """The metric against the steps of all stages, with each pruning as a jump."""
    metric = result.curves["metric"]
    figure, axes = new_figure(1, 1, figsize=(6.4, 3.8))
    before = 0
    # A training starts from the row before it: the pruned model, or the dense one where the method goes from there.
    trained = [(start, row) for start, row in pairwise(result.rows) if row["stage"] == "trained"]
    for (start, row), lines in zip(trained, result.curves["training"], strict=True):
        points = [(line["step"], line[f"eval_{metric}"]) for line in lines if f"eval_{metric}" in line]
        points = [(0, start[metric]), *points]
        axes.plot(
            [before + step for step, _ in points], [value for _, value in points], marker="o", markersize=3,
            label=f"{row['sparsity']:.0%} zeros",
        )  # fmt: skip
        before += row["steps"]
    axes.axhline(result.rows[0][metric], linestyle="--", color="0.4", label="dense")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(NAMES.get(metric, metric).lower())
    if not result.curves["higher_is_better"] and max(row[metric] for row in result.rows) > 2 * result.rows[0][metric]:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _stage(row: Row) -> str:
    return "dense" if row["stage"] == "dense" else f"{row['sparsity']:.0%} zeros, {row['stage']}"


def _numbers(row: Row, metrics: Sequence[str]) -> list[str]:
    return [f"{100 * row[m]:.2f} %" if m.startswith("top") else f"{row[m]:.4g}" for m in metrics]
