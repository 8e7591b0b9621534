"""The schema of what an experiment writes: config, rows, curves, and where they come from."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from horst import __version__
from horst.extras import load_extra
from horst.files import read_json, write_json

SCHEMA_VERSION = 1
ConfigT = TypeVar("ConfigT")
Origin = Mapping[str, Any]
_PACKAGES = ("numpy", "triton", "timm")  # where installed, beside torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of an experiment found.

    Args:
        experiment: The module's name, such as ``"figure5_additive_vs_multiplicative"``.
        config: The config's fields.
        rows: One flat dictionary a row of the experiment's table.
        curves: Named columns for its figure: numbers, or lists of them.
        notes: What a reader must know to read the numbers, and where they differ from the paper's.
        environment: Commit, versions, device, threads; see :func:`environment`. Of a table of runs it is theirs, not
            that of the process which put the table together; what they do not share is ``"various"``.
        seconds: Wall time, of all runs together; of a run that was resumed, that of its last process.
        schema_version: Raised when the meaning of a field changes.
        environments: Each that some of the runs had, where they are several.
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
        return write_json(path, plain(dataclasses.asdict(self)))

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


def timed(
    name: str,
    config: Any,
    body: Callable[[], tuple[list[dict[str, Any]], dict[str, Any], list[str]]],
    device: str = "cpu",
    origins: Sequence[Origin] = (),
) -> Result:
    """Run ``body``, which returns rows, curves and notes, and wrap them up with the config and the time taken.

    Args:
        name: The experiment's.
        config: Its config, a dataclass.
        body: Computes.
        device: What it computes on.
        origins: A list that ``body`` adds the origins of the runs to which it made or found; see :func:`provenance`.
    """
    start = time.perf_counter()
    rows, curves, notes = body()
    return Result(
        experiment=name,
        config=dataclasses.asdict(config),
        rows=rows,
        curves=curves,
        notes=notes,
        **provenance(origins, environment(device), time.perf_counter() - start),
    )


def provenance(origins: Sequence[Origin], here: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The fields of a result that say where its numbers come from.

    Args:
        origins: ``environment`` and ``seconds`` of each run, from :func:`horst.lab.experiments.outcomes.once`.
            Empty: the numbers come from this process.
        here: The environment of this process.
        seconds: How long it took to make or to gather them, which counts where the runs took less.

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


def command_line(config: Callable[..., ConfigT], run: Callable[[ConfigT], Result], description: str) -> None:
    """An experiment's ``main``: the config's fields become options, the result goes to ``--out``."""
    tyro = load_extra("tyro")
    name = description.split(":")[0]

    def main(config: Any, out: pathlib.Path = pathlib.Path("runs") / f"{name}.json") -> None:
        result = run(config)
        if is_first_process():
            sys.stdout.write(f"{name}: {len(result.rows)} rows in {result.seconds:.1f} s -> {result.save(out)}\n")

    main.__annotations__["config"] = config
    main.__doc__ = f"{description}\n\nArgs:\n    out: The result file."
    tyro.cli(main, config=(tyro.conf.OmitArgPrefixes,))


def _commit() -> str:
    if "HORST_COMMIT" in os.environ:  # for machines that get the files without their history
        return os.environ["HORST_COMMIT"]
    here = pathlib.Path(__file__).resolve()
    try:
        root = pathlib.Path(_git("rev-parse", "--show-toplevel", at=here.parent))
        if not (root / "src/horst/experiments" / here.name).samefile(here):
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


def plain(value: Any) -> Any:
    """JSON has no tensors, tuples, infinities ("inf" instead) or NaN (null). Nine digits: more is noise.

    Of an absolute path the last part stays: the rest is about the machine, not about the run.
    """
    if isinstance(value, pathlib.PurePath):
        return value.name if value.is_absolute() else value.as_posix()
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return f"{value:g}" if math.isinf(value) else float(f"{value:.9g}")
    return value
