"""Attention of one new token to a cache of keys and values: the cost is that of reading the places in use.

``reference.py`` holds the formula, ``triton.py`` the kernel, ``operator.py`` makes it one operator of torch.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from horst.kernels.decode_attention.operator import KERNEL_DTYPES
from horst.kernels.decode_attention.reference import decode_attention_reference
from horst.kernels.trial import gives

__all__ = ["KERNEL_DTYPES", "decode_attention", "decode_attention_reference", "runs_right", "why_not_decoded"]


def why_not_decoded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> str | None:
    """What is wrong with these tensors for :func:`decode_attention`, or None. Dynamo sees through it.

    Example:
        >>> query, cache = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 5, 8)
        >>> why_not_decoded(query, cache, cache, torch.ones(1, 1, 2, 5, dtype=torch.bool))
        'query must be texts x heads x 1 x size, got shape (1, 4, 2, 8)'
    """
    if query.dim() != 4 or query.shape[2] != 1:
        return f"query must be texts x heads x 1 x size, got shape {tuple(query.shape)}"
    batch, heads, _, size = query.shape
    kv_heads, length = key.shape[1:3] if key.dim() == 4 else (0, 0)
    if key.shape != value.shape or key.shape != (batch, kv_heads, length, size) or 0 in key.shape:
        return (
            f"key and value must both be {batch} texts x heads x length x size {size}, with at least one place, got "
            f"shapes {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if heads % kv_heads:
        return f"query heads must be a multiple of key heads, got {heads} and {kv_heads}"
    if mask.dtype != torch.bool or mask.dim() != 4:
        return f"mask must be bool with 4 dimensions, got {mask.dtype} with {mask.dim()}"
    if mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, 1, length):
        return f"mask must be of shape ({batch} or 1, 1, 1, {length}), got {tuple(mask.shape)}"
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        return f"query, key and value must be of one float dtype, got {query.dtype}, {key.dtype} and {value.dtype}"
    if not query.device == key.device == value.device == mask.device:
        return f"all tensors must be on one device, got {query.device}, {key.device}, {value.device} and {mask.device}"
    return None


def decode_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    r"""Attention of one query per head to the used places of a cache, by the kernel where it runs.

    .. math::
        p_h &= \mathrm{softmax}_{j : \mathrm{used}}(s\, q_h \cdot k_{gj}) \\
        o_h &= \sum_{j : \mathrm{used}} p_{hj} v_{gj}

    where :math:`q, k, v, s` are ``query``, ``key``, ``value``, ``scale``, and :math:`g` is the key head that query head
    :math:`h` shares with its neighbours. What lies in unused places does not matter, NaN included. Sums are in float32,
    in an order that does not change. There is no gradient.

    Args:
        query: Queries, texts x heads x 1 x size.
        key: Keys, texts x key heads x length x size. Query heads are a multiple of key heads.
        value: Values, of the shape of the keys.
        mask: Which places are used, texts (or 1) x 1 x 1 x length in bool. At least one place of each text is in use;
            else the result is NaN.
        scale: Factor of the products of queries and keys.

    Returns:
        Weighted values, texts x heads x 1 x size, in the dtype of the query.

    Example:
        >>> query, key = torch.ones(1, 2, 1, 1), torch.tensor([0.0, 0.0, 7.0]).view(1, 1, 3, 1)
        >>> value = torch.tensor([1.0, 3.0, 100.0]).view(1, 1, 3, 1)
        >>> mask = torch.tensor([True, True, False]).view(1, 1, 1, 3)
        >>> decode_attention(query, key, value, mask, scale=1.0).flatten()
        tensor([2., 2.])
    """
    if (reason := why_not_decoded(query, key, value, mask)) is not None:
        raise ValueError(f"{reason}. For other attention use torch.nn.functional.scaled_dot_product_attention.")
    out: Tensor = torch.ops.horst.decode_attention(query, key, value, mask, scale)
    return out


@functools.cache
@torch.no_grad()
def runs_right(group: int, size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`decode_attention` runs on a device and gives the numbers of the formula, up to rounding.

    It is found out once, on two small texts. Where the answer is no, the log has the reason.

    Args:
        group: Number of queries that share a key head.
        size: Size of a head.
        dtype: Dtype of queries, keys and values.
        device: Device that they are on.

    Example:
        >>> runs_right(1, 64, torch.float64, torch.device("cpu"))  # no kernel
        False
    """
    if dtype not in KERNEL_DTYPES:
        return False
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((2, 2 * group, 1, size), (2, 2, 200, size), (2, 2, 200, size))
    query, key, value = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)
    mask = (torch.arange(200, device=device) < torch.tensor([[70], [200]], device=device))[:, None, None]
    scale = size**-0.5
    return gives(
        "the kernel for decoding attention",
        lambda: decode_attention(query, key, value, mask, scale),
        lambda: decode_attention_reference(query.float(), key.float(), value.float(), mask, scale),
    )
