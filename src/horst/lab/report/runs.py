"""Runs from result files: their names in tables, their settings, and means over seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Row, number

Value = float | str | None  # none of a run that broke down; a file holds infinity as a string

LABELS = {
    "adamw": "AdamW",
    "adamw-clipped-lr": "AdamW, lr clipped",
    "ham": "HAM",
    "horst": "HORST",
    "hyperbolic": "hyperbolic map",
    "muon": "Muon",
    "horst-muon": "HORST-Muon",
    "adamw-penalty": "AdamW, L1 in the gradient",
    "adamw-l1": "AdamW",
    "horst-l1": "HORST",
    "muon-l1": "Muon",
    "muon-l1-horst": "Muon and HORST",
    "horst-muon-l1": "HORST-Muon",
    "spred": "spred",
    "dwf": "deep weight factorisation",
    "pilot": "PILoT",
    "sign-in": "Sign-In",
    "madam": "MADAM",
    "lmd": "LMD",
    "linbreg": "LinBreg",
    "adabreg": "AdaBreg",
    "scion": "Scion",
    "cast": "CAST",
    "pat": "PAT",
}
# What a row has beside the settings that tell its run apart: measurements, the seed, and why a study asked for it.
MEASURED = frozenset(
    [
        *("study", "seed", "seconds", "images_per_second", "tokens_per_second", "broke_down"),
        *("perplexity", "loss", "top1", "top5", "accuracy", "tokens", "largest", "std", "kurtosis"),
        *("zeros", "masked_weights", "sparsity_of_pruned_layers", "sparsity_of_all_weights"),
    ]
)


def contender(row: Row, *, tuned: Iterable[str] = ()) -> str:
    """An optimizer's name with its strength.

    Args:
        row: A row of a result.
        tuned: Settings that a table chooses by itself, so that they are no part of the name.

    Example:
        >>> contender({"optimizer": "horst", "alpha": 5.0, "beta": 0.0})
        'HORST, alpha 5'
        >>> contender({"optimizer": "horst-l1", "alpha": "auto", "beta": 0.0, "l1": 0.01})
        'HORST, alpha auto, l1 0.01'
        >>> contender({"optimizer": "adamw-l1", "alpha": 0.0, "beta": 0.0, "l1": 0.03}, tuned=["l1"])
        'AdamW, l1'
        >>> contender({"optimizer": "adamw", "alpha": 0.0, "norm_lr_ratio": 6.0})
        'AdamW, norms at 6 lr'
        >>> contender({"optimizer": "horst-l1", "alpha": 0.0, "l1": 0.01, "max_step": 0.002})
        'AdamW, l1 0.01, lr at most 0.002'
    """
    label, alpha = LABELS[row["optimizer"]], row["alpha"]
    if row["optimizer"] in ("horst", "horst-l1") and alpha == 0:
        label = LABELS["adamw"]  # which HORST without a mirror step is
    if alpha and (alpha == "auto" or "alpha" not in tuned):
        label += f", alpha {number(alpha, 'g')}" + (f", beta {row['beta']:g}" if row.get("beta") else "")
    if row.get("l1"):
        label += ", l1" if "l1" in tuned else f", l1 {row['l1']:g}"
    for kind in ("norm", "embedding"):
        if row.get(f"{kind}_lr_ratio"):
            label += f", {kind}s at {row[f'{kind}_lr_ratio']:g} lr"
    if row.get("max_step"):
        label += f", lr at most {row['max_step']:g}"
    return label


def is_whole(row: Row) -> bool:
    """Whether a run is no ablation: the mirror step is on all tensors or on none, and all have one learning rate.

    Example:
        >>> is_whole({"alpha": 5.0, "mirror": "all"}), is_whole({"alpha": 5.0, "mirror": "blocks"})
        (True, False)
        >>> is_whole({"alpha": 0.0, "mirror": "blocks"}), is_whole({"alpha": 0.0, "norm_lr_ratio": 6.0})
        (True, False)
    """
    everywhere = not row.get("alpha") or row.get("mirror") in (None, "all")
    return everywhere and all(row.get(own) is None for own in ("norm_lr_ratio", "embedding_lr_ratio", "max_step"))


def short_label(optimizer: str) -> str:
    """An optimizer's name without its strength.

    Example:
        >>> short_label("horst-l1"), short_label("unknown")
        ('HORST and l1', 'unknown')
    """
    return LABELS.get(optimizer, optimizer) + (" and l1" if optimizer.endswith("-l1") else "")


def by_line(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line of a figure over sparsity, by contender.

    The betas of one optimizer are one line where no sparsity has two of them, as with HORST's of Table 1.

    Example:
        >>> horst = {"optimizer": "horst", "alpha": 5.0}
        >>> list(by_line([{**horst, "beta": 0.0, "sparsity": 0.7}, {**horst, "beta": 0.01, "sparsity": 0.8}]))
        ['HORST, alpha 5, beta 0 and 0.01']
        >>> list(by_line([{**horst, "beta": 0.0, "sparsity": 0.7}, {**horst, "beta": 0.01, "sparsity": 0.7}]))
        ['HORST, alpha 5', 'HORST, alpha 5, beta 0.01']
    """
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(contender({**row, "beta": 0.0}), []).append(row)
    found: dict[str, list[Row]] = {}
    for name, own in families.items():
        betas = {contender(row): row.get("beta", 0.0) for row in own}
        places = {(row["sparsity"], contender(row)) for row in own}
        if len(betas) > 1 and len(places) == len({level for level, _ in places}):
            words = [f"{beta:g}" for beta in betas.values()]
            found[f"{name}, beta {', '.join(words[:-1])} and {words[-1]}"] = own
        else:
            for row in own:
                found.setdefault(contender(row), []).append(row)
    return found


