"""Every contender under one protocol: equal tries on a tuning seed, a criterion named beforehand, fresh seeds.

The tries of all contenders come first, one of each in turn; then the fresh seeds, one of each in turn. So a comparison
that is stopped early has about equal tries and seeds everywhere, and ``train=False`` makes a result of what is done.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from horst.fields import option
from horst.lab.experiments import compare_contenders as lines
from horst.lab.experiments import frontier, language_model, vision_model
from horst.lab.experiments.compare_runs import ONE_SHOT, attempt, bytes_per_weight, is_done
from horst.lab.experiments.compare_text import byte_tokens
from horst.lab.experiments.frontier import Device, Point
from horst.lab.experiments.frontier_processes import side_by_side
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.result import Found, Origin, Result, run_and_record
from horst.lab.experiments.table6_gpt2_one_shot import PruningMethod
from horst.lab.experiments.vision_model import VisionConfig

# What a row of the result keeps of a run's row.
_KEPT = (
    *("method", "sparsity", "perplexity", "top1", "sparsity_of_pruned_layers", "sparsity_of_all_weights"),
    *("seed", "broke_down"),
)
Outcomes = dict[str, dict[str, Any]]  # by the name of a run
# What holds for every comparison, in its result's notes.
NOTES = (
    "Every contender has the same number of tries on one seed; the best is run with fresh seeds.",
    "Tries are compared on the data that are reported, with another seed.",
    "The time per step is the median over a contender's runs, with as many at a time as processes says.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What both comparisons share.

    Args:
        contenders: One line for each, such as ``"horst lr=4e-3,8e-3 alpha=5,20,auto"``: its tries are the grid of the
            values. The name of a contender alone, such as ``horst``, stands for its line in the default list.
        tries: Number of tries of every contender; with 1 nothing is tuned.
        tuning_seed: Seed of the tries.
        seeds: Fresh seeds, at the settings of the best try.
        directory: Folder of the runs' files; an interrupted comparison resumes from there.
        processes: Number of runs at a time, one core each.
        train: Whether to train what is missing; ``--no-train`` makes a result of the runs that are done.
        device: Device that trains; auto is the GPU where there is one.
    """

    contenders: tuple[str, ...] = option((), affects="rows")
    tries: int = option(6, affects="rows")
    tuning_seed: int = option(0, affects="rows")
    seeds: tuple[int, ...] = option((1, 2, 3), affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/compare"), affects="nothing")
    processes: int = option(1, affects="nothing")
    train: bool = option(True, affects="nothing")
    device: Device = option("auto", affects="nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageComparison(Protocol):
    """Language models, each trained dense and pruned in one shot.

    Args:
        run: Settings that all contenders share unless their lines name another. ``data`` may be a folder of text.
        contenders, tries, tuning_seed, seeds, directory, processes, train, device: As for :class:`Protocol`.
        methods: Ways to prune.
        sparsities: Sparsities of the pruned tensors; the dense model is always there.
        tuned_by: Pruning method of the criterion: the best try has the least perplexity,
        tuned_at: pruned to this sparsity.
    """

    run: LanguageConfig = LanguageConfig()
    contenders: tuple[str, ...] = option(lines.LANGUAGE, affects="rows")
    methods: tuple[PruningMethod, ...] = ("magnitude", "sparsegpt")
    sparsities: tuple[float, ...] = option((0.5, 0.6, 0.7, 0.8, 0.9), affects="rows")
    tuned_by: PruningMethod = option("sparsegpt", affects="rows")
    tuned_at: float = option(0.7, affects="rows")
    directory: pathlib.Path = option(pathlib.Path("runs/compare_language"), affects="nothing")

    def __post_init__(self) -> None:
        if self.tuned_by not in self.methods or self.tuned_at not in self.sparsities:
            raise ValueError(
                f"the best try is chosen at tuned_at={self.tuned_at} by tuned_by={self.tuned_by!r}, which must be "
                f"among sparsities={self.sparsities} and methods={self.methods}."
            )
        list(contenders_of(self))  # a mistake in a line is told now, and not after the first model is trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionComparison(Protocol):
    """Vision transformers, each trained sparse, or trained dense and pruned once.

    Args:
        run: Settings that all contenders share unless their lines name another.
        contenders, tries, tuning_seed, seeds, directory, processes, train, device: As for :class:`Protocol`. A line
            with ``sparsity=0`` trains dense and prunes by magnitude at the end.
        sparsity: Sparsity of the masked layers at the end; the best try has the highest accuracy there.
    """

    run: VisionConfig = VisionConfig()
    contenders: tuple[str, ...] = option(lines.VISION, affects="rows")
    sparsity: float = 0.9
    directory: pathlib.Path = option(pathlib.Path("runs/compare_vision"), affects="nothing")

    def __post_init__(self) -> None:
        list(contenders_of(self))


Comparison = LanguageComparison | VisionComparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A contender with its tries.

    Args:
        name: The optimizer, and of vision models the way to make them sparse: ``adamw+rigl``.
        tries: One point per try, on the tuning seed.
        settings: What each try sets, by name.
    """

    name: str
    tries: tuple[Point, ...]
    settings: tuple[dict[str, Any], ...]


def contenders_of(config: Comparison) -> Iterator[Contender]:
    """The contenders in the order of their lines.

    Raises:
        ValueError: A line has another number of tries, more than two settings to tune, or is there twice.
    """
    if not config.contenders or not config.seeds:
        raise ValueError(f"give at least one contender and one seed, got {config.contenders} and {config.seeds}.")
    if config.tuning_seed in config.seeds and config.tries > 1:
        raise ValueError(f"tuning_seed={config.tuning_seed} must not be among the fresh seeds, {config.seeds}.")
    default = lines.LANGUAGE if isinstance(config, LanguageComparison) else lines.VISION
    known = {_contender(config, line).name: line for line in default} if _named(config.contenders) else {}
    seen = set()
    for line in config.contenders:
        found = _contender(config, known.get(line, line))
        tuned = [key for key in found.settings[0] if len({str(each[key]) for each in found.settings}) > 1]
        if len(found.tries) != config.tries or len(tuned) > 2:
            raise ValueError(
                f"every contender gets tries={config.tries} over at most two settings; {line!r} has "
                f"{len(found.tries)} over {', '.join(tuned) or 'none'}."
            )
        if found.name in seen:
            raise ValueError(f"two lines are for {found.name}: a contender has one.")
        seen.add(found.name)
        yield found


def run(config: Comparison, name: str) -> Result:
    """Tune every contender, run the best of each with fresh seeds; rows by contender, seed and level."""
    language = isinstance(config, LanguageComparison)
    words = language_model.in_words if language else vision_model.in_words
    origins: list[Origin] = []

    def body() -> Found:
        found = compare(config)
        origins.extend(found.pop("origins"))
        runs = found["runs"]
        notes = list(NOTES)
        if runs["done"] < runs["planned"]:
            notes.insert(0, f"Partial: {runs['done']} of {runs['planned']} runs are done.")
        return found.pop("rows"), {**found, "less_is_better": language}, notes

    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu"
    # nearly every try has its own learning rate
    setting = words(config.run).split("; the paper")[0].split(", learning rate")[0]  # type: ignore[arg-type]
    return run_and_record(name, config, body, device, origins, setting)


def compare(config: Comparison) -> dict[str, Any]:
    """Rows, the tries with their winners, what each contender costs, how many runs there are, and their origins."""
    if isinstance(config, LanguageComparison):
        tokens = byte_tokens(config.run.data, config.directory / "text")
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, data=tokens))
    entries = list(contenders_of(config))
    tuned: Outcomes = {}
    if config.tries > 1:
        tuned = _outcomes(config, _in_turn([entry.tries for entry in entries]))
    chosen = {entry.name: _best(config, entry, tuned) for entry in entries}
    fresh = {
        entry.name: [dataclasses.replace(entry.tries[place], seed=seed) for seed in config.seeds]
        for entry in entries
        if (place := chosen[entry.name]) is not None
    }
    outcomes = {**tuned, **_outcomes(config, _in_turn(list(fresh.values())))}
    rows: list[dict[str, Any]] = []
    for entry in entries:
        shown = [("seed", point) for point in fresh.get(entry.name, [])]
        if config.tries > 1:  # the try that was chosen, or the first if all broke down
            shown.insert(0, ("try", entry.tries[chosen[entry.name] or 0]))
        for stage, point in shown:
            for row in outcomes.get(point.name, {}).get("rows", ()):
                kept = {key: row[key] for key in _KEPT if key in row}
                rows.append({"contender": entry.name, "stage": stage, **kept})
    planned = len(entries) * (len(config.seeds) + (config.tries if config.tries > 1 else 0))
    return {
        "rows": rows,
        "tries": [_told(config, entry, place, chosen, tuned) for entry in entries for place in range(len(entry.tries))],
        "costs": {entry.name: _cost(entry, fresh.get(entry.name, []), outcomes) for entry in entries},
        "runs": {"done": len(outcomes), "planned": planned},
        "origins": [found["origin"] for found in outcomes.values()],
    }


def _named(given: Sequence[str]) -> bool:
    """Whether some are names alone, without settings."""
    return any(len(line.split()) == 1 for line in given)


def _contender(config: Comparison, line: str) -> Contender:
    optimizer, settings = frontier.grid(line)
    if isinstance(config, LanguageComparison):
        study: Any = frontier.LanguageStudy(
            run=config.run, points=(f"{line} methods=all",), methods=config.methods, seeds=(config.tuning_seed,)
        )
        name: str = optimizer
    else:
        study = frontier.VisionStudy(
            run=config.run, points=(line,), sparsity=config.sparsity, seeds=(config.tuning_seed,)
        )
    points = tuple(frontier.points(study))
    if isinstance(config, VisionComparison):
        name = f"{optimizer}+{points[0].methods[0] if points[0].sparsity else ONE_SHOT}"
    own = tuple({k: v for k, v in each.items() if k not in ("methods", "sparsity")} for each in settings)
    return Contender(name=name, tries=points, settings=own)


def _in_turn(groups: Sequence[Sequence[Point]]) -> list[Point]:
    """The first of each group, then the second of each, and so on."""
    turns = itertools.zip_longest(*groups)
    return [point for turn in turns for point in turn if point is not None]


def _outcomes(config: Comparison, points: Sequence[Point]) -> Outcomes:
    levels = config.sparsities if isinstance(config, LanguageComparison) else (config.sparsity,)
    if not config.train:
        points = [point for point in points if is_done(point, config.directory)]
    calls = {point.name: (point, levels, config.directory, config.device) for point in points}
    found = side_by_side(attempt, calls, config.processes if config.train else 1)
    return dict(zip(calls, found, strict=True))


def _criterion(config: Comparison, outcome: Mapping[str, Any]) -> float | None:
    """The number that tries are compared by; none of a run that broke down."""
    if isinstance(config, LanguageComparison):
        wanted: tuple[Any, ...] = (config.tuned_by, config.tuned_at)
        found = [row for row in outcome["rows"] if (row["method"], row["sparsity"]) == wanted]
    else:
        found = [row for row in outcome["rows"] if row["sparsity"] == config.sparsity]
    value = found[0]["perplexity" if isinstance(config, LanguageComparison) else "top1"] if found else None
    return None if value is None else float(value)


def _best(config: Comparison, entry: Contender, tuned: Outcomes) -> int | None:
    """Index of the best try of those that are done; none if there is none that did not break down."""
    if config.tries == 1:
        return 0
    sign = 1.0 if isinstance(config, LanguageComparison) else -1.0
    known = {i: tuned[point.name] for i, point in enumerate(entry.tries) if point.name in tuned}
    values = {i: value for i, found in known.items() if (value := _criterion(config, found)) is not None}
    return min(values, key=lambda i: sign * values[i], default=None)


def _told(
    config: Comparison, entry: Contender, place: int, chosen: Mapping[str, int | None], tuned: Outcomes
) -> dict[str, Any]:
    """What the result says of a try."""
    outcome = tuned.get(entry.tries[place].name)
    about = {"contender": entry.name, "settings": entry.settings[place], "chosen": chosen[entry.name] == place}
    if outcome is None:
        return {**about, "criterion": None, "done": False}
    broke = next((row["broke_down"] for row in outcome["rows"] if row.get("broke_down")), None)
    return {**about, "criterion": _criterion(config, outcome), "done": True, **({"broke_down": broke} if broke else {})}


def _cost(entry: Contender, fresh: Sequence[Point], outcomes: Outcomes) -> dict[str, Any]:
    times = []
    for point in (*entry.tries, *fresh):
        rows = outcomes.get(point.name, {}).get("rows", ())
        if rows and rows[0].get("seconds"):
            times.append(1000 * rows[0]["seconds"] / rows[0]["steps"])
    try:
        memory = bytes_per_weight(entry.tries[0])
    except Exception:  # of a contender that cannot be made; its row says why
        memory = None
    return {"bytes_per_weight": memory, "milliseconds_per_step": statistics.median(times) if times else None}
