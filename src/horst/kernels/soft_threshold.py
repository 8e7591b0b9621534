"""The proximal step of an L1 penalty over a list of tensors, in place: a pass of its own after an optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horst.kernels.rounding import rounding_noise, stochastic_round

__all__ = ["soft_threshold_"]


def soft_threshold_(
    weights: Sequence[Tensor],
    threshold: float | Tensor,
    *,
    steps: Sequence[Tensor] | None = None,
    found_inf: Tensor | None = None,
) -> None:
    r"""Shrink every weight towards zero by ``threshold``, and to exactly zero from below that.

    .. math:: \theta \leftarrow \mathrm{sign}(\theta) \max(|\theta| - \mathrm{threshold}, 0)

    One pass over memory where the host knows the threshold, two where it lives on a device: the host never waits for
    it. Half-precision weights are shrunk in float32 and rounded once.

    Args:
        threshold: At least 0; a tensor has one element.
        steps: Step counters, one a weight: bfloat16 weights are then rounded at random (:mod:`horst.kernels.rounding`),
            with other noise than the step's own. None: to nearest, which loses a threshold below half their resolution.
        found_inf: What ``torch.amp.GradScaler`` hands to an optimizer: unless it is 0, nothing changes.

    Example:
        >>> weights = [torch.tensor([1.0, -1.0, 0.2])]
        >>> soft_threshold_(weights, 0.5)
        >>> weights
        [tensor([ 0.5000, -0.5000,  0.0000])]
    """
    threshold = _read_on_host(threshold)
    if not isinstance(threshold, Tensor) and not 0 <= threshold < math.inf:
        raise ValueError(f"the threshold lr * l1 must be a number of at least 0, got {threshold}. Mend lr or l1.")
    skipped = 0.0 if found_inf is None else _read_on_host(found_inf)
    if isinstance(skipped, Tensor):  # a sum over devices: it may be more than 1
        if isinstance(threshold, Tensor):
            threshold = threshold.to(skipped.device, non_blocking=True)
        threshold = threshold * (skipped == 0).double()
    elif skipped:
        return
    for i, theta in enumerate(weights):
        here = threshold
        if isinstance(here, Tensor):
            here = here.to(theta.device, non_blocking=True).reshape(())
        if theta.dtype not in (torch.bfloat16, torch.float16):
            _shrink_(theta, here)
            continue
        wide = theta.float()
        _shrink_(wide, here)
        if steps is not None and theta.dtype is torch.bfloat16:
            # the step has used the salts from 0 up
            wide = stochastic_round(wide, rounding_noise(theta.shape, steps[i], ~i, theta.device) & 0xFFFF)
        theta.copy_(wide)


def _read_on_host(value: float | Tensor) -> float | Tensor:
    """A number where no device need be waited for. The compiler keeps a tensor: it would compile for each number."""
    if isinstance(value, Tensor) and value.is_cpu and not torch.compiler.is_compiling():
        return value.item()
    return value


def _shrink_(theta: Tensor, threshold: Any) -> None:
    if torch.compiler.is_compiling():
        # One pass for the compiler, which may compute theta - clamped before theta is rounded: then not exactly 0.
        shrunk = theta - theta.clamp(-threshold, threshold)
        theta.copy_(torch.where(theta.abs() <= threshold, 0.0, shrunk))  # <=, so that NaN stays NaN
    elif isinstance(threshold, Tensor):
        theta.sub_(theta.clamp(-threshold, threshold))
    else:
        torch.ops.aten.softshrink.out(theta, threshold, out=theta)
