"""The mirror step with a bound on the metric: exponential for small weights, linear for large ones.

The entropy's metric is ``|theta|``: a weight that keeps being pushed outwards grows exponentially, and a few such
weights ruin a run whose ``alpha * lr`` is large. Here the metric is ``min(|theta|, max_scale)``. Its mirror map is the
logarithm below ``max_scale`` and its tangent above,

    phi(r) = log(r) for r < 1,  r - 1 for r >= 1,      r = |theta| / max_scale,

and a step adds to ``phi``: ``phi(r_new) = phi(r) + exponent``. Below the bound that is the multiplication by
``exp(exponent)``; above it a weight grows by ``max_scale * exponent`` a step, however large it is. ``max_scale`` of
None is the paper's step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bounded_mirror_reference(theta: Tensor, exponent: Tensor, max_scale: float | None) -> Tensor:
    """The step through the mirror map and back.

    Example:
        >>> theta = torch.tensor([0.1, 4.0], dtype=torch.float64)
        >>> bounded_mirror_reference(theta, torch.tensor([0.5, 0.5], dtype=torch.float64), max_scale=2.0)
        tensor([0.1649, 5.0000], dtype=torch.float64)
    """
    if max_scale is None:
        return theta * torch.exp(exponent)
    r = theta.abs() / max_scale
    y = torch.where(r < 1, r.log(), r - 1) + exponent
    return theta.sign() * max_scale * torch.where(y < 0, y.exp(), 1 + y)


def bounded_mirror(theta: Tensor, exponent: Tensor, max_scale: float) -> Tensor:
    """The same in two thirds of the passes, and to the last bit ``theta * exp(exponent)`` where the bound is far."""
    grown = theta * torch.exp(exponent)
    r = theta.abs() / max_scale
    y = torch.where(r < 1, r.log(), r - 1) + exponent
    beyond = theta.sign() * max_scale * torch.where(y < 0, y.exp(), 1 + y)
    return torch.where((r < 1) & (y < 0), grown, beyond)
