"""The soft threshold of the option ``l1``, in place: inside the eager steps, and after other optimizers' steps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["soft_threshold_", "soft_threshold_reference"]


def soft_threshold_reference(theta: Tensor, threshold: float | Tensor) -> Tensor:
    r"""The formula, out of place: :math:`\mathrm{sign}(\theta) \max(|\theta| - \mathrm{threshold}, 0)`.

    Example:
        >>> soft_threshold_reference(torch.tensor([1.0, -1.0, 0.2]), 0.5)
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    return theta.sign() * (theta.abs() - threshold).clamp(min=0)


def soft_threshold_(tensors: list[Tensor], threshold: float | Tensor) -> None:
    """Shrink each entry towards zero by ``threshold``, and to exactly zero from below that. NaN stays NaN.

    Args:
        tensors: Tensors of the dtype to compute in: float32 copies of half-precision weights.
        threshold: Number of at least 0. A tensor of one element is never read on the host.
    """
    for theta in tensors:
        if isinstance(threshold, Tensor):
            threshold = threshold.reshape(()).to(theta.device, non_blocking=True)
        if torch.compiler.is_compiling():
            # One pass for the compiler, which may compute theta - clamped before theta is rounded: then not exactly 0.
            shrunk = theta - theta.clamp(-threshold, threshold)
            theta.copy_(torch.where(theta.abs() <= threshold, 0.0, shrunk))  # <=, so that NaN stays NaN
        elif isinstance(threshold, Tensor):
            theta.sub_(theta.clamp(-threshold, threshold))
        else:
            torch.ops.aten.softshrink.out(theta, threshold, out=theta)
