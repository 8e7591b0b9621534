"""One table for every study: a row per contender, a column per sparsity, with settings, actual zeros and seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.runs import (
    Cell,
    at,
    best,
    budget,
    by_budget,
    cells_of,
    contender,
    identity,
    is_whole,
    length_and_width,
)
from horst.lab.report.tables import Row, Table, level_name, number

EDGE = "†"  # the best is the first or last of three or more that were tried: better ones may lie outside
TOLERANCE = 0.005  # actual zeros closer than this to the level asked for are not said again
_DENSE_METHODS = ("dense", "")
# What is left where kinds of tensors are taken out, in words.
_MIRRORED = {
    "all but matrix, embedding, position, head": "norm gains",
    "all, not matrix, embedding, position, head": "norm gains",
    "all, not matrix, embedding, position": "norm gains",
    "all, not norm": "all but norm gains",
    "all, not norm, embedding, position": "block matrices",
    "all, not norm, matrix": "embeddings, positions",
}
# Settings that may tell rows of a table apart, each a column where not all rows share it.
SETTINGS: Mapping[str, Callable[[Row], Any]] = {
    "budget": budget,
    "lr": lambda row: row.get("lr"),
    "beta2": lambda row: row.get("beta2"),
    "decay": lambda row: row.get("weight_decay"),
    "decay on": lambda row: row.get("decay"),
    "mirror step on": lambda row: (
        _MIRRORED.get(row["mirror"], row["mirror"]) if row.get("alpha") and "mirror" in row else None
    ),
}
# What a table may choose the best of, and how a cell names the choice.
TUNABLE = {"lr": "lr", "weight_decay": "decay", "beta2": "beta2", "alpha": "alpha", "l1": "l1", "strength": "strength"}
_COLUMN_OF = {"lr": "lr", "beta2": "beta2", "weight_decay": "decay"}
_WAYS = {"sparsegpt": "SparseGPT", "wanda": "Wanda", "acdc": "AC/DC", "gmp": "GMP", "rigl": "RigL"}
_DISTRIBUTIONS = {"global": "global", "owl": "OWL"}  # a way without one is uniform


def quality_table(
    results: Sequence[Result],
    *,
    best_over: Collection[str] = (),
    where: Callable[[Row], bool] = lambda row: True,
    methods: Collection[str] | None = None,
    show: Collection[str] = (),
    paper: Mapping[str, Mapping[float, str]] | None = None,
    free: bool = False,
) -> Table:
    """Quality by contender and sparsity.

    Runs that differ in their seeds alone are averaged. A cell names the actual share of zeros where it is not the
    column's, and the settings that it is the best of.

    Args:
        results: Files of one-shot pruning, or of sparse training.
        best_over: Settings of :data:`TUNABLE` of which each cell shows the best; all others tell rows apart.
        where: Condition on rows.
        methods: Ways of pruning to show; None is all.
        show: Names of :data:`SETTINGS` that have a column even if all rows share them.
        paper: By optimizer and sparsity, the paper's numbers, shown below the optimizer's first row.
        free: Add a column: up to which share of zeros it is no worse than dense AdamW of the same budget. A model of
            AdamW's own is compared with its own seeds.
    """
    cells = [cell for cell in cells_of(results) if where(cell.row)]
    if methods is not None:
        cells = [cell for cell in cells if cell.row["method"] in (*_DENSE_METHODS, *methods)]
    levels = sorted({cell.row["sparsity"] for cell in cells})
    lines = lines_of(cells, best_over)
    if "lr" in show:
        lines.sort(key=lambda line: (length_and_width(line[1][0].row), line[1][0].row.get("lr") or 0.0))
    chosen = {_COLUMN_OF[name] for name in best_over if name in _COLUMN_OF}
    columns = {
        name: read
        for name, read in SETTINGS.items()
        if name not in chosen and (name in show or len({read(own[0].row) for _, own in lines} - {None, ""}) > 1)
    }
    several_methods = len({method for method, _ in lines} - set(_DENSE_METHODS)) > 1
    dense = {name: dense_adamw(own) for name, own in by_budget(cells).items()} if free else {}
    rows: list[list[str]] = []
    theirs: list[int] = []
    shown = set()
    for method, own in lines:
        row = own[0].row
        words = [contender(row, tuned=best_over), *(_word(read(row)) for read in columns.values())]
        words += [way_name(method)] * several_methods
        rows.append([*words, _seeds(own), *(_cell(at(own, sparsity=level), best_over) for level in levels)])
        if free:
            rows[-1].append(_free_words(own, dense[budget(row)]))
        numbers = (paper or {}).get(row["optimizer"], {})
        if row["optimizer"] not in shown and any(level in numbers for level in levels):
            shown.add(row["optimizer"])
            theirs.append(len(rows))
            blank = [""] * (len(words) - 1)
            rows.append(["the paper's", *blank, "", *(numbers.get(level, "") for level in levels), *[""] * free])
    titles = [cells[0].measure.name if cells else "", *columns, *["pruned by"] * several_methods, "seeds"]
    titles += [*map(level_name, levels), *["no worse than the best dense AdamW up to"] * free]
    return Table(columns=titles, rows=rows, paper=theirs)


def way_name(method: str) -> str:
    """A way of pruning in words.

    Example:
        >>> way_name("sparsegpt-global"), way_name("magnitude")
        ('SparseGPT, global', 'magnitude')
    """
    way, _, distribution = method.partition("-")
    words = [_WAYS.get(way, way), *([_DISTRIBUTIONS.get(distribution, distribution)] if distribution else [])]
    return ", ".join(words)


def zeros_among_all(results: Sequence[Result], table: Table) -> list[str]:
    """A row for a table of one-shot pruning: which share of all weights the zeros of each column are."""
    share: dict[str, float] = {}
    for cell in cells_of(results):
        row = cell.row
        if row.get("sparsity_of_all_weights") is not None and abs(cell.zeros - row["sparsity"]) < TOLERANCE:
            share.setdefault(level_name(row["sparsity"]), row["sparsity_of_all_weights"])
    return ["zeros among all weights", *(number(share.get(c), ".1%", none="") for c in table.columns[1:])]


def compare_words(results: Sequence[Result], first: str, second: str) -> str:
    """In how many cells one contender is worse than another, and than AdamW at its best, in a sentence or two.

    Args:
        results: Files of a study.
        first, second: Names as :func:`~horst.lab.report.runs.contender` gives them.
    """
    cells = [cell for cell in cells_of(results) if is_whole(cell.row)]
    cells = [cell for cell in cells if cell.row["method"] in ("dense", "magnitude", "acdc", "")]
    compared, clearly, beside, better, worse = 0, 0, 0, 0, []
    others = {identity(c.row, without=("optimizer", "alpha", "alpha_lr", "strength")): c
              for c in cells if contender(c.row) == second}  # fmt: skip
    for cell in (c for c in cells if contender(c.row) == first):
        row = cell.row
        other = others.get(identity(row, without=("optimizer", "alpha", "alpha_lr", "strength")))
        if other is not None:
            compared += 1
            if cell.cost > other.cost:
                worse.append(f"{budget(row)}, lr {row['lr']:g}, {level_name(row['sparsity'])}")
                clearly += _beyond_noise(cell, other)
        same = [c for c in at(cells, optimizer="adamw", sparsity=row["sparsity"]) if budget(c.row) == budget(row)]
        if (adamw := best(same)) is not None:
            beside += 1
            better += cell.cost < adamw.cost
    words = f"By the mean over seeds, {first} is worse than {second} in {len(worse)} of {compared} cells"
    words += f" ({'; '.join(worse)}), in {clearly} by more than twice the standard error." if worse else "."
    return words + (f" It is better than AdamW at AdamW's best in {better} of {beside}." if beside else "")


def free_sparsity(costs: Mapping[float, float], limit: float) -> float | None:
    """The largest share of zeros up to which the cost stays within a limit, on straight lines between measured ones.

    Args:
        costs: Cost by share of zeros.
        limit: Largest cost allowed.

    Returns:
        None if the least sparse model costs more than allowed; the largest share measured if none does.

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
            return low + (high - low) * ((limit - costs[low]) / rise if math.isfinite(rise) else 0.0)
    return levels[-1]


