"""The tensors and the options of a step, passed whole from the optimizer to a backend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StepTensors(NamedTuple):
    """Lists of equal length, one entry per parameter; all but ``grads`` are updated in place.

    ``steps`` are one-element float32 counters of the steps taken so far; for the fused backend they live on their
    parameter's device.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]


#: HAM's exponent is clamped to this on both sides, as in its authors' code: a gradient has no fixed size.
HAM_MAX_EXPONENT = 5.0


class StepOptions(NamedTuple):
    """The hyperparameters of a step.

    Attributes:
        alpha: Strength of the mirror step. With ``beta`` 0 too, the step is AdamW's.
        beta: Decay inside the mirror step.
        along_gradient: Whether the mirror step goes along ``lr * grad`` (HAM) instead of Adam's step (HORST).
        maximize: Whether to ascend: the gradient changes its sign.
        capturable: Whether the host must not read the step counters or a tensor ``lr``.
        stochastic_rounding: Whether bfloat16 parameters are rounded at random (:mod:`horst.kernels.rounding`).
        l1: Strength of the soft threshold at the end of the step: each weight shrinks by ``lr * l1``.
    """

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    alpha: float
    beta: float
    along_gradient: bool = False
    maximize: bool = False
    capturable: bool = False
    stochastic_rounding: bool = False
    l1: float = 0.0

    @property
    def has_mirror_step(self) -> bool:
        """Whether anything follows AdamW's step."""
        return self.alpha != 0 or self.beta != 0
