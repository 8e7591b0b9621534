"""From the rows of the frontier studies to means over seeds: what was tried, and what of it is best."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.transformer_tables import spread

Row = Mapping[str, Any]
EDGE = "†"  # the best is the first or last of what was tried, so that better ones may lie outside
# What tells two runs apart beside their seed; files of another experiment lack some.
IDENTITY = (
    "optimizer", "alpha", "beta", "strength", "threshold", "lr", "beta2", "weight_decay", "decay", "mirror", "width",
    "steps", "epochs", "method", "sparsity",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """How good a model is.

    Args:
        key: In rows.
        name: In tables and figures.
        less: Whether less is better.
        scale: From rows to what is shown.
        spec: How it is written.
    """

    key: str
    name: str
    less: bool
    scale: float
    spec: str

    def cost(self, value: float) -> float:
        """The same with less always better."""
        return value if self.less else -value

    def worse_by(self, value: float, reference: float) -> str:
        """How far a value is behind another, in words; nothing if it is not.

        Example:
            >>> PERPLEXITY.worse_by(10.2, 10.0), ACCURACY.worse_by(90.0, 92.5), ACCURACY.worse_by(93.0, 92.5)
            ('2.0%', '2.5 points', '')
        """
        behind = self.cost(value) - self.cost(reference)
        if not behind > 0:
            return ""
        if math.isinf(behind):
            return "broke down"
        return f"{behind / reference:.1%}" if self.less else f"{behind:.1f} points"


PERPLEXITY = Measure(key="perplexity", name="perplexity", less=True, scale=1.0, spec=".2f")
ACCURACY = Measure(key="top1", name="accuracy in %", less=False, scale=100.0, spec=".1f")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The runs that differ in their seeds alone, at one level of one way of pruning.

    Args:
        rows: One a seed.
        measure: Of their quality.
    """

    rows: tuple[Row, ...]
    measure: Measure

    @property
    def row(self) -> Row:
        """The first: what is not measured is that of all."""
        return self.rows[0]

    def values(self, key: str = "") -> list[float]:
        """A number of each seed's row, by default its quality as it is shown; of a run that broke down, none."""
        given = [row.get(key or self.measure.key) for row in self.rows]
        scale = 1.0 if key else self.measure.scale
        # a file holds infinity as a string
        return [scale * float(value) for value in given if value is not None and math.isfinite(float(value))]

    @property
    def broken(self) -> int:
        """How many runs broke down."""
        return len(self.rows) - len(self.values())

    @property
    def mean(self) -> float:
        """Over the seeds; the worst there can be if one of them broke down."""
        if self.broken:
            return math.inf if self.measure.less else -math.inf
        return statistics.mean(self.values())

    @property
    def cost(self) -> float:
        """The mean with less always better."""
        return self.measure.cost(self.mean)

    def __str__(self) -> str:
        if self.broken:
            return f"broke down ({self.broken} of {len(self.rows)})"
        return spread(self.values(), self.measure.spec)


def rows_of(results: Sequence[Result]) -> list[Row]:
    """All rows, each with its budget and rates, a run that two studies share once."""
    found: dict[tuple[Any, ...], Row] = {}
    for result in results:
        run = result.config.get("run", {})
        given = run.get("optimization", {})
        shared = {
            **{name: given.get(name) for name in ("lr", "weight_decay", "decay", "mirror")},
            "beta2": given.get("betas", (None, None))[1],
            "width": run.get("model", {}).get("width"),
        }
        if "epochs" in run or "steps" in run:
            length = "epochs" if "epochs" in run else "steps"
            shared[length] = run[length]
        for row in result.rows:
            whole = {**shared, "beta": 0.0, **row}
            found.setdefault((*(whole.get(name) for name in IDENTITY), row["seed"]), whole)
    return list(found.values())


def cells_of(results: Sequence[Result]) -> list[Cell]:
    """The rows' means over seeds, in their order.

    Raises:
        ValueError: There are no rows.
    """
    rows = rows_of(results)
    if not rows:
        raise ValueError("the results have no rows")
    measure = next(m for m in (PERPLEXITY, ACCURACY) if m.key in rows[0])
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in IDENTITY), []).append(row)
    return [Cell(tuple(own), measure) for own in groups.values()]


def best(cells: Iterable[Cell]) -> Cell | None:
    """The one with the best mean; none of none, and none if all broke down."""
    return min((cell for cell in cells if math.isfinite(cell.cost)), key=lambda cell: cell.cost, default=None)


