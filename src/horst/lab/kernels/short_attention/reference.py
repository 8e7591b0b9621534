"""Attention as the formula reads, in whatever precision it is given."""

from __future__ import annotations

import math

from torch import Tensor


def short_attention_reference(qkv: Tensor, heads: int) -> Tensor:
    """See :func:`horst.lab.kernels.short_attention.short_attention`."""
    q, k, v = split_heads(qkv, heads)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    return (scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each ``(batch, heads, tokens, head width)``: views."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q, k, v
