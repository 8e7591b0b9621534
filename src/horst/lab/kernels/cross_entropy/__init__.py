r"""Cross-entropy and its gradient in one pass over the logits, in their own memory.

.. math::
    \ell_i = \log \sum_v e^{z_{iv}} - z_{i y_i}, \qquad
    \partial_{z_{iv}} \ell_i = \frac{e^{z_{iv}}}{\sum_w e^{z_{iw}}} - [v = y_i]

A language model's logits are its largest tensor. What a compiler makes of the formula reads them twice and writes the
gradient beside them; here they are read once and overwritten. ``reference.py`` holds the formula, ``triton.py`` the
kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horst.kernels.backends import runs_kernels
from horst.lab.kernels.cross_entropy.reference import IGNORED, at_least_float32, losses_and_gradient_reference

__all__ = ["IGNORED", "at_least_float32", "losses_and_gradient_", "losses_and_gradient_reference"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def losses_and_gradient_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy, in float32 or better, and the gradient of their sum, in the dtype of the logits.

    Args:
        logits: ``(rows, vocabulary)``. On a CUDA device they are overwritten: the gradient has their memory.
        targets: ``(rows,)`` of int64. Rows whose target is :data:`IGNORED` have neither loss nor gradient. The loss of
            a target outside the vocabulary is NaN on a CUDA device; elsewhere it raises.

    Example:
        >>> losses, gradient = losses_and_gradient_(torch.zeros(2, 2), torch.tensor([0, IGNORED]))
        >>> losses, gradient
        (tensor([0.6931, 0.0000]), tensor([[-0.5000,  0.5000],
                [ 0.0000,  0.0000]]))
    """
    if runs_kernels(logits) and logits.dtype in _DTYPES and logits.numel():
        logits = logits.contiguous()
        return _in_place(logits, targets.contiguous()), logits
    return losses_and_gradient_reference(logits, targets)


@torch.library.custom_op("horst::cross_entropy_in_place", mutates_args=("logits",))
def _in_place(logits: Tensor, targets: Tensor) -> Tensor:
    from horst.lab.kernels.cross_entropy.triton import launch

    return launch(logits, targets)


@_in_place.register_fake
def _(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
