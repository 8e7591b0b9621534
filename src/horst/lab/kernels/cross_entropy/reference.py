"""Cross-entropy and its gradient as formulas."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -100  # a target that is not scored, as everywhere in torch


def losses_and_gradient_reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`~horst.lab.kernels.cross_entropy.losses_and_gradient_` computes, by torch's own operations.

    Example:
        >>> losses, gradient = losses_and_gradient_reference(torch.zeros(1, 2), torch.tensor([0]))
        >>> losses, gradient
        (tensor([0.6931]), tensor([[-0.5000,  0.5000]]))
    """
    z = at_least_float32(logits)
    scored = targets != IGNORED
    log_normalizer = z.logsumexp(1)
    losses = log_normalizer - z.gather(1, torch.where(scored, targets, 0).unsqueeze(1)).squeeze(1)
    # One expression of the logits, so that a compiler reads them once here and writes only this.
    is_target = torch.arange(z.shape[1], device=z.device) == targets.unsqueeze(1)
    gradient = (z - log_normalizer.unsqueeze(1)).exp() - is_target.to(z.dtype)
    return torch.where(scored, losses, 0.0), torch.where(scored.unsqueeze(1), gradient, 0.0).to(logits.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision as float32, all else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
