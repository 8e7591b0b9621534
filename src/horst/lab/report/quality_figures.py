"""Figures of the studies beyond the paper: quality against actual zeros, and against alpha times the learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

from horst.extras import load_extra
from horst.lab.experiments.result import Result
from horst.lab.report.figures import new_figure
from horst.lab.report.quality_tables import dense_adamw, lines_of
from horst.lab.report.runs import Cell, at, best, budget, by_budget, cells_of, contender, is_whole
from horst.lab.report.tables import Row, level_name
from horst.lab.report.transformer_figures import COLOURS, STYLES

CROPPED = 1.7  # times dense AdamW's perplexity: the axis ends there, so that the better models can be told apart
_AUTO = {"horst": "#E69F00", "horst-l1": "#CC79A7"}  # colours of alpha="auto" beside a fixed alpha
_METHOD_MARKS = {"magnitude": "o", "sparsegpt": "s", "wanda": "^"}


def against_zeros(
    results: Sequence[Result],
    *,
    best_over: Collection[str] = (),
    where: Callable[[Row], bool] = lambda row: True,
    methods: Collection[str] = ("magnitude",),
    panels: Callable[[Row], str] = budget,
) -> Any:
    """Quality against the actual share of zeros, one line per contender; dotted: the best dense AdamW.

    Args:
        results: Files of one-shot pruning.
        best_over: Settings that are tuned: at each level a line shows the best of them.
        where: Condition on rows.
        methods: Ways of pruning; the lines of the second are dashed, and so on.
        panels: Title of the panel in which a row is drawn.
    """
    cells = [c for c in cells_of(results) if where(c.row) and c.row["method"] in ("dense", *methods)]
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(panels(cell.row), []).append(cell)
    figure, all_axes = _panels(len(groups))
    for axes, (title, own) in zip(all_axes, sorted(groups.items()), strict=True):
        _curves(axes, own, best_over, list(methods))
        same = [c for c in cells if budget(c.row) == budget(own[0].row)]
        dense = dense_adamw(same)
        if dense is not None:
            axes.axhline(dense.mean, color=COLOURS["adamw"], linestyle=":", linewidth=1.3, label="dense AdamW")
            values = [y for line in axes.get_lines() for y in line.get_ydata() if line.get_marker() != "x"]
            top = min(max(values), CROPPED * dense.mean)
            axes.set_ylim(min(values) - 0.05 * (top - min(values)), top + 0.05 * (top - min(values)))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("zeros among the pruned weights, %")
        axes.set_ylabel(cells[0].measure.name)
    _legend(figure, all_axes)
    return figure


def against_product(results: Sequence[Result], levels: Sequence[float], key: str = "") -> Any:
    """Quality against alpha * lr: one row per budget, one column per sparsity, one line per learning rate.

    AdamW is at the left, ``alpha="auto"`` (a star) at the right, since its rule chooses the product.

    Args:
        results: Files of a frontier study.
        levels: Sparsities to show.
        key: Measurement to draw on a logarithmic axis; none is the quality.
    """
    cells = [c for c in cells_of(results) if c.row["method"] in ("dense", "magnitude", "acdc")]
    cells = [c for c in cells if is_whole(c.row)]
    shown = [(name, at(own, sparsity=level), level) for name, own in by_budget(cells).items() for level in levels]
    horst = at(cells, optimizer="horst")
    rates = sorted({c.row["lr"] for c in horst})
    products = [c.row["alpha_lr"] for c in horst if c.row.get("alpha_lr")] or [1.0]
    zero, auto = min(products) / 2.5, 2.5 * max(products)  # where a logarithmic axis has AdamW and auto
    colours = load_extra("matplotlib").colormaps["viridis"]
    figure, all_axes = _panels(len(shown), len(levels))
    for axes, (name, own, level) in zip(all_axes, shown, strict=True):
        for i, lr in enumerate(rates):
            look = {"color": colours(0.9 * i / max(1, len(rates) - 1))}
            line = [(zero, c) for c in at(own, optimizer="adamw", lr=lr, weight_decay=cells[0].row["weight_decay"])]
            line += [(c.row["alpha_lr"], c) for c in at(own, optimizer="horst", lr=lr) if c.row.get("alpha_lr")]
            _line(axes, sorted(line, key=lambda point: point[0]), key, label=f"lr {lr:g}", **look)
            stars = [(auto, c) for c in at(own, optimizer="horst", lr=lr, alpha="auto")]
            _line(axes, stars, key, marker="*", markersize=11, linestyle="", **look)
        tuned = best(at(own, optimizer="adamw"))
        if not key and tuned is not None:
            axes.axhline(tuned.mean, color=COLOURS["adamw"], linestyle="--", label="AdamW at its best")
            if tuned.measure.less:
                axes.set_ylim(top=min(axes.get_ylim()[1], CROPPED * tuned.mean))
        if key and any(len(line.get_ydata()) for line in axes.get_lines()):
            axes.set_yscale("log")
        axes.set_xscale("log")
        between = {x: f"{x:g}" for x in (0.005, 0.02, 0.1) if min(products) <= x <= max(products)}
        ticks = {zero: "AdamW", **between, auto: "auto"}
        axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
        axes.minorticks_off()
        axes.set_xlim(zero / 1.4, 1.4 * auto)
        axes.set_title(f"{name}, {level_name(level)}", fontsize=9)
        axes.set_xlabel("alpha * lr (star: auto)", fontsize=9)
        axes.set_ylabel(key or cells[0].measure.name, fontsize=9)
    _legend(figure, all_axes)
    return figure


def _curves(axes: Any, cells: Sequence[Cell], best_over: Collection[str], methods: Sequence[str]) -> None:
    for method, own in lines_of(cells, best_over):
        if method not in methods:
            continue  # a dense model that was not pruned has no line
        row = next((c.row for c in own if c.row["method"] == method), own[0].row)
        name = contender(row, tuned=best_over) + (f", {method}" if len(methods) > 1 else "")
        tried = [best(at(own, sparsity=level)) for level in sorted({c.row["sparsity"] for c in own})]
        auto = _AUTO.get(row["optimizer"]) if row["alpha"] == "auto" else None
        colour = auto or COLOURS[row["optimizer"]]
        alike = [x for x in axes.get_lines() if x.get_color() == colour and not str(x.get_label()).startswith("_")]
        style = STYLES[methods.index(method)] if len(methods) > 1 else STYLES[len(alike) % len(STYLES)]
        points = [(100 * c.zeros, c) for c in tried if c is not None]
        look = {"color": colour, "linestyle": style, "marker": _METHOD_MARKS.get(method, "o")}
        _line(axes, points, label=name, **look)


def _line(axes: Any, points: Sequence[tuple[float, Cell]], key: str = "", **look: Any) -> None:
    """The means over seeds, with the seeds as faint dots; a cross at the top where a run broke down."""
    whole = [(x, cell.values(key)) for x, cell in points if len(cell.values(key)) == len(cell.rows)]
    look = {"marker": "o", "markersize": 4, "linewidth": 1.5, **look}
    axes.plot([x for x, _ in whole], [statistics.mean(values) for _, values in whole], **look)
    for x, values in whole:
        if len(values) > 1:
            axes.plot([x] * len(values), values, ".", color=look["color"], alpha=0.35, markersize=4)
    for x in (x for x, cell in points if cell.broken):
        axes.plot([x], [0.97], "x", color=look["color"], markersize=6, transform=axes.get_xaxis_transform())
    axes.grid(alpha=0.3, which="both", linewidth=0.5)


def _panels(count: int, columns: int = 0) -> tuple[Any, list[Any]]:
    """So many axes, in rows of so many; all in one row if a column would hold them all."""
    columns = columns if columns > 1 else max(1, count)
    rows = max(1, -(-count // columns))
    width = 7.0 if count <= 1 else 0.4 + 3.6 * columns
    figure, _ = new_figure(rows, columns, figsize=(width, 4.6 if count <= 1 else 0.9 + 3.0 * rows))
    return figure, list(figure.axes)[: max(1, count)]


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    """Below all panels, what any of them has; none if there is nothing."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        columns = int(figure.get_figwidth() // (1.5 if max(map(len, found)) < 20 else 2.8))
        place = {"loc": "outside lower center", "ncols": max(1, min(len(found), columns)), "fontsize": 9}
        figure.legend(list(found.values()), list(found), **place)
