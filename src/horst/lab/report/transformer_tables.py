"""Tables 1, 3, 4 and 6 in Markdown: ours, and below each line the paper's where it has one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report import paper
from horst.lab.report.tables import markdown, number

LABELS = {
    "adamw": "AdamW",
    "adamw-held": "AdamW, lr held",
    "ham": "HAM",
    "horst": "HORST",
    "hyperbolic": "hyperbolic map",
    "muon": "Muon",
    "horst-muon": "HORST over Muon",
    "adamw-l1": "AdamW with L1",
    "adamw-proximal": "proximal AdamW",
    "horst-proximal": "proximal HORST",
    "spred": "spred",
}


def contender(row: Mapping[str, Any]) -> str:
    """An optimizer's name with its strength.

    Example:
        >>> contender({"optimizer": "horst", "alpha": 5.0, "beta": 0.0})
        'HORST, alpha 5'
        >>> contender({"optimizer": "horst", "alpha": "auto", "beta": 0.0})
        'HORST, alpha auto'
        >>> contender({"optimizer": "adamw-proximal", "alpha": 0.0, "beta": 0.0, "threshold": 0.03})
        'proximal AdamW, threshold 0.03'
    """
    label = LABELS[row["optimizer"]]
    if row["alpha"]:
        label += f", alpha {number(row['alpha'], 'g')}" + (f", beta {row['beta']:g}" if row["beta"] else "")
    return label + (f", threshold {row['threshold']:g}" if "threshold" in row else "")


def by_line(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of each line of a figure over sparsity: a contender's.

    The betas of one optimizer are one line where no sparsity has two of them, as with HORST's of Table 1.

    Example:
        >>> horst = {"optimizer": "horst", "alpha": 5.0}
        >>> list(by_line([{**horst, "beta": 0.0, "sparsity": 0.7}, {**horst, "beta": 0.01, "sparsity": 0.8}]))
        ['HORST, alpha 5, beta 0 and 0.01']
        >>> list(by_line([{**horst, "beta": 0.0, "sparsity": 0.7}, {**horst, "beta": 0.01, "sparsity": 0.7}]))
        ['HORST, alpha 5', 'HORST, alpha 5, beta 0.01']
    """
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        families.setdefault(contender({**row, "beta": 0.0}), []).append(row)
    found: dict[str, list[Mapping[str, Any]]] = {}
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


Value = float | str | None  # none of a run that broke down; a file holds infinity as a string


def finite(values: Sequence[Value]) -> list[float]:
    """The numbers, if every run has one; else none, since the mean of the others would be another's.

    Example:
        >>> finite([1.0, 2.0]), finite([1.0, None])
        ([1.0, 2.0], [])
    """
    numbers = [float(value) for value in values if value is not None]
    return numbers if len(numbers) == len(values) and all(map(math.isfinite, numbers)) else []


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


# What the runs of a table may differ in beside optimizer and seed: a column for each that they do differ in.
_SETTINGS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "lr": lambda given, row: f"{row.get('lr', given.get('lr', 0)):g}",
    "beta2": lambda given, row: f"{given['betas'][1]:g}" if "betas" in given else "",
    "decay": lambda given, row: f"{given['weight_decay']:g}" if "weight_decay" in given else "",
    "decay on": lambda given, row: given.get("decay", ""),
    "mirror step on": lambda given, row: given.get("mirror", "") if row["alpha"] else "",
}
Runs = dict[tuple[str, ...], list[Mapping[str, Any]]]


def _runs(results: Sequence[Result]) -> Runs:
    """The rows by contender and settings: seeds alone are averaged."""
    runs: Runs = {}
    for result in results:
        given = result.config.get("run", {}).get("optimization", {})
        for row in result.rows:
            key = (contender(row), *(read(given, row) for read in _SETTINGS.values()))
            runs.setdefault(key, []).append(row)
    return runs


def _differing(runs: Runs, *, always: Sequence[str] = ()) -> dict[str, int]:
    """By name, the place in a run's key of each setting that not all runs share."""
    places = {name: i for i, name in enumerate(_SETTINGS, start=1)}
    return {name: i for name, i in places.items() if name in always or len({key[i] for key in runs if key[i]}) > 1}


def one_shot_table(results: Sequence[Result], method: str = "magnitude") -> str:
    """Table 6: perplexity by optimizer and sparsity; the paper's below the first line of each optimizer.

    Where the runs differ in a setting, a column says so.

    Args:
        results: Of one-shot pruning.
        method: The way of pruning that is shown.
    """
    runs = {key: [row for row in own if row["method"] in ("dense", method)] for key, own in _runs(results).items()}
    rows = [row for own in runs.values() for row in own]
    levels = sorted({row["sparsity"] for row in rows})
    columns = _differing(runs)
    lines = []
    shown = set()
    for key, own in runs.items():
        cells = [[row["perplexity"] for row in own if row["sparsity"] == level] for level in levels]
        words = [spread(values, ".2f") if values else "" for values in cells]
        lines.append([key[0], *(key[i] for i in columns.values()), *words])
        theirs = paper.TABLE6.get(own[0]["optimizer"], {}) if own[0]["alpha"] in (0.0, 5.0, 200.0) else {}
        if theirs and key[0] not in shown:
            shown.add(key[0])
            words = [f"*{theirs[level]:.2f}*" if level in theirs else "" for level in levels]
            lines.append(["*the paper's*", *("" for _ in columns), *words])
    share = {row["sparsity"]: row["sparsity_of_all_weights"] for row in rows if "broke_down" not in row}
    shares = [number(share.get(level), ".1%", none="") for level in levels]
    lines.append(["zeros among all weights", *("" for _ in columns), *shares])
    return markdown(["perplexity", *columns, *_titles(levels)], lines)


