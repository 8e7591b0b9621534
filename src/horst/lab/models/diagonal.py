r"""The deep diagonal linear network of Figure 1 (right) and of the proof of Theorem 4.7.

:math:`f(x) = \langle \theta, x \rangle` with :math:`\theta = w_1 \odot \dots \odot w_L`. Gradient flow on the factors,
started balanced, is mirror flow on :math:`\theta`: for L = 2 with the entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(factors: Tensor) -> Tensor:
    """Theta, the product over the factors: ``(..., depth, features)`` to ``(..., features)``."""
    return factors.prod(-2)


def factor_gradients(factors: Tensor, g: Tensor) -> Tensor:
    r"""The gradient in every factor from the gradient in theta: :math:`\partial_{w_i} = g \odot \prod_{j \ne i} w_j`.

    Args:
        factors: ``(..., depth, features)``.
        g: The gradient in theta, ``(..., features)``.

    Example:
        >>> factor_gradients(torch.tensor([[2.0], [3.0]]), torch.tensor([10.0]))
        tensor([[30.],
                [20.]])
    """
    depth = factors.shape[-2]
    # Not theta / w_i: a factor may be zero.
    others = [product(torch.cat([factors[..., :i, :], factors[..., i + 1 :, :]], dim=-2)) for i in range(depth)]
    return g.unsqueeze(-2) * torch.stack(others, dim=-2)
