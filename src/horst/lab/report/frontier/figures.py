"""The figures of the frontier studies: quality and the spread of weights against alpha times the learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from horst.extras import load_extra
from horst.lab.experiments.result import Result
from horst.lab.report.figures import new_figure
from horst.lab.report.frontier.cells import (
    Cell,
    any_adamw,
    at,
    best,
    budget_words,
    by_budget,
    cells_of,
    level_names,
    levels_of,
    of,
    one_way,
)
from horst.lab.report.frontier.headline import contenders, dense_adamw, models
from horst.lab.report.transformer_figures import COLOURS, STYLES

LEVELS = (0.0, 0.5, 0.7)
CROPPED = 2.5  # of AdamW's perplexity: beyond it a run is a mark at the top, so that the others can be told apart
_MARKS = {"HORST, alpha 5": ("s", 5.5), "HORST, auto": ("*", 12.0)}


def quality_against_product(results: Sequence[Result], levels: Sequence[float] = LEVELS) -> Any:
    """Quality against alpha * lr: a row a budget, a column a sparsity, a line a learning rate.

    Args:
        results: Of frontier_language or frontier_vision.
        levels: The sparsities to show.
    """
    cells = one_way(results)
    shown = [(given, at(own, sparsity=level), level) for given, own in by_budget(cells).items() for level in levels]
    figure, panels = _panels(len(shown), len(levels))
    for axes, (given, own, level) in zip(panels, shown, strict=True):
        _lines_by_rate(axes, own, cells)
        tuned = best(any_adamw(own))
        if tuned is not None:
            axes.axhline(tuned.mean, color=COLOURS["adamw"], linestyle="--", label="AdamW at its best")
            if tuned.measure.less:
                _crop(axes, tuned.mean)
        axes.set_title(f"{budget_words(given)}, {level_names([level])[0]}", fontsize=9)
        axes.set_ylabel(cells[0].measure.name, fontsize=9)
    _legend(figure, panels, marks=True)
    return figure


def weights_against_product(results: Sequence[Result]) -> Any:
    """The largest weight and the kurtosis against alpha * lr: a row a budget, a line a learning rate.

    HORST's own rule has the bounded geometry, all else the paper's.
    """
    cells = cells_of(results)
    # of language's models the dense ones; of vision's the sparse ones, of which alone there are all products
    cells = at(cells, method="dense" if cells[0].measure.less else "acdc")
    shown = [(given, own, key) for given, own in by_budget(cells).items() for key in ("largest", "kurtosis")]
    figure, panels = _panels(len(shown), 2)
    for axes, (given, own, key) in zip(panels, shown, strict=True):
        _lines_by_rate(axes, own, cells, key)
        if _has_data(axes):  # a logarithmic axis wants some
            axes.set_yscale("log")
        axes.set_title(budget_words(given), fontsize=9)
        axes.set_ylabel({"largest": "largest weight", "kurtosis": "kurtosis"}[key], fontsize=9)
    _legend(figure, panels, marks=True)
    return figure


def tuned_against_sparsity(results: Sequence[Result], methods: Sequence[str] = ("magnitude",)) -> Any:
    """Perplexity against sparsity, each contender at its best for the level, and dense AdamW's as a line across.

    Args:
        results: Of one-shot pruning.
        methods: A column each; a row a budget whose models were pruned by all of them.
    """
    cells = cells_of(results)
    having = {b: own for b, own in by_budget(cells).items() if set(methods) <= {cell.row["method"] for cell in own}}
    shown = [(given, own, method) for given, own in having.items() for method in methods]
    figure, panels = _panels(len(shown), len(methods))
    for axes, (given, own, method) in zip(panels, shown, strict=True):
        _against_sparsity(axes, own, method, dense_adamw(own, given))
        axes.set_title(f"{budget_words(given)}, {method}", fontsize=9)
    _legend(figure, panels)
    return figure


def by_second_beta(results: Sequence[Result], method: str = "magnitude") -> Any:
    """Perplexity against sparsity, a panel a second beta of Adam; the line across is the best dense AdamW of all.

    Args:
        results: Of one-shot pruning, of one budget.
        method: The way of pruning.
    """
    cells = cells_of(results)
    ((given, _),) = by_budget(cells).items()
    betas = sorted({cell.row["beta2"] for cell in cells})
    figure, panels = _panels(len(betas), len(betas))
    for axes, beta2 in zip(panels, betas, strict=True):
        _against_sparsity(axes, at(cells, beta2=beta2), method, dense_adamw(cells, given))
        axes.set_title(f"second beta {beta2:g}, {method}", fontsize=9)
    if limits := [axes.get_ylim() for axes in panels if _has_data(axes)]:
        for axes in panels:
            axes.set_ylim(min(low for low, _ in limits), min(top for _, top in limits))
    _legend(figure, panels)
    return figure


def _against_sparsity(axes: Any, cells: Sequence[Cell], method: str, dense: Cell) -> None:
    """A line a contender, at its best for each level, and one across for a dense model that did not break down."""
    for name, tried in contenders(cells).items():
        # a dense model that was not pruned this way has no place on the line
        kept = [cell for levels in models(tried, method) for cell in levels.values()]
        if not kept:
            continue
        row = kept[0].row
        colour, style = COLOURS[row["optimizer"]], STYLES[(row["alpha"] == 5.0) * (1 + (row["mirror"] == "all"))]
        chosen = [best(at(kept, sparsity=level)) for level in levels_of(kept)]
        points = [(100 * cell.row["sparsity"], cell) for cell in chosen if cell is not None]
        _line(axes, points, color=colour, linestyle=style, label=name)
    if not dense.broken:
        axes.axhline(dense.mean, color=COLOURS["adamw"], linestyle=":", linewidth=1.2, label="dense AdamW")
        top = min(axes.get_ylim()[1], CROPPED * dense.mean)
        lowest = min(value for line in axes.get_lines() for value in line.get_ydata())
        axes.set_ylim(lowest - 0.05 * (top - lowest), top)
    axes.set_xlabel("zeros in the pruned tensors, %", fontsize=9)
    axes.set_ylabel("perplexity", fontsize=9)


def _has_data(axes: Any) -> bool:
    """Whether something is drawn there beside the crosses of runs that broke down."""
    return any(len(line.get_ydata()) for line in axes.get_lines() if line.get_marker() != "x")


def _panels(count: int, columns: int) -> tuple[Any, list[Any]]:
    """So many axes, in rows of so many; in one row if a column would be all."""
    columns = columns if columns > 1 else count
    rows = count // columns
    figure, _ = new_figure(rows, columns, figsize=(0.4 + 3.5 * columns, 0.7 + 2.7 * rows))
    return figure, list(figure.axes)


def _lines_by_rate(axes: Any, cells: Sequence[Cell], everything: Sequence[Cell], key: str = "") -> None:
    """A line a learning rate through HORST's means, from AdamW's at the left on; a square is alpha 5.

    A star at the right is auto, whose product its rule chooses.

    Args:
        axes: Where to draw.
        cells: What to draw.
        everything: What the other panels draw too, so that all have the same colours and the same axis.
        key: Of the rows; none is the quality.
    """
    rates = sorted({cell.row["lr"] for cell in everything if cell.row["optimizer"] == "horst"})
    products = [
        cell.row["alpha_lr"] for cell in everything if cell.row["optimizer"] == "horst" and cell.row["alpha_lr"]
    ]
    zero, auto = min(products) / 2.5, 2.5 * max(products)  # where a logarithmic axis has AdamW and auto
    colours = load_extra("matplotlib").colormaps["viridis"]
    for i, lr in enumerate(rates):
        own = [cell for cell in at(cells, lr=lr) if cell.row["optimizer"] == "horst"]
        if not own:
            continue
        colour = colours(0.9 * i / max(1, len(rates) - 1))
        line = [(zero, cell) for cell in at(of(cells, "AdamW"), lr=lr, weight_decay=own[0].row["weight_decay"])]
        line += [(cell.row["alpha_lr"], cell) for cell in own if cell.row["alpha_lr"] is not None]
        _line(axes, sorted(line, key=lambda point: point[0]), key, color=colour, label=f"lr {lr:g}")
        for name, (marker, size) in _MARKS.items():
            marked = [(cell.row["alpha_lr"] or auto, cell) for cell in of(own, name)]
            look = {"marker": marker, "markersize": size, "markeredgecolor": "0.2", "markeredgewidth": 0.6}
            _line(axes, marked, key, color=colour, linestyle="", zorder=4, **look)
    axes.set_xscale("log")
    ticks = {zero: "AdamW", 0.005: "0.005", 0.02: "0.02", 0.05: "0.05", 0.2: "0.2", auto: "auto"}
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.minorticks_off()
    axes.set_xlim(zero / 1.4, 1.4 * auto)
    axes.set_xlabel("alpha * lr", fontsize=9)


def _line(axes: Any, points: Sequence[tuple[float, Cell]], key: str = "", **look: Any) -> None:
    """The means over seeds, and the seeds as faint dots; a cross at the top where a run broke down."""
    whole = [(x, cell.values(key)) for x, cell in points if len(cell.values(key)) == len(cell.rows)]
    look = {"marker": "o", "markersize": 3.5, "linewidth": 1.4, **look}
    axes.plot([x for x, _ in whole], [statistics.mean(values) for _, values in whole], **look)
    for x, values in whole:
        axes.plot([x] * len(values), values, ".", color=look["color"], alpha=0.35, markersize=3.5)
    for x in (x for x, cell in points if cell.broken):
        axes.plot([x], [0.97], "x", color=look["color"], markersize=6, transform=axes.get_xaxis_transform())
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.tick_params(axis="y", which="both", labelsize=8)


def _crop(axes: Any, reference: float) -> None:
    """End the axis where perplexity is far above a reference; a triangle at the top for each mean that lies above."""
    top = CROPPED * reference
    if axes.get_ylim()[1] > top:
        for line in [line for line in axes.lines if line.get_marker() not in (".", "None", "x")]:
            for x in [x for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True) if y > top]:
                look = {"color": line.get_color(), "markersize": 5, "transform": axes.get_xaxis_transform()}
                axes.plot([x], [0.97], "^", **look)
        axes.set_ylim(top=top)


def _legend(figure: Any, panels: Sequence[Any], *, marks: bool = False) -> None:
    """Below all panels: what the first of them has, and what others have beside it; none if there is nothing."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels, handles = list(found), list(found.values())
    if marks:
        line = load_extra("matplotlib.lines").Line2D
        for name, (marker, size) in _MARKS.items():
            handles.append(line([], [], color="0.6", marker=marker, markersize=size, linestyle="", label=name))
            labels.append(name)
    if not labels:
        return
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), int(figure.get_figwidth() // (1.5 if max(map(len, labels)) < 20 else 3))),
        fontsize=9,
    )