def lines_of(cells: Sequence[Cell], best_over: Collection[str]) -> list[tuple[str, list[Cell]]]:
    """The cells of each row of a table, with its way of pruning; dense models are in the rows of all their prunings."""
    tuned = {*best_over, "method", "sparsity", *(("alpha_lr", "strength") if best_over else ())}
    groups: dict[Any, list[Cell]] = {}
    for cell in cells:
        name = contender(cell.row, tuned=best_over)
        groups.setdefault((name, identity(cell.row, without={*tuned, "optimizer", "alpha", "l1", "beta"})), []).append(
            cell
        )
    found = []
    for own in groups.values():
        methods = list(dict.fromkeys(c.row["method"] for c in own if c.row["method"] not in _DENSE_METHODS))
        for method in methods or [own[0].row["method"]]:
            found.append((method, [*_dense_of(own, method), *at(own, method=method)]))
    return sorted(found, key=lambda line: length_and_width(line[1][0].row))


def _dense_of(cells: Sequence[Cell], method: str) -> list[Cell]:
    """Dense models that were pruned by a method, with the seeds that were; of sparse training, every dense model."""
    dense = [cell for cell in cells if cell.row["method"] in _DENSE_METHODS and cell.row["method"] != method]
    if method in _DENSE_METHODS or "top1" in cells[0].row:
        return dense
    seeds: dict[Any, set[Any]] = {}
    for cell in at(cells, method=method):
        seeds.setdefault(_model(cell), set()).update(row["seed"] for row in cell.rows)
    kept = [[row for row in cell.rows if row["seed"] in seeds.get(_model(cell), ())] for cell in dense]
    return [Cell(tuple(rows), cell.measure) for rows, cell in zip(kept, dense, strict=True) if rows]


