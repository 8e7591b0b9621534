r"""Attention over few tokens: a head's scores fit on chip, so one program computes a head, forwards or backwards.

.. math::
    O = \mathrm{softmax}\!\left(Q K^\top / \sqrt d\right) V

Kernels for long sequences walk over tiles, keep running maxima and sum gradients over programs. For 64 tokens, an image
of 32 x 32 in patches of 4, that is most of what they do. Here queries, keys and values are read where the projection
wrote them, their gradients are written where its backward pass reads them, and the backward pass computes the scores
again instead of keeping anything. ``reference.py`` holds the formula, ``triton.py`` the kernels.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from horst.kernels.backends import runs_kernels
from horst.lab.kernels.short_attention.reference import short_attention_reference, split_heads

__all__ = ["MAX_HEAD_WIDTH", "MAX_TOKENS", "short_attention", "short_attention_reference"]

MAX_TOKENS = 128  # the scores of a head are a tile of 128 x 128 in registers
MAX_HEAD_WIDTH = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_TILE = 16_384  # bytes of a head's queries: four such tiles are on chip at a time, and 64 KiB all GPUs have


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Attention of every token to every other, from queries, keys and values side by side.

    On a CUDA device the kernels of this package compute it: in half precision unless both the tokens and the width of a
    head are above 64, in float32 if neither is. Elsewhere, and in a model that is exported, PyTorch's
    ``scaled_dot_product_attention`` does. Both are differentiable once. Under the transforms of ``torch.func`` and in
    forward mode the plain formula computes it, which knows every derivative.

    Args:
        qkv: ``(batch, tokens, 3 * width)``: the output of one projection, queries before keys before values, each
            ``heads`` heads wide.
        heads: Number of heads, a divisor of ``width``.

    Returns:
        ``(batch, tokens, width)``, of the same dtype, under autocast too.

    Example:
        >>> short_attention(torch.zeros(2, 4, 3 * 8), heads=2).shape
        torch.Size([2, 4, 8])
    """
    if not isinstance(heads, int):
        raise TypeError(f"heads must be an int, got {heads!r}.")
    if not qkv.is_floating_point():
        raise TypeError(f"qkv must be of a floating-point dtype, got {qkv.dtype}.")
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ValueError(
            f"qkv must be (batch, tokens, 3 * width) with a width that {heads} heads can share, got {tuple(qkv.shape)}."
        )
    tokens, head_width = qkv.shape[1], qkv.shape[2] // (3 * heads)
    if not (0 < tokens <= MAX_TOKENS and 0 < head_width <= MAX_HEAD_WIDTH):
        raise ValueError(
            f"short attention is for at most {MAX_TOKENS} tokens and heads at most {MAX_HEAD_WIDTH} wide, got {tokens} "
            f"and {head_width}. Use scaled_dot_product_attention, or attention='fused' in a DeiTConfig."
        )
    # A custom operator has no rules for torch.func and no forward-mode derivative, which torch then takes for zero.
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    # Not is_exporting(): the Dynamo of 2.11 takes it for true under torch.compile too.
    exporting = torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None
    rows, columns = (64 if n <= 64 else 128 for n in (tokens, head_width))
    fits = qkv.dtype in _DTYPES and rows * columns * qkv.element_size() <= _MAX_TILE
    if fits and runs_kernels(qkv) and not transformed and not exporting:
        return _forward(qkv.contiguous(), heads)
    autocast = not qkv.is_meta and torch.is_autocast_enabled(qkv.device.type)
    with torch.autocast(qkv.device.type, enabled=False) if autocast else contextlib.nullcontext():
        if transformed:
            return short_attention_reference(qkv, heads)
        return F.scaled_dot_product_attention(*split_heads(qkv, heads)).transpose(1, 2).flatten(2)


@torch.library.custom_op("horst::short_attention", mutates_args=())
def _forward(qkv: Tensor, heads: int) -> Tensor:
    from horst.lab.kernels.short_attention.triton import launch_forward

    return launch_forward(qkv, heads)


@torch.library.custom_op("horst::short_attention_backward", mutates_args=())
def _backward(grad: Tensor, qkv: Tensor, heads: int) -> Tensor:
    from horst.lab.kernels.short_attention.triton import launch_backward

    return launch_backward(grad, qkv, heads)


@_forward.register_fake
def _(qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@_backward.register_fake
def _(grad: Tensor, qkv: Tensor, heads: int) -> Tensor:
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return _backward(grad.contiguous(), qkv, ctx.heads), None


_forward.register_autograd(_gradient, setup_context=_keep)


def _refuse(ctx: Any, grad: Tensor) -> NoReturn:
    raise RuntimeError(
        "short attention is differentiable once. For second derivatives use short_attention_reference, or "
        "attention='matmul' in a DeiTConfig."
    )


_backward.register_autograd(_refuse)
