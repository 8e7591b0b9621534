"""A run of the loop: its parts, its step, and its state between steps."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horst import fields
from horst.files import locked
from horst.parameters.modes import evaluating
from horst.parameters.sharding import local_shard, sum_over_ranks
from horst.sparsity import ADMM, IMP, Sparsifier
from horst.sparsity.controller import Event
from horst.training import checkpoint
from horst.training.averages import ExponentialAverage
from horst.training.config import LoopConfig
from horst.training.distributed import (
    on_every_rank,
    on_rank_0,
    rank,
    reshard,
    take_from_rank_0,
    whole_tensor,
    world_size,
)
from horst.training.interruption import AgreedStop, StopRequest
from horst.training.lr_schedules import LRSchedule, set_learning_rate
from horst.training.metrics import MetricsLog
from horst.training.progress import ProgressBar, Stopwatch
from horst.training.run_state import load_optimizer_state, load_tensors, named_tensors, optimizer_state, settings
from horst.training.task import Objective, Task

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What came of a run.

    Args:
        step: Number of steps done.
        metrics: Numbers of the last evaluation; those of the average have names that begin with ``ema_``.
        units_per_second: Tokens or images per second over all ranks, without the first ``log_every`` steps (which
            compile), evaluations and checkpoints; None where nothing is left then.
        seconds: Wall time, with that of the processes that the run was resumed from, up to their checkpoints.
        checkpoint: Last checkpoint.
    """

    step: int
    metrics: dict[str, float]
    units_per_second: float | None
    seconds: float
    checkpoint: pathlib.Path | None


class NonFiniteLoss(RuntimeError):
    """Training has broken down: the loss or a weight is not finite."""