def finite(values: Sequence[Value]) -> list[float]:
    """The numbers, if every run has one; else none, since a mean of the others would mislead.

    Example:
        >>> finite([1.0, 2.0]), finite([1.0, None])
        ([1.0, 2.0], [])
    """
    numbers = [float(value) for value in values if value is not None]
    return numbers if len(numbers) == len(values) and all(map(math.isfinite, numbers)) else []


def by_level(rows: Sequence[Row], quality: str) -> dict[float, list[float]]:
    """By sparsity, one number per seed; levels at which a run broke down are left out."""
    levels = sorted({row["sparsity"] for row in rows})
    found = {level: finite([row[quality] for row in rows if row["sparsity"] == level]) for level in levels}
    return {level: values for level, values in found.items() if values}


def pairs(
    rows: Sequence[Row], by: str, quality: str, other: str = "horst"
) -> dict[float, tuple[list[float], list[float]]]:
    """Numbers of AdamW and of another optimizer, for the seeds that both have. A run that broke down drops its value.

    Args:
        rows: Rows of results.
        by: Setting that tells the pairs apart.
        quality: Name of the number.
        other: Optimizer beside AdamW; of several strengths, the first counts.
    """
    found = {}
    for value in sorted({row[by] for row in rows}):
        sides: list[dict[int, float]] = []
        for name in ("adamw", other):
            own = [row for row in rows if row[by] == value and row["optimizer"] == name]
            sides.append({row["seed"]: row[quality] for row in own if contender(row) == contender(own[0])})
        seeds = sorted(sides[0].keys() & sides[1].keys())
        adamw, others = ([side[seed] for seed in seeds] for side in sides)
        if seeds and len(finite(adamw + others)) == 2 * len(seeds):
            found[value] = (adamw, others)
    return found


def perplexity_changes(rows: Sequence[Row], other: str = "horst") -> dict[float, float]:
    """By sparsity: an optimizer's mean perplexity over AdamW's, less one; see :func:`pairs`."""
    found = pairs(rows, "sparsity", "perplexity", other)
    return {level: statistics.mean(own) / statistics.mean(adamw) - 1 for level, (adamw, own) in found.items()}


def percent(share: float | None) -> float | None:
    """A share in per cent; none of a run that broke down."""
    return None if share is None else 100 * share


def spread(given: Sequence[Value], spec: str) -> str:
    """Mean, and over several seeds the standard deviation.

    Example:
        >>> spread([1.0], ".1f"), spread([1.0, 3.0], ".1f"), spread([1.0, None], ".1f")
        ('1.0', '2.0 ± 1.4', 'broke down (1 of 2)')
    """
    if broken := sum(value is None for value in given):
        return "broke down" + (f" ({broken} of {len(given)})" if len(given) > 1 else "")
    values = finite(given)
    if not values:
        return "inf"
    mean = format(statistics.mean(values), spec)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), spec)}"


