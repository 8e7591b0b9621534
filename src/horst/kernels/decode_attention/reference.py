"""Attention of one new token to a cache, as the formula has it."""

from __future__ import annotations

import torch
from torch import Tensor


def decode_attention_reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    r"""Values of the used places, weighted by how well their keys match the query.

    .. math::
        p_h &= \mathrm{softmax}_{j : \mathrm{used}}(s\, q_h \cdot k_{gj}) \\
        o_h &= \sum_{j : \mathrm{used}} p_{hj} v_{gj}

    where :math:`q, k, v, s` are ``query``, ``key``, ``value``, ``scale``, and :math:`g` is the key head of query head
    :math:`h`. Sums are in float32, or in float64 for inputs in float64. What lies in unused places does not matter,
    also where it is infinite or NaN.
    """
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    groups = query.to(wide).unflatten(1, (key.shape[1], -1)).squeeze(3)  # texts x key heads x queries x size
    scores = scale * groups @ key.to(wide).transpose(2, 3)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=3)
    used_values = value.to(wide).masked_fill(~mask.transpose(2, 3), 0)
    return (weights @ used_values).reshape(query.shape).to(query.dtype)
