"""The schema of what an experiment writes: config, rows, curves, and where they come from."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from horst import __version__
from horst.files import read_json, write_json

SCHEMA_VERSION = 1
Origin = Mapping[str, Any]
Found = tuple[list[dict[str, Any]], dict[str, Any], list[str]]  # rows, curves, notes
C = TypeVar("C")
_PACKAGES = ("numpy", "triton", "timm")  # where installed, beside torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of an experiment found.

    Args:
        experiment: Name of the experiment, such as ``"figure5_additive_vs_multiplicative"``.
        config: Fields of the config.
        rows: Flat dictionaries, one per row of the experiment's table.
        curves: Named columns of its figure: numbers, or lists of them.
        notes: Remarks needed to read the numbers, and differences from the paper.
        environment: Commit, versions, device, threads of the runs; see :func:`environment`. Entries in which the runs
            differ are ``"various"``.
        seconds: Wall time of all runs together; of a resumed run, that of its last process.
        schema_version: Number that rises when the meaning of a field changes.
        environments: Environments of the runs, where there are several.
    """

    experiment: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: dict[str, Any]
    notes: list[str]
    environment: dict[str, Any]
    seconds: float
    schema_version: int = SCHEMA_VERSION
    environments: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write JSON, whole or not at all."""
        return write_json(path, to_json(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Result:
        """Read what :meth:`save` wrote."""
        content = read_json(path)
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path} has schema version {version}, this code reads {SCHEMA_VERSION}. Run the experiment again."
            )
        return cls(**content)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Where a number comes from: commit, versions, device, threads. No paths and no host names.

    The commit ends in ``-dirty`` where code was changed after it, and is ``"unknown"`` where the package does not run
    from its repository; ``HORST_COMMIT`` in the environment names it instead.
    """
    return {
        "commit": _commit(),
        "horst": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: version for package in _PACKAGES if (version := _version(package))},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def run_and_record(
    name: str,
    config: Any,
    body: Callable[[], Found],
    device: str = "cpu",
    origins: Sequence[Origin] = (),
    setting: str = "",
) -> Result:
    """Run ``body``, which returns rows, curves and notes, and record them with the config and the time taken.

    Args:
        name: Name of the experiment.
        config: Config of the experiment, a dataclass.
        body: Function that computes.
        device: Device that it computes on.
        origins: List to which ``body`` adds the origin of each run; see :func:`provenance`.
        setting: What was trained on what, in words; stored with the config.
    """
    start = time.perf_counter()
    rows, curves, notes = body()
    return Result(
        experiment=name,
        config=dataclasses.asdict(config) | ({"setting": setting} if setting else {}),
        rows=rows,
        curves=curves,
        notes=notes,
        **provenance(origins, environment(device), time.perf_counter() - start),
    )


def recorded(name: str) -> Callable[[Callable[[C], Found]], Callable[[C], Result]]:
    """Make an experiment of a function from a config to rows, curves and notes; see :func:`run_and_record`."""

    def decorate(compute: Callable[[C], Found]) -> Callable[[C], Result]:
        @functools.wraps(compute)
        def run(config: C) -> Result:
            return run_and_record(name, config, lambda: compute(config))

        return run

    return decorate


def provenance(origins: Sequence[Origin], here: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The fields of a result that say where its numbers come from.

    Args:
        origins: ``environment`` and ``seconds`` of each run, from :func:`horst.lab.experiments.outcomes.load_or_run`.
            Empty: the numbers come from this process.
        here: Environment of this process.
        seconds: Time to make or gather the runs, used where it is longer than the runs themselves.

    Example:
        >>> runs = [{"environment": {"torch": "2.11", "commit": c}, "seconds": 60.0} for c in ("a1", "b2")]
        >>> provenance(runs, {"torch": "2.12", "commit": "c3"}, 1.0)["environment"]
        {'torch': '2.11', 'commit': 'various'}
    """
    found: list[dict[str, Any]] = []
    for origin in origins:
        if origin["environment"] not in found:
            found.append(origin["environment"])
    first, *others = found or [here]
    names = dict.fromkeys(name for each in (first, *others) for name in each)
    shared = {name: all(each.get(name) == first.get(name) for each in others) for name in names}
    return {
        "environment": {name: first.get(name) if shared[name] else "various" for name in names},
        "environments": found if others else [],
        "seconds": round(max(seconds, sum(origin["seconds"] for origin in origins)), 3),
    }


def is_first_process() -> bool:
    """Whether this process writes and prints: the only one, or the first of those that ``torchrun`` started.

    Asked after a recipe, whose process group has ended and knows no ranks any more.
    """
    return "WORLD_SIZE" not in os.environ or int(os.environ.get("RANK", 0)) == 0


def _commit() -> str:
    if "HORST_COMMIT" in os.environ:  # for machines that get the files without their history
        return os.environ["HORST_COMMIT"]
    here = pathlib.Path(__file__).resolve()
    try:
        root = pathlib.Path(_git("rev-parse", "--show-toplevel", at=here.parent))
        if not (root / "src/horst/lab/experiments" / here.name).samefile(here):
            return "unknown"  # installed into an environment that lies in some repository
        # What is no code, such as results, changes while one run follows the other.
        changed = _git("--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", "*.py", at=root)
        return _git("rev-parse", "HEAD", at=root) + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*words: str, at: pathlib.Path) -> str:
    done = subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def to_json(value: Any) -> Any:
    """A value as JSON: tensors and tuples as lists, infinities as "inf", NaN as null, floats with nine digits.

    Only the last part of an absolute path is kept: the rest tells of the machine, not of the run.
    """
    if isinstance(value, pathlib.PurePath):
        return value.name if value.is_absolute() else value.as_posix()
    if isinstance(value, torch.Tensor):
        return to_json(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(entry) for entry in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return f"{value:g}" if math.isinf(value) else float(f"{value:.9g}")
    return value
