"""How far a run of several stages has come, in a file beside its checkpoints; and batches and rates of one stage."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from horst.files import read_json, write_text
from horst.training import BatchSource, CheckpointError, WarmupCosine, checkpoint
from horst.training.distributed import on_rank_0

__all__ = ["LaterBatches", "Part", "Progress"]


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
        CheckpointError: The folder holds another run.
    """

    FILE = "progress.json"

    def __init__(self, directory: pathlib.Path, identity: Mapping[str, Any], stages: int) -> None:
        self.directory = directory
        identity = on_rank_0(lambda: json.loads(json.dumps(identity)))  # rank 0's weights are everybody's
        fresh: dict[str, Any] = {"identity": identity, "dense": None, "stages": [{} for _ in range(stages)]}
        self.state: dict[str, Any] = on_rank_0(lambda: self._read() or fresh)
        if other := _differences(self.state["identity"], identity):
            raise CheckpointError(
                f"{directory} belongs to another run: {', '.join(other)} differ. Call with the model, data and "
                "settings that it was begun with, or choose another directory."
            )

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


def _differences(saved: Any, mine: Any, name: str = "") -> list[str]:
    """The names of the entries that differ."""
    if isinstance(saved, dict) and isinstance(mine, dict):
        names = [*saved, *(key for key in mine if key not in saved)]
        parts = [_differences(saved.get(key), mine.get(key), f"{name}.{key}" if name else key) for key in names]
        return [entry for part in parts for entry in part]
    return [] if saved == mine else [name]