def _model(cell: Cell) -> tuple[Any, ...]:
    return identity(cell.row, without=("method", "sparsity"))


def _cell(tried: Sequence[Cell], best_over: Collection[str]) -> str:
    """The best of what was tried: its mean, the settings that were chosen, and its zeros where they differ."""
    if not tried:
        return ""
    found = best(tried)
    if found is None:
        return str(tried[0]) if len(tried) == 1 else "broke down"
    notes = []
    for key, label in TUNABLE.items():
        if key == "strength" and (found.row.get("alpha") or found.row.get("l1")):
            continue  # alpha or l1 says it
        values = sorted({c.row[key] for c in tried if isinstance(c.row.get(key), (int, float))})
        if key in best_over and len(values) > 1 and isinstance(found.row.get(key), (int, float)):
            at_edge = len(values) > 2 and found.row[key] in (values[0], values[-1]) and found.row[key] != 0
            notes.append(f"{label} {found.row[key]:.3g}{EDGE if at_edge else ''}")
    if abs(found.zeros - found.row["sparsity"]) >= TOLERANCE:
        notes.append(f"{found.zeros:.0%} zeros")
    return f"{found} ({', '.join(notes)})" if notes else str(found)


def _seeds(cells: Sequence[Cell]) -> str:
    counts = sorted({len(cell.rows) for cell in cells})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _word(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:g}"


def dense_adamw(cells: Sequence[Cell]) -> Cell | None:
    """The best dense model that AdamW trained without ``l1``; none if there is none, or if all broke down."""
    return best(cell for cell in cells if cell.row["optimizer"].startswith("adamw") and cell.row["method"] == "dense"
                and not cell.row.get("l1"))  # fmt: skip


def _free_words(own: Sequence[Cell], dense: Cell | None) -> str:
    """How far the model of a row that can be pruned furthest can be pruned."""
    models: dict[Any, list[Cell]] = {}
    for cell in own:
        models.setdefault(_model(cell), []).append(cell)
    pruned = [cells for cells in models.values() if any(cell.row["sparsity"] for cell in cells)]
    if dense is None or not pruned:
        return ""
    known = []
    for cells in pruned:
        costs = {cell.zeros: cell.cost for cell in cells}
        itself = dense_adamw(cells)  # which may have fewer seeds than the best
        limit = min(dense.cost, itself.cost) if itself is not None else dense.cost
        share = free_sparsity(costs, limit) if at(cells, sparsity=0.0) else None
        known += [] if share is None else [(share, share == max(costs))]
    if not known:
        return "not even dense"
    share, measured_no_further = max(known)
    return f"{'at least ' * measured_no_further}{share:.0%}"


def _beyond_noise(one: Cell, other: Cell) -> bool:
    """Whether a mean is worse than another by more than twice the standard error of the difference."""
    if one.broken or other.broken or min(len(one.rows), len(other.rows)) < 2:
        return one.cost > other.cost
    error = math.sqrt(sum(statistics.variance(cell.values()) / len(cell.rows) for cell in (one, other)))
    return one.cost - other.cost > 2 * error
