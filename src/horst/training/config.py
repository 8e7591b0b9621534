"""How a run trains: the settings of the loop, each with its default."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from horst.fields import option
from horst.training.evaluate import Precision, check_precision

Compile = Literal["auto", "on", "off", "max-autotune"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How to train, whatever the task. Intervals count steps; in the config of a vision recipe they count epochs.

    Args:
        precision: ``"bf16"`` computes under autocast; weights and optimizer stay in float32.
        compile: ``"on"`` compiles forward pass and loss into one; ``"max-autotune"`` also times kernels to choose from;
            ``"auto"`` compiles on a GPU.
        accumulate: Number of parts of each process's batch, computed one after the other: less memory, the same
            gradient, for losses that are a mean (SquareHead is a ratio of means).
        clip_norm: Gradient-norm limit; None disables clipping.
        ema_decay: Decay of an average of the weights, evaluated beside them; None keeps no average.
        eval_every: Interval between evaluations; None evaluates at the end only.
        log_every: Steps between two lines of ``metrics.jsonl``.
        checkpoint_every: Interval between checkpoints, with one at the end; None saves only when the run is stopped.
        keep_checkpoints: Number of checkpoints kept.
        deterministic: Deterministic algorithms only: a resumed run on one GPU is then the same bit for bit.
        tensorboard: Whether to write to the folder ``tensorboard`` of the run too.
        wandb: Project of Weights & Biases to report to.
    """

    precision: Precision = "bf16"
    compile: Compile = option("auto", affects="nothing")
    accumulate: int = option(1, affects="execution")
    clip_norm: float | None = None
    ema_decay: float | None = None
    eval_every: int | None = option(None, affects="execution")
    log_every: int = option(10, affects="nothing")
    checkpoint_every: int | None = option(1000, affects="execution")
    keep_checkpoints: int = option(2, affects="nothing")
    deterministic: bool = option(False, affects="execution")
    tensorboard: bool = option(False, affects="nothing")
    wandb: str | None = option(None, affects="nothing")

    def __post_init__(self) -> None:
        for name in ("accumulate", "eval_every", "log_every", "checkpoint_every", "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if self.clip_norm is not None and not self.clip_norm > 0.0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm}. Use None for no clipping.")
        check_precision(self.precision)
        if self.compile not in get_args(Compile):
            allowed = ", ".join(map(repr, get_args(Compile)))
            raise ValueError(f"compile must be one of {allowed}, got {self.compile!r}.")

    def check_rows(self, rows: int) -> None:
        """Refuse a batch that ``accumulate`` cannot divide; ``rows`` are those of one rank."""
        if rows % self.accumulate:
            raise ValueError(
                f"accumulate={self.accumulate} must divide the rows of each rank's batch, which has {rows}. "
                "Choose another number, or another batch size."
            )
