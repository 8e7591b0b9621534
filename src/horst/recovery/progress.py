"""How far a run of several stages has come, in a file beside its checkpoints; and batches and rates of one stage."""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from horst.files import read_json, write_text
from horst.training import BatchSource, CheckpointError, WarmupCosine, checkpoint
from horst.training.distributed import on_rank_0

logger = logging.getLogger(__name__)

__all__ = ["AnotherRun", "LaterBatches", "Part", "Progress"]


class AnotherRun(CheckpointError):
    """A folder holds a run with another model, other data or other settings.

    Args:
        directory: The folder.
        changes: What differs: names, with what was and what is.

    Example:
        >>> error = AnotherRun(pathlib.Path("run"), {"sparsity": (0.5, 0.6), "data": None})
        >>> error.words
        'sparsity was 0.5, now 0.6; the data is not the same'
        >>> AnotherRun(pathlib.Path("run"), {"sparsity": (0.5, 0.6)}).back
        '0.5'
    """

    def __init__(self, directory: pathlib.Path, changes: Mapping[str, tuple[Any, Any] | None]) -> None:
        self.words = "; ".join(
            f"the {name} is not the same" if pair is None else f"{name} was {_plain(pair[0])}, now {_plain(pair[1])}"
            for name, pair in changes.items()
        )
        only = next(iter(changes.values())) if len(changes) == 1 else None
        self.back = "what it was begun with" if only is None or only[0] is None else _plain(only[0])
        super().__init__(
            f"{directory} holds another run: {self.words}. Give {self.back} to go on, another directory, or delete "
            "this one to begin anew."
        )


class LaterBatches:
    """A source of batches that begins ``offset`` batches later."""

    def __init__(self, source: BatchSource, offset: int) -> None:
        self.source, self.offset = source, offset

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batch ``start`` is batch ``offset + start`` of the source."""
        return self.source.batches(self.offset + start)


@dataclass(frozen=True)
class Part:
    """A part of a longer learning-rate schedule.

    Args:
        whole: Schedule of the whole run.
        offset: Steps before this part.
        steps: Steps of the whole run.

    Example:
        >>> Part(WarmupCosine(warmup_steps=0, end=0.0), offset=50, steps=100).factor(0, 50)
        0.5
    """

    whole: WarmupCosine
    offset: int
    steps: int

    def factor(self, step: int, steps: int) -> float:
        """The factor at ``step`` of the part."""
        return self.whole.factor(self.offset + step, self.steps)


class Progress:
    """What is done: the dense evaluation, and of each stage what is known.

    Args:
        directory: Folder of the run; each stage has a folder ``stage-1``, ... in it.
        identity: What makes the run the same, as JSON; another one is refused.
        stages: Number of stages.

    Raises:
        AnotherRun: The folder holds another run.
    """

    FILE = "progress.json"

    def __init__(self, directory: pathlib.Path, identity: Mapping[str, Any], stages: int) -> None:
        self.directory = directory
        identity = on_rank_0(lambda: json.loads(json.dumps(identity)))  # rank 0's weights are everybody's
        fresh: dict[str, Any] = {"identity": identity, "dense": None, "stages": [{} for _ in range(stages)]}
        found: dict[str, Any] | None = on_rank_0(self._read)
        self.state = fresh if found is None else found
        if changes := _changes(self.state["identity"], identity):
            raise AnotherRun(directory, changes)
        if found is not None:
            logger.info("going on with the run in %s", directory)

    def _read(self) -> dict[str, Any] | None:
        path = self.directory / self.FILE
        return read_json(path) if path.exists() else None

    def save(self) -> None:
        """Write the state, on rank 0."""

        def write() -> None:
            try:
                write_text(self.directory / self.FILE, json.dumps(self.state, indent=1) + "\n")
            except OSError as error:
                folder = self.folder(self.begin_here()) / "checkpoints"
                message = checkpoint.why_not_written(f"{self.directory / self.FILE}", folder, error)
                raise CheckpointError(message) from error

        on_rank_0(write)

    def folder(self, stage: int) -> pathlib.Path:
        """The folder of a stage, counted from 0."""
        return self.directory / f"stage-{stage + 1}"

    def has_checkpoint(self, stage: int) -> bool:
        """Whether the stage can go on from a checkpoint."""
        return checkpoint.latest(self.folder(stage) / "checkpoints") is not None

    def begin(self) -> int:
        """The stage to go on with: the last that has a checkpoint."""
        return on_rank_0(self.begin_here)

    def begin_here(self) -> int:
        """The same, as this rank sees it."""
        stages = range(len(self.state["stages"]))
        return max((s for s in stages if checkpoint.complete(self.folder(s) / "checkpoints")), default=0)

    def forget_checkpoints(self, stage: int) -> None:
        """Delete the checkpoints of a stage that a later one has followed."""
        on_rank_0(lambda: shutil.rmtree(self.folder(stage) / "checkpoints", ignore_errors=True))

    def last_loss(self, stage: int) -> float:
        """The last training loss that the stage has written down."""

        def read() -> float:
            lines = (self.folder(stage) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return float(next(line["loss"] for line in map(json.loads, reversed(lines)) if "loss" in line))

        return on_rank_0(read)


def _changes(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, tuple[Any, Any] | None]:
    """What differs, by name: a setting with both values, a fingerprint without."""
    settings = checkpoint.differences(saved["settings"], mine["settings"])
    others = checkpoint.differences({**saved, "settings": None}, {**mine, "settings": None})
    if settings.keys() & {"steps", "tokens", "batch_size"}:
        others.pop("steps", None)  # which follow
    return {**settings, **{name: pair if name == "steps" else None for name, pair in others.items()}}


def _plain(value: Any) -> str:
    return "not given" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)
