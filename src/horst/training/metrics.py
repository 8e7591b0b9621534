"""What a run measures: JSON lines always; TensorBoard and Weights & Biases when asked."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from horst.extras import load_extra


class MetricsLog:
    """A JSON line for each set of numbers, in ``metrics.jsonl``.

    A resumed run cuts the file back to where it was when its checkpoint was written, so no line appears twice and none
    is lost. A file without a checkpoint is begun anew.

    Args:
        directory: Folder of the files.
        position: Length of the file in the checkpoint; 0 begins anew.
        step: The step that is resumed.
        tensorboard: Whether to write to ``directory/tensorboard`` as well.
        wandb: Project of Weights & Biases to send the numbers to as well.
        config: Settings of the run that Weights & Biases shows.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with MetricsLog(folder) as log:
        ...         log.write(1, {"loss": 2.5})
        ...     (pathlib.Path(folder) / "metrics.jsonl").read_text()
        '{"step": 1, "loss": 2.5}\\n'
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        position: int = 0,
        step: int = 0,
        tensorboard: bool = False,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "metrics.jsonl"
        path.touch()
        os.truncate(path, min(position, path.stat().st_size))
        self._file: TextIO = open(path, "a")  # noqa: SIM115 - closed by close()
        self._tensorboard: Any = None
        self._wandb: Any = None
        with contextlib.ExitStack() as opened:
            opened.push(self)  # closes what is open if the rest cannot be opened
            if tensorboard:
                load_extra("tensorboard")
                from torch.utils.tensorboard import SummaryWriter

                # At step 0 too: a run that died before its first checkpoint has left steps there.
                self._tensorboard = SummaryWriter(directory / "tensorboard", purge_step=step + 1)
            if wandb is not None:
                self._wandb = _start_wandb(directory, wandb, dict(config or {}), resumed=step > 0)
            opened.pop_all()

    @property
    def position(self) -> int:
        """Length of the file, all of it on disk: for a checkpoint."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def write(self, step: int, numbers: Mapping[str, Any]) -> None:
        """Note ``numbers`` of ``step``."""
        line = {"step": step, **{name: _plain(value) for name, value in numbers.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        scalars = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def close(self) -> None:
        """Write out what is left."""
        with contextlib.ExitStack() as stack:  # all of them, whatever one raises
            if self._wandb is not None:
                stack.callback(self._wandb.finish)
            if self._tensorboard is not None:
                stack.callback(self._tensorboard.close)
            stack.callback(self._file.close)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # A full disk refuses what is left a second time, which would hide why the run ends.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OSError):
            self.close()


def _start_wandb(directory: pathlib.Path, project: str, config: dict[str, Any], *, resumed: bool) -> Any:
    """A run of Weights & Biases; a resumed run continues the same one, whose name is kept beside the metrics.

    A run that starts again gets a new one: the old one would refuse steps that it has passed.
    """
    wandb = load_extra("wandb")
    file = directory / "wandb_id.txt"
    known = file.read_text().strip() if resumed and file.exists() else None
    run = wandb.init(project=project, dir=str(directory), config=config, id=known, resume="allow")
    file.write_text(f"{run.id}\n")
    return run


def _plain(value: Any) -> Any:
    """JSON has no infinities ("inf" instead) and no NaN (null)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else f"{value:g}"
    return value
