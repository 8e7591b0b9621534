"""How a run trains: the settings of the loop, each with its default."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from horst.lab.training.evaluate import Precision, check_precision
from horst.lab.training.lr_schedules import Constant, LRSchedule

__all__ = ["Compile", "LoopConfig"]

Compile = Literal["auto", "on", "off", "max-autotune"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train.

    Args:
        steps: Optimizer steps of the whole run.
        schedule: Of the learning rate, see :mod:`horst.lab.training.lr_schedules`.
        precision: ``"bf16"`` computes under autocast; weights and optimizer stay in float32.
        compile: ``"on"`` compiles forward pass and loss into one; ``"max-autotune"`` also times kernels to choose from;
            ``"auto"`` is on for a GPU.
        accumulate: Split each rank's batch into so many parts, one after the other: less memory, the same gradient.
        clip_norm: Largest norm of the gradient; None leaves it.
        ema_decay: Of an average of the weights, evaluated beside them; None keeps none.
        eval_every: Steps between evaluations; None evaluates at the end only.
        log_every: Steps between reads of the loss.
        checkpoint_every: Steps between checkpoints, with one at the end; None saves only when the run is stopped.
        keep_checkpoints: How many stay.
        deterministic: Deterministic algorithms only.
        tensorboard: Write to ``directory/tensorboard`` too.
        wandb: Project of Weights & Biases to report to.
    """

    steps: int
    schedule: LRSchedule = Constant()  # noqa: RUF009 - frozen
    precision: Precision = "bf16"
    compile: Compile = "auto"
    accumulate: int = 1
    clip_norm: float | None = None
    ema_decay: float | None = None
    eval_every: int | None = None
    log_every: int = 10
    checkpoint_every: int | None = 1000
    keep_checkpoints: int = 2
    deterministic: bool = False
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "accumulate", "eval_every", "log_every", "checkpoint_every", "keep_checkpoints")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}. Use None for no clipping.")
        check_precision(self.precision)
        if self.compile not in get_args(Compile):
            allowed = ", ".join(map(repr, get_args(Compile)))
            raise ValueError(f"compile must be one of {allowed}, got {self.compile!r}.")
        self.schedule.factor(0, self.steps)  # says so if the warm-up is longer than the run

    def identity(self) -> dict[str, Any]:
        """The fields that decide what is computed; the others may change when a run is resumed."""
        names = ("steps", "precision", "clip_norm", "ema_decay")
        return {"schedule": repr(self.schedule), **{name: getattr(self, name) for name in names}}