def zeros(row: Row) -> float:
    """The actual share of zeros among the weights that were pruned or masked.

    A model trained with ``l1`` has zeros before it is pruned, so this may be more than the level asked for.

    Example:
        >>> zeros({"sparsity": 0.3, "sparsity_of_pruned_layers": 0.44}), zeros({"sparsity": 0.9})
        (0.44, 0.9)
    """
    if row.get("sparsity_of_pruned_layers") is not None:
        return float(row["sparsity_of_pruned_layers"])
    count = row.get("zeros")
    if count is None:
        return float(row["sparsity"])
    return float(count / row["masked_weights"] if row.get("masked_weights") else count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """How good a model is.

    Args:
        key: Name in rows.
        name: Name in tables and figures.
        less: Whether less is better.
        scale: Factor from rows to what is shown.
        spec: Format of a number.
    """

    key: str
    name: str
    less: bool
    scale: float
    spec: str


PERPLEXITY = Measure(key="perplexity", name="perplexity", less=True, scale=1.0, spec=".2f")
ACCURACY = Measure(key="top1", name="accuracy in %", less=False, scale=100.0, spec=".2f")


@dataclasses.dataclass(frozen=True)
class Cell:
    """The runs that differ in their seeds alone, at one level of one way of pruning.

    Args:
        rows: One per seed, each with the settings of its file.
        measure: Measure of their quality.
    """

    rows: tuple[Row, ...]
    measure: Measure

    @property
    def row(self) -> Row:
        """The first row. What is not measured is the same in all."""
        return self.rows[0]

    def values(self, key: str = "") -> list[float]:
        """One number per seed that did not break down: its quality as it is shown, or the value of a key."""
        given = [row.get(key or self.measure.key) for row in self.rows]
        scale = 1.0 if key else self.measure.scale
        return [scale * float(value) for value in given if value is not None and math.isfinite(float(value))]

    @property
    def broken(self) -> int:
        """How many runs broke down."""
        return len(self.rows) - len(self.values())

    @property
    def mean(self) -> float:
        """Mean over the seeds; the worst there can be if one of them broke down."""
        if self.broken:
            return math.inf if self.measure.less else -math.inf
        return statistics.mean(self.values())

    @property
    def cost(self) -> float:
        """The mean with less always better."""
        return self.mean if self.measure.less else -self.mean

    @property
    def zeros(self) -> float:
        """Mean of the actual shares of zeros."""
        return statistics.mean(map(zeros, self.rows))

    def __str__(self) -> str:
        return spread([*self.values(), *[None] * self.broken], self.measure.spec)


def settings_of(result: Result) -> dict[str, Any]:
    """The settings that the rows of a file share and that a table may have to tell apart."""
    run = result.config.get("run", {})
    run = {**run, **run.get("loop", {})}
    given = run.get("optimization", {})
    found = {name: given.get(name) for name in ("lr", "weight_decay", "decay", "mirror")}
    if left_out := given.get("no_mirror"):
        found["mirror"] = f"{found['mirror']} but {', '.join(left_out)}"
    found |= {"beta2": given.get("betas", (None, None))[1], "width": run.get("model", {}).get("width")}
    return found | {name: run[name] for name in ("steps", "epochs") if name in run}


def identity(row: Row, *, without: Iterable[str] = ()) -> tuple[tuple[str, Any], ...]:
    """What tells a run apart from others: all of its row that is no measurement.

    Example:
        >>> identity({"lr": 0.1, "seed": 3, "perplexity": 9.0, "alpha": 5.0}, without=["alpha"])
        (('lr', 0.1),)
    """
    left = MEASURED | set(without)
    return tuple(sorted((n, v) for n, v in row.items() if n not in left and not n.startswith("ema_") and v is not None))


def cells_of(results: Sequence[Result]) -> list[Cell]:
    """Means over seeds of all rows, in their order. A run that two files share counts once.

    Raises:
        ValueError: There are no rows.
    """
    groups: dict[tuple[Any, ...], dict[Any, Row]] = {}
    for result in results:
        shared = settings_of(result)
        for row in result.rows:
            whole = {"beta": 0.0, "method": "", **shared, **row}
            if not whole.get("alpha") and not whole.get("l1"):
                whole["mirror"] = None  # it has no mirror step, so where it would be changes nothing
            groups.setdefault(identity(whole), {}).setdefault(row.get("seed"), whole)
    rows = [row for own in groups.values() for row in own.values()]
    if not rows:
        raise ValueError("the results have no rows")
    measure = next(m for m in (PERPLEXITY, ACCURACY) if m.key in rows[0])
    return [Cell(tuple(own.values()), measure) for own in groups.values()]


def best(cells: Iterable[Cell]) -> Cell | None:
    """The cell with the best mean; none if all broke down."""
    return min((cell for cell in cells if math.isfinite(cell.cost)), key=lambda cell: cell.cost, default=None)


def at(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    """The cells whose rows have these values.

    Example:
        >>> at([Cell(({"lr": 1e-3},), PERPLEXITY)], lr=2e-3)
        []
    """
    return [cell for cell in cells if all(cell.row.get(name) == value for name, value in wanted.items())]


def budget(row: Row) -> str:
    """What runs must share to be compared: the width, and how long they train.

    Example:
        >>> budget({"width": 64, "steps": 1600})
        'width 64, 1,600 steps'
    """
    length = "epochs" if "epochs" in row else "steps"
    return f"width {row['width']}, {row[length]:,} {length}" if row.get("width") and row.get(length) else ""


def length_and_width(row: Row) -> tuple[int, int]:
    """What tables are sorted by."""
    return row.get("epochs") or row.get("steps") or 0, row.get("width") or 0


def by_budget(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each budget, the shortest first, of these the narrowest."""
    found: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: length_and_width(cell.row)):
        found.setdefault(budget(cell.row), []).append(cell)
    return found
