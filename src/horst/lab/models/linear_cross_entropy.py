r"""The output layer and its cross-entropy in one, in pieces of a few rows: the logits never exist whole.

A language model's logits are its largest tensor: 128 sequences of 512 tokens and a vocabulary of 50304 are 3.3 billion
numbers. Here a piece's logits live just long enough for its loss and for both gradients, which are taken at once, so
nothing is computed twice: with :math:`p = \mathrm{softmax}(W h)` and the one-hot target :math:`y`,

.. math::
    \partial_{Wh} = p - y, \qquad \partial_h = W^\top (p - y), \qquad \partial_W = (p - y)\, h^\top
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from horst.lab.kernels.cross_entropy import IGNORED, at_least_float32, losses_and_gradient_


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, *, rows: int | None = 8192) -> Tensor:
    """The mean cross-entropy of ``hidden @ weight.T`` against ``targets``, over the targets that are scored.

    Differentiable once. Where every target is ignored it is 0, not NaN, so that a rank without a token to score adds
    nothing to a sum.

    Args:
        hidden: ``(tokens, width)``.
        weight: ``(vocabulary, width)``.
        targets: ``(tokens,)`` of int64; those equal to :data:`IGNORED` are not scored.
        rows: Tokens per piece; None leaves the logits whole, for ``torch.compile`` to fuse what it can. The result is
            the same but for rounding: under autocast the pieces of the weight's gradient are added in float32.

    Example:
        >>> hidden, weight = torch.eye(2), torch.eye(2)
        >>> linear_cross_entropy(hidden, weight, torch.tensor([0, IGNORED]))
        tensor(0.3133)
    """
    if hidden.dim() != 2 or weight.dim() != 2 or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "linear_cross_entropy takes hidden (tokens, width), weight (vocabulary, width) and targets (tokens,), got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}. Flatten batch and sequence."
        )
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}. Use None for all at once.")
    count = (targets != IGNORED).sum().clamp(min=1)
    in_pieces = rows is not None and len(targets) > rows
    if in_pieces and torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        total: Tensor = _ChunkedSum.apply(hidden, weight, targets, rows)
        return total / count
    totals = []
    for h, t in zip(hidden.split(rows), targets.split(rows), strict=True) if in_pieces else ((hidden, targets),):
        logits = at_least_float32(F.linear(h, weight))
        totals.append(F.cross_entropy(logits, t, ignore_index=IGNORED, reduction="sum"))
    return torch.stack(totals).sum() / count


class _ChunkedSum(torch.autograd.Function):
    """The summed loss. The gradients of the sum are made on the way and scaled when the gradient of the loss is known.

    They are of the sum, not of the mean: a gradient divided by 65536 tokens would vanish in float16, whose loss scale
    comes only with the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        total = None
        hidden_grads = []
        weight_grad = None
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = F.linear(h, weight)  # in autocast's dtype, where there is one; so are the other two products
            losses, grad = losses_and_gradient_(logits, t)
            loss = losses.sum()
            hidden_grads.append(grad @ weight)
            piece = at_least_float32(grad.T @ h)
            total = loss if total is None else total + loss
            weight_grad = piece if weight_grad is None else weight_grad + piece
        assert total is not None
        assert weight_grad is not None
        ctx.save_for_backward(torch.cat(hidden_grads), weight_grad)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (hidden_grad * grad_output).to(hidden_dtype), (weight_grad * grad_output).to(weight_dtype), None, None