def mirror_table(results: Sequence[Result]) -> str:
    """Perplexity by which tensors get the mirror step, one result a choice."""
    levels = [row["sparsity"] for row in results[0].rows if row["seed"] == results[0].rows[0]["seed"]]
    lines = []
    for result in results:
        first = result.rows[0]
        tensors = result.config["run"]["optimization"]["mirror"] if first["alpha"] else ""
        cells = [[row["perplexity"] for row in result.rows if row["sparsity"] == level] for level in levels]
        lines.append([contender(first), tensors, *(spread(values, ".2f") for values in cells)])
    return markdown(["optimizer", "mirror", *_titles(levels)], lines)


def methods_table(results: Sequence[Result]) -> str:
    """Perplexity by optimizer, pruning method and sparsity; what was not measured is left empty.

    Where the runs differ in a setting, a column says so.
    """
    runs = _runs(results)
    levels = sorted({row["sparsity"] for rows in runs.values() for row in rows if row["sparsity"]})
    columns = _differing(runs)
    lines = []
    for key, own in runs.items():
        for method in dict.fromkeys(row["method"] for row in own if row["sparsity"]):
            cells = [
                [r["perplexity"] for r in own if (r["method"], r["sparsity"]) == wanted]
                for wanted in [("dense", 0.0), *((method, level) for level in levels)]
            ]
            words = [spread(values, ".2f") if values else "" for values in cells]
            lines.append([key[0], *(key[i] for i in columns.values()), method, *words])
    return markdown(["trained by", *columns, "pruned by", *_titles([0.0, *levels])], lines)


def acdc_table(results: Sequence[Result]) -> str:
    """Tables 1, 3 and 4: accuracy by optimizer, learning rate and sparsity.

    Where the runs differ in another setting, a column says so.
    """
    runs = _runs(results)
    columns = _differing(runs, always=["lr"])
    levels = sorted({row["sparsity"] for rows in runs.values() for row in rows})
    lines = []
    for key, own in runs.items():
        cells = [[percent(row["top1"]) for row in own if row["sparsity"] == level] for level in levels]
        words = [spread(values, ".2f") if values else "" for values in cells]
        lines.append([key[0], *(key[i] for i in columns.values()), *words])
    return markdown(["accuracy in %", *columns, *_titles(levels)], lines)


def _titles(levels: Sequence[float]) -> list[str]:
    return ["dense" if not level else f"{level:.0%}" for level in levels]


def paper_acdc_table(results: Sequence[Result]) -> str:
    """The paper's Tables 1 and 3 for DeiT-small, to set ours beside."""
    small = paper.TABLE1["DeiT-small"]
    lines = [[LABELS[name], *(f"{mean} ± {deviation}" for mean, deviation in small[name].values())] for name in small]
    lines.insert(1, ["HAM (one seed)", "", "", str(paper.TABLE3["ham"])])
    return markdown(["the paper, ImageNet, accuracy in %", "70%", "80%", "90%"], lines)


def speed_table(results: Sequence[Result]) -> str:
    """What training cost: a line a run."""
    lines = []
    for result in results:
        for row in result.curves.get("training", result.rows):
            unit = "tokens" if "tokens_per_second" in row else "images"
            rate = number(row[f"{unit}_per_second"], ",.0f")  # none in runs too short to measure
            lines.append([contender(row), str(row["seed"]), f"{rate} {unit}", number(row["seconds"], ".0f")])
    return markdown(["optimizer", "seed", "a second", "seconds"], lines)


def short_attention_table(results: Sequence[Result]) -> str:
    """A line a shape and direction: each contender's time, and how many times the floor that is."""
    measured: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in (row for result in results for row in result.rows):
        if row.get("kernel", "attention") == "attention":
            # a file from before there was a second kernel has a column for each side
            shape = row.get("shape") or " x ".join(
                str(row[side]) for side in ("batch", "tokens", "heads", "head_width")
            )
            measured.setdefault((shape, row["direction"]), {})[row["contender"]] = row
    contenders = list(next(iter(measured.values())))
    lines = []
    for (shape, direction), own in measured.items():
        floor = own[contenders[0]]["floor_microseconds"]
        words = [f"{own[name]['microseconds']:.0f} ({own[name]['times_floor']:.1f} x)" for name in contenders]
        lines.append([shape, direction, f"{floor:.0f}", *words])
    return markdown(["batch x tokens x heads x their width", "", "floor, us", *contenders], lines)


def training_speed_table(results: Sequence[Result]) -> str:
    """A line a model and setting: units a second of a plain loop and of ours, with AdamW and with HORST."""
    rows = results[0].rows
    loops = ("plain loop, AdamW", "horst.lab.training, adamw", "horst.lab.training, horst")
    lines = []
    for what, settings in dict.fromkeys((row["what"], row["settings"]) for row in rows):
        rate = {row["loop"]: row["rate"] for row in rows if (row["what"], row["settings"]) == (what, settings)}
        cost = rate[loops[1]] / rate[loops[2]] - 1
        lines.append([what, settings, *(number(rate[loop], ",.0f") for loop in loops), number(cost, "+.1%")])
    columns = [
        "a second",
        "settings",
        "plain loop, AdamW",
        "`horst.lab.training`, AdamW",
        "`horst.lab.training`, HORST",
    ]
    return markdown([*columns, "HORST costs"], lines)
