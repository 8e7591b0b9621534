"""The one training loop, for language and vision, from a laptop to many machines.

Run again after anything that stopped it, and it resumes from the last checkpoint in ``directory``; on a CPU (and on
one GPU with ``deterministic=True``) the weights and metrics are those of the run that was never stopped, bit for bit.

No step waits for the device. The loss is added up there and read every ``log_every`` steps; a loss that is not finite
is noticed at that read, and it or such a weight before every evaluation and checkpoint. Several ranks compare every few
seconds whether one is to stop.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

from torch.optim import Optimizer

from horst.sparsity import Sparsifier
from horst.training.config import LoopConfig
from horst.training.interruption import Interrupted, StopRequest
from horst.training.lr_schedules import Constant, LRSchedule
from horst.training.run import Run, TrainResult
from horst.training.task import Task
from horst.training.torch_settings import deterministic_algorithms


def train(
    task: Task,
    optimizer: Optimizer,
    config: LoopConfig,
    *,
    steps: int,
    schedule: LRSchedule = Constant(),
    sparsifier: Sparsifier | None = None,
    directory: str | os.PathLike[str],
) -> TrainResult:
    """Train ``task.model``, from the beginning or from the last checkpoint in ``directory``.

    ``directory`` gets ``metrics.jsonl`` and ``checkpoints``; on several hosts they share it. One run at a time has it.

    Args:
        task: Model, loss, data, evaluation.
        optimizer: Optimizer of the model's parameters. The schedule's factor multiplies its ``lr``.
        config: Precision, clipping, intervals.
        steps: Optimizer steps of the whole run.
        schedule: Learning-rate schedule, see :mod:`horst.training.lr_schedules`.
        sparsifier: A method of :mod:`horst.sparsity` around the same optimizer.
        directory: Folder of the run.

    Raises:
        Interrupted: SIGTERM or Ctrl-C came; the run has saved its state. Uncaught, the process exits with 143 or 130.
        NonFiniteLoss: The loss or a weight is NaN or infinite.
        RuntimeError: Another process is training in ``directory``.
        CheckpointError: A checkpoint or the metrics could not be written, or a checkpoint is corrupt or of another run.

    Example:
        >>> import tempfile, torch
        >>> class Data:
        ...     def batches(self, start):
        ...         while True:
        ...             x = torch.randn(8, 4, generator=torch.Generator().manual_seed(start))
        ...             yield x, x.sum(1, keepdim=True)
        ...             start += 1
        >>> model = torch.nn.Linear(4, 1)
        >>> task = Task(
        ...     model=model,
        ...     loss=lambda model, x, y: (model(x) - y).square().mean(),
        ...     train=Data(),
        ...     evaluate=lambda model: {"error": float((model.weight - 1).abs().max())},
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        ...     result = train(task, optimizer, LoopConfig(precision="float32"), steps=200, directory=folder)
        >>> result.step, result.metrics["error"] < 0.01
        (200, True)
    """
    with deterministic_algorithms(config.deterministic), contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        run = Run(task, optimizer, config, steps, schedule, sparsifier, pathlib.Path(directory), stop)
        run.begin(stack)
        batches = task.train.batches(run.step)
        stack.callback(getattr(batches, "close", lambda: None))
        while True:
            if signal := run.stop.signal_after(run.step):
                raise Interrupted(signal, run.step, run.save())
            if run.evaluation_is_due:
                run.evaluate()
            if run.checkpoint_is_due:
                run.save()
            if run.step == steps:
                # The last evaluation may have taken minutes. A signal in it must not be lost: the caller would go on.
                if signal := run.stop.signal_after(run.step, last=True):
                    raise Interrupted(signal, run.step, run.save())
                return run.result()
            if (batch := next(batches, None)) is None:
                raise ValueError(f"the training batches ended after step {run.step} of {steps}; they must not.")
            run.train_step(*batch)
            if run.step % config.log_every == 0 or run.step == steps:
                run.log()
