"""What a step works on, and how: passed whole from the optimizer to a backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepTensors(NamedTuple):
    """Lists of equal length, an entry a tensor; all but ``grads`` are updated in place.

    ``steps`` are one-element float32 counters of the steps taken before this one; for the fused backend they live on
    their parameter's device.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


class StepOptions(NamedTuple):
    """The hyperparameters of a step.

    Attributes:
        alpha: Strength of the mirror step. With ``beta`` 0 too, the step is AdamW's.
        beta: Decay inside the mirror step.
        max_exponent: Clamps the mirror step's exponent to ``[-max_exponent, max_exponent]``.
        along_gradient: The mirror step goes along ``lr * grad`` (HAM) instead of Adam's step (HORST).
        maximize: The gradient is turned round.
        capturable: The host may not read the step counters or a tensor ``lr``.
        stochastic_rounding: For bfloat16 parameters, see :mod:`horst.kernels.rounding`.
        max_scale: Bounds the mirror step's metric, see :mod:`horst.kernels.bounded_mirror`.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    alpha: float
    beta: float
    max_exponent: float | None = None
    along_gradient: bool = False
    maximize: bool = False
    capturable: bool = False
    stochastic_rounding: bool = False
    max_scale: float | None = None

    @property
    def has_mirror_step(self) -> bool:
        """Whether anything follows AdamW's step."""
        return self.alpha != 0 or self.beta != 0