def budget(cell: Cell) -> tuple[int, int, str]:
    """What runs must share to be compared: the width, and how long they train.

    Example:
        >>> budget(Cell(({"width": 64, "steps": 400},), PERPLEXITY))
        (64, 400, 'steps')
    """
    length = "epochs" if "epochs" in cell.row else "steps"
    return cell.row["width"], cell.row[length], length


def by_budget(cells: Iterable[Cell]) -> dict[tuple[int, int, str], list[Cell]]:
    """The cells of each budget: the shortest first, of these the narrowest."""
    found: dict[tuple[int, int, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(budget(cell), []).append(cell)
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def budget_words(given: tuple[int, int, str]) -> str:
    """A budget as tables and figures name it.

    Example:
        >>> budget_words((64, 1600, "steps"))
        'width 64, 1,600 steps'
    """
    return f"width {given[0]}, {given[1]:,} {given[2]}"


def at(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    """The cells whose rows have these values.

    Example:
        >>> at([Cell(({"lr": 1e-3},), PERPLEXITY)], lr=2e-3)
        []
    """
    return [cell for cell in cells if all(cell.row.get(name) == value for name, value in wanted.items())]


# The contenders of the main comparison; HORST's mirror step on the tensors that have it by default.
CONTENDERS: Mapping[str, Callable[[Cell], bool]] = {
    "AdamW": lambda cell: cell.row["optimizer"] == "adamw",
    "HORST, alpha 5": lambda cell: _plain_horst(cell) and cell.row["alpha"] == 5.0,
    "HORST, auto": lambda cell: _plain_horst(cell) and cell.row["alpha"] == "auto",
}


def of(cells: Iterable[Cell], name: str) -> list[Cell]:
    """The cells of one of :data:`CONTENDERS`."""
    return [cell for cell in cells if CONTENDERS[name](cell)]


def any_adamw(cells: Iterable[Cell]) -> list[Cell]:
    """AdamW as it is, and with the bound of HORST's own rule on its learning rate: the one to beat is the better."""
    return [cell for cell in cells if cell.row["optimizer"] in ("adamw", "adamw-held")]


def default_tensors(cell: Cell) -> bool:
    """Whether the mirror step has the tensors that it has by default."""
    return cell.row.get("mirror") in (None, "matrices")


def _plain_horst(cell: Cell) -> bool:
    return cell.row["optimizer"] == "horst" and default_tensors(cell)


def one_way(results: Sequence[Result]) -> list[Cell]:
    """The cells of one way of pruning: by magnitude, or AC/DC."""
    return [cell for cell in cells_of(results) if cell.row["method"] in ("dense", "magnitude", "acdc")]


def levels_of(cells: Iterable[Cell]) -> list[float]:
    """The sparsities that occur."""
    return sorted({cell.row["sparsity"] for cell in cells})


def level_names(levels: Iterable[float]) -> list[str]:
    """Sparsities as a table's head names them.

    Example:
        >>> level_names([0.0, 0.5])
        ['dense', '50%']
    """
    return [f"{level:.0%}" if level else "dense" for level in levels]


def text_of(cell: Cell | None) -> str:
    """What a table shows of a cell; nothing for one that was not measured."""
    return "" if cell is None else str(cell)


def best_text(tried: Sequence[Cell]) -> str:
    """What a table shows of the best of what was tried; nothing if nothing was."""
    found = best(tried)
    return str(found) if found is not None else "broke down" if tried else ""


def with_settings(tried: Sequence[Cell], *, decays: bool, products: bool) -> str:
    """The best of what was tried and its settings, with a mark for each that is the first or last of three or more."""
    found = best(tried)
    if found is None:
        return "broke down" if tried else ""
    names = {"strength": ""} if products else {}
    names |= {"lr": "lr "} | ({"weight_decay": "decay "} if decays else {})
    settings = []
    for key, label in names.items():
        value = found.row.get(key)
        values = sorted({cell.row[key] for cell in tried if cell.row.get(key) is not None})
        if value is not None and (len(values) > 1 or key == "lr"):
            at_edge = len(values) > 2 and value in (values[-1], values[0]) and value != 0
            settings.append(f"{label}{value:.3g}{EDGE if at_edge else ''}")
    return f"{found} ({', '.join(settings)})"