class Run:
    """A run under way: what it is made of, and how far it has come. :func:`horst.training.loop.train` drives it."""

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        config: LoopConfig,
        steps: int,
        schedule: LRSchedule,
        sparsifier: Sparsifier | None,
        directory: pathlib.Path,
        stop: StopRequest,
    ) -> None:
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}.")
        schedule.factor(0, steps)  # raises if the warm-up is longer than the run
        self.task, self.optimizer, self.config, self.sparsifier = task, optimizer, config, sparsifier
        self.steps, self.schedule = steps, schedule
        self.directory, self.stop_request = directory, stop
        self.model = task.model.train()
        self.tensors = named_tensors(self.model)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.buffers = [t for t in self.tensors.values() if not isinstance(t, nn.Parameter)]
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = next(self.model.parameters()).device
        self.average: ExponentialAverage | None = None
        if config.ema_decay is not None:
            weights = {name: t for name, t in self.tensors.items() if isinstance(t, nn.Parameter)}
            self.average = ExponentialAverage(weights, config.ema_decay)
        self.fingerprint = {
            "config": {
                "steps": steps,
                "schedule": repr(schedule),
                **fields.settings(config, without=("execution", "nothing")),
            },
            "task": dict(task.identity),
            **settings(self.model, optimizer, sparsifier),
        }
        self.loss = Objective(task, config, self.device)

        self.step = 0
        self.evaluated_at = 0
        self.evaluation: dict[str, float] = {}
        self.checkpoint: pathlib.Path | None = None
        self.checkpoint_step = -1
        self.loss_sum = torch.zeros((), device=self.device)  # of the steps since the loss was last read
        self.loss_steps = 0
        self.gradient_norm: Tensor | None = None
        self.speed = Stopwatch()

    # --- beginning and end ----------------------------------------------------------------------------------------

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Lock the directory, load the last checkpoint if there is one; open the metrics, the bar."""
        on_rank_0(lambda: stack.enter_context(locked(self.directory)))
        position = 0
        if (path := checkpoint.latest(self.directory / "checkpoints")) is not None:
            position = self._resume(path)
        on_every_rank(lambda: self._open_metrics(stack, position))
        if path is not None:
            self.bar.say(f"resumed after step {self.step} from {path}")
        self.stop = AgreedStop(self.stop_request, step=self.step, wait=self.loss_sum.item)
        self.speed.start()

    def _open_metrics(self, stack: contextlib.ExitStack, position: int) -> None:
        """The metrics, on rank 0, and the bar, which shows itself there."""
        self.metrics: MetricsLog | None = None
        if rank() == 0:
            with self._explain_failed_writes("the metrics"):
                log = MetricsLog(
                    self.directory,
                    position=position,
                    step=self.step,
                    tensorboard=self.config.tensorboard,
                    wandb=self.config.wandb,
                    config={key: value for key, value in self.fingerprint.items() if key != "model"},
                )
            self.metrics = stack.enter_context(log)
        name = str(self.task.identity.get("optimizer", ""))
        bar = ProgressBar(self.steps, step=self.step, unit=self.task.unit, shown=rank() == 0, name=name)
        self.bar = stack.enter_context(bar)

    def _resume(self, path: pathlib.Path) -> int:
        """Put everything back; the length that the metrics file had."""
        saved = checkpoint.load(path, fingerprint=self.fingerprint, like=self.tensors)
        load_tensors(self.tensors, saved["model"])
        load_optimizer_state(self.optimizer, self.names, saved["optimizer"])
        if self.sparsifier is not None:
            self.sparsifier.load_state_dict(saved["sparsifier"])
        if self.average is not None:
            load_tensors(self.average.averages, saved["average"])
        self.step = self.checkpoint_step = saved["step"]
        self.checkpoint = path
        self.evaluated_at, self.evaluation = saved["evaluated_at"], saved["evaluation"]
        sums = saved["loss_sum"]  # by rank; as many ranks as then go on with their own, others with the mean
        self.loss_sum.copy_(sums[rank()] if sums.shape == (world_size(),) else sums.mean())
        self.loss_steps = saved["loss_steps"]
        self.speed.add(saved["seconds"])
        checkpoint.restore_random_state(path)
        position: int = saved["metrics_position"]
        return position

    def result(self) -> TrainResult:
        """What came of it."""
        return TrainResult(self.step, self.evaluation, self.speed.rate, self.speed.seconds, self.checkpoint)

    # --- a step ---------------------------------------------------------------------------------------------------

    def train_step(self, inputs: Tensor, targets: Tensor) -> None:
        """One optimizer step; nothing in it waits for the device."""
        self.config.check_rows(len(inputs))
        step, steps = self.step, self.steps
        if isinstance(self.sparsifier, IMP):  # each of its rounds trains anew
            step, steps = self.sparsifier.training_step, self.sparsifier.schedule.steps_per_round
        set_learning_rate(self.optimizer, self.schedule.factor(step, steps))
        inputs, targets = (x.to(self.device, non_blocking=True) for x in (inputs, targets))
        self.loss_sum += self._backward(inputs, targets)
        if isinstance(self.sparsifier, ADMM) and self.sparsifier.wants_ascent:  # SAFE
            with self.sparsifier.ascended():
                self._backward(inputs, targets)
        if self.config.clip_norm is not None:
            self.gradient_norm = nn.utils.clip_grad_norm_(self.params, self.config.clip_norm)
        self.optimizer.step()
        take_from_rank_0(self.buffers)  # running statistics of each rank's own rows: evaluated and saved are these
        event = None if self.sparsifier is None else self.sparsifier.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        self.step += 1
        self.loss_steps += 1
        self.speed.count(len(inputs) * self.task.units_per_row * world_size())
        if event is not None:
            self._record_event(event)

    def _backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the batch, part by part, and average them over the ranks; the loss.

        A part weighs as much as it has terms, so that the result is the mean over all terms of all ranks. The task may
        give several means as a vector, to be added up, and their numbers of terms as another.
        """
        parts, total = self.config.accumulate, torch.zeros_like(self.loss_sum)
        pieces = list(zip(inputs.chunk(parts), targets.chunk(parts), strict=True))
        counts = torch.stack([self.task.count(x, y) for x, y in pieces])
        of_all = sum_over_ranks(counts.sum(0))
        weights = torch.where(of_all > 0, world_size() * counts / of_all, 1 / parts)
        for i, (x, y) in enumerate(pieces):
            with self.loss.gradients_reduced(i + 1 == parts):
                # Torch's mean over nothing is NaN, which 0 would not weigh away. Its backward pass runs all the same:
                # DDP waits for it.
                loss = torch.where(weights[i] > 0, self.loss(x, y) * weights[i], 0).sum()
                loss.backward()
            total += loss.detach()
        return total

    def _record_event(self, event: Event) -> None:
        if world_size() > 1 and self.sparsifier is not None and not self.sparsifier.is_sharded:
            hashes = on_every_rank(self.sparsifier.mask_hash)
            if len(set(hashes)) > 1:
                raise RuntimeError(
                    f"masks differ between ranks after step {self.step}: hashes {hashes}. Scores must be computed from "
                    "weights and averaged gradients alone, which are equal on all ranks."
                )
        self._write_metrics({"event": event.kind, "sparsity": event.sparsity})

    def _write_metrics(self, numbers: Mapping[str, Any]) -> None:
        self._with_metrics(lambda metrics: metrics.write(self.step, numbers))

    def _with_metrics(self, action: Callable[[MetricsLog], T]) -> T | None:
        """What ``action`` gives on rank 0, which has the metrics. If it cannot write, all ranks stop."""

        def act() -> T | None:
            with self._explain_failed_writes(f"the metrics of step {self.step}"):
                return None if self.metrics is None else action(self.metrics)

        return on_every_rank(act)[0]

    @contextlib.contextmanager
    def _explain_failed_writes(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = checkpoint.why_not_written(what, self.directory / "checkpoints", error)
            raise checkpoint.CheckpointError(message) from error

    # --- reading, judging, saving ---------------------------------------------------------------------------------

    def log(self) -> None:
        """Read the loss, write it down and show it."""
        loss = float(sum_over_ranks(self.loss_sum / self.loss_steps)) / world_size()
        if not math.isfinite(loss):
            raise self._breakdown(f"the loss is {loss}")
        rate, seconds_per_step = self.speed.lap(self.loss_steps)
        self.loss_sum.zero_()
        self.loss_steps = 0
        numbers: dict[str, Any] = {"loss": loss, "lr": float(self.optimizer.param_groups[0]["lr"])}
        if self.gradient_norm is not None:
            numbers["gradient_norm"] = float(whole_tensor(self.gradient_norm))  # over all ranks
        if self.sparsifier is not None:
            numbers["sparsity"] = self.sparsifier.current_sparsity
        numbers |= {f"{self.task.unit}_per_second": rate, "seconds": self.speed.seconds}
        self._write_metrics(numbers)
        self.bar.update(self.step, loss, rate, (self.steps - self.step) * seconds_per_step)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether this step is one to evaluate after, and that has not been done."""
        every = self.config.eval_every
        due = self.step == self.steps or (every is not None and self.step % every == 0)
        return due and self.evaluated_at != self.step

    def evaluate(self) -> None:
        """The task's numbers, for the weights and for their average under the present masks."""
        with self.speed.paused():
            self._check_finite()
            found = self._evaluate("")
            if self.average is not None:
                with self.average.swapped_in():
                    masked = self.sparsifier.evaluate(self.model) if self.sparsifier else contextlib.nullcontext()
                    with masked:
                        found |= self._evaluate("ema_")
            self.evaluated_at, self.evaluation = self.step, found
            self._write_metrics({f"eval_{name}": value for name, value in found.items()})
            self.bar.say(f"step {self.step}: " + ", ".join(f"{name} {value:.6g}" for name, value in found.items()))

    def _evaluate(self, prefix: str) -> dict[str, float]:
        try:
            with evaluating(self.model), torch.no_grad():
                found = self.task.evaluate(self.model)
            return {prefix + name: float(value) for name, value in found.items()}
        finally:
            reshard(self.model)

    @property
    def checkpoint_is_due(self) -> bool:
        """Whether this step is one to save after, and that has not been done."""
        every = self.config.checkpoint_every
        due = every is not None and (self.step == self.steps or self.step % every == 0)
        return due and self.step > 0 and self.checkpoint_step != self.step

    def save(self) -> pathlib.Path:
        """Write a checkpoint, if this step has none yet."""
        if self.checkpoint is not None and self.checkpoint_step == self.step:
            return self.checkpoint
        with self.speed.paused():
            self._check_finite()
            state = {
                "step": self.step,
                "model": named_tensors(self.model),
                "optimizer": optimizer_state(self.optimizer, self.names),
                "sparsifier": None if self.sparsifier is None else self.sparsifier.state_dict(),
                "average": None if self.average is None else self.average.averages,
                "evaluated_at": self.evaluated_at,
                "evaluation": self.evaluation,
                "loss_sum": self._loss_sums(),
                "loss_steps": self.loss_steps,
                "seconds": self.speed.seconds,
                "metrics_position": self._with_metrics(lambda metrics: metrics.position),
            }
            self.checkpoint = checkpoint.save(
                self.directory / "checkpoints",
                self.step,
                state,
                fingerprint=self.fingerprint,
                keep=self.config.keep_checkpoints,
            )
            self.checkpoint_step = self.step
        return self.checkpoint

    def _loss_sums(self) -> Tensor:
        """Every rank's sum of losses: a resumed run that added to their mean would round its next loss differently."""
        sums = self.loss_sum.new_zeros(world_size())
        sums[rank()] = self.loss_sum
        return sum_over_ranks(sums)

    def _check_finite(self) -> None:
        """Raise if the losses since the last read, or the weights, are not finite: nobody should judge or save them."""
        weights = [local_shard(p) for p in self.params if p.is_floating_point() and local_shard(p).numel()]
        # The largest entry is in range whatever the dtype; a sum of float16 weights may not be.
        norms = torch.stack([self.loss_sum, *(n.to(self.loss_sum) for n in torch._foreach_norm(weights, math.inf))])
        if not math.isfinite(float(sum_over_ranks(norms.sum()))):
            raise self._breakdown("a loss or a weight is not finite")

    def _breakdown(self, what: str) -> NonFiniteLoss:
        # A finite loss tells of the weights before its step.
        since = max(self.step - self.loss_steps - 1, self.checkpoint_step, 0)
        good = f"The last good checkpoint is {self.checkpoint}" if self.checkpoint else "There is no checkpoint yet"
        return NonFiniteLoss(
            f"{what} at step {self.step}; all was finite until step {since}. {good}. Lower the learning rate (or "
            "HORST's alpha), clip the gradient, or warm up for longer, in a new directory."
        )
