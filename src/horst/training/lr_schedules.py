r"""Learning-rate schedules: pure functions of the step, as a factor of the optimizer's own ``lr``.

Step k, counted from 0, is taken at ``lr * schedule.factor(k, steps)``. :class:`OneCycle` is the paper's language code,
:class:`Triangular` its vision code, :class:`WarmupCosine` DeiT's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate at every step."""

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at ``step`` of ``steps``."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    r"""Half a cosine up, half a cosine down: ``OneCycleLR`` as the paper's language code calls it (Table 5).

    With :math:`c(a, b, x) = b + (a - b)(1 + \cos \pi x) / 2`, warm-up steps :math:`w` and steps :math:`T`,

    .. math::
        f(k) = \begin{cases}
            c(f_0, 1, k / (w - 1)) & k < w \\
            c(1, f_T, (k - w + 1) / (T - w)) & \text{else}
        \end{cases}

    where :math:`f_0, f_T` are ``start``, ``end``.

    Args:
        warmup_steps: Steps of warm-up; the last of them has the full rate.
        start: Factor at step 0.
        end: Factor at the last step.

    Example:
        >>> schedule = OneCycle(warmup_steps=3000)
        >>> [round(schedule.factor(step, 25_000), 4) for step in (0, 2999, 24_999)]
        [0.01, 1.0, 0.01]
    """

    warmup_steps: int
    start: float = 0.01
    end: float = 0.01

    def __post_init__(self) -> None:
        _check(self.warmup_steps, start=self.start, end=self.end)

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at ``step`` of ``steps``."""
        _check_length(self.warmup_steps, steps)
        peak = max(self.warmup_steps - 1, 0)
        if step < peak:
            return _half_cosine(self.start, 1.0, step / peak)
        return _half_cosine(1.0, self.end, min((step - peak) / max(steps - 1 - peak, 1), 1.0))


@dataclass(frozen=True, kw_only=True)
class Triangular:
    """Linearly up to the full rate, then linearly to zero at the end: the paper's vision code.

    Args:
        start: Factor at step 0.
        peak: Share of the steps after which the full rate is reached.

    Example:
        >>> [round(Triangular().factor(step, 100), 4) for step in (0, 10, 20, 60, 100)]
        [0.2, 0.6, 1.0, 0.5, 0.0]
    """

    start: float = 0.2
    peak: float = 0.2

    def __post_init__(self) -> None:
        _check(0, start=self.start, peak=self.peak)

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at ``step`` of ``steps``."""
        share = min(step / steps, 1.0)
        if share < self.peak:
            return self.start + (1.0 - self.start) * share / self.peak
        return (1.0 - share) / (1.0 - self.peak) if self.peak < 1.0 else 1.0


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Linearly up, then half a cosine down, as DeiT trains.

    Args:
        warmup_steps: The step that has the full rate.
        start: Factor at step 0. DeiT's rates of 1e-6 and 1e-3 give 1e-3.
        end: Factor that the cosine reaches after the last step. DeiT's 1e-5 and 1e-3 give 0.01.

    Example:
        >>> schedule = WarmupCosine(warmup_steps=10, start=0.0, end=0.0)
        >>> [round(schedule.factor(step, 110), 4) for step in (0, 5, 10, 60, 110)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """

    warmup_steps: int
    start: float = 1e-3
    end: float = 0.01

    def __post_init__(self) -> None:
        _check(self.warmup_steps, start=self.start, end=self.end)

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at ``step`` of ``steps``."""
        _check_length(self.warmup_steps, steps)
        if step < self.warmup_steps:
            return self.start + (1.0 - self.start) * step / self.warmup_steps
        return _half_cosine(1.0, self.end, min((step - self.warmup_steps) / (steps - self.warmup_steps), 1.0))


LRSchedule = Constant | OneCycle | Triangular | WarmupCosine


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set each group's ``lr`` to ``factor`` times what it was at first, which is kept as ``initial_lr``.

    A tensor ``lr`` (compiled and captured steps) is filled in place, without waiting for the device.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> set_learning_rate(optimizer, 0.1)
        >>> set_learning_rate(optimizer, 0.2)
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    for group in optimizer.param_groups:
        if "initial_lr" not in group:  # torch's own schedulers use the same key
            group["initial_lr"] = float(group["lr"])
        lr = factor * group["initial_lr"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _half_cosine(first: float, last: float, share: float) -> float:
    return last + (first - last) / 2.0 * (1.0 + math.cos(math.pi * share))


def _check(warmup_steps: int, **shares: float) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}.")
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:  # this form refuses NaN too
            raise ValueError(f"{name} must lie in [0, 1], got {value}. It is a share, not a rate.")


def _check_length(warmup_steps: int, steps: int) -> None:
    if warmup_steps >= steps:
        raise ValueError(
            f"warm-up of {warmup_steps} steps leaves nothing of a run of {steps}. Lower warmup_steps or train longer."
        )
