"""How weights are spread: a histogram on the scale of their own deviation, and what its tails are like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def weight_histogram(
    tensors: Iterable[Tensor], *, limit: float = 8.0, bins: int = 161, nonzero: bool = False
) -> dict[str, Any]:
    """The density of standardised weights: each tensor less its mean and over its deviation, all counted together.

    Args:
        tensors: Weights, each standardised by itself, so that a layer's scale does not pass for a tail.
        limit: The histogram reaches from ``-limit`` to ``limit`` deviations; what lies outside is counted.
        bins: An odd number has a bin around zero.
        nonzero: Leave zeros out, as for the weights that a mask keeps.

    Returns:
        ``edges``, ``density``, ``outside`` (a share), ``near_zero`` (the share within a tenth of a deviation),
        ``kurtosis`` (3 for a Gaussian), ``weights`` (how many).

    Example:
        >>> spread = weight_histogram([torch.randn(100_000, generator=torch.Generator().manual_seed(0))])
        >>> round(spread["kurtosis"], 1), round(spread["near_zero"], 2)
        (3.0, 0.08)
    """
    edges = torch.linspace(-limit, limit, bins + 1, dtype=torch.float64)
    counts = torch.zeros(bins, dtype=torch.float64)
    total, near, fourth = 0, 0, 0.0
    for tensor in tensors:
        x = tensor.detach().flatten().to(torch.float32)
        if nonzero:
            x = x[x != 0]
        if not x.numel():
            continue
        x = (x - x.mean()) / x.std(correction=0).clamp(min=torch.finfo(x.dtype).tiny)
        inside = x[(x >= -limit) & (x < limit)]
        index = ((inside + limit) * (bins / (2 * limit))).long().clamp(max=bins - 1)
        counts += torch.bincount(index, minlength=bins).double().cpu()
        total += x.numel()
        near += int((x.abs() < 0.1).sum())
        fourth += float(x.double().pow(4).sum())
    if not total:
        raise ValueError("there is no weight to count: the tensors are empty, or all zeros.")
    width = 2 * limit / bins
    return {
        "edges": edges.tolist(),
        "density": (counts / total / width).tolist(),
        "outside": 1.0 - float(counts.sum()) / total,
        "near_zero": near / total,
        "kurtosis": fourth / total,
        "weights": total,
    }


@torch.no_grad()
def weight_spread(tensors: Iterable[Tensor], *, nonzero: bool = False) -> dict[str, float]:
    """The largest magnitude, standard deviation and kurtosis of all weights together: where a few have run away.

    Args:
        tensors: Weights, taken as one sample about zero.
        nonzero: Leave zeros out, as for the weights that a mask keeps.

    Example:
        >>> weight_spread([torch.tensor([1.0, -1.0]), torch.tensor([3.0, 0.0])], nonzero=True)["largest"]
        3.0
    """
    x = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    x = x[x != 0] if nonzero else x
    if not x.numel():
        raise ValueError("there is no weight to count: the tensors are empty, or all zeros.")
    variance = x.square().mean()
    return {
        "largest": float(x.abs().max()),
        "std": float(variance.sqrt()),
        "kurtosis": float(x.pow(4).mean() / variance.square()),
    }
