r"""The deep diagonal linear network of Figure 1 (right) and of the proof of Theorem 4.7.

:math:`f(x) = \langle \theta, x \rangle` with :math:`\theta = w_1 \odot \dots \odot w_L`. Gradient flow on the factors,
started balanced, is mirror flow on :math:`\theta`: for L = 2 with the entropy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DiagonalNetwork(nn.Module):
    r"""A linear model whose weights are an elementwise product of factors.

    .. math::
        f(x) = \langle w_1 \odot \dots \odot w_L,\, x \rangle

    where L is ``depth``. Figure 1 has L = 2, :math:`u \odot v`.

    Args:
        n_features: The dimension of x.
        depth: The number of factors, at least 1.
        init: The product at the start: every factor starts at its L-th root (balanced).

    Example:
        >>> model = DiagonalNetwork(3, init=0.25)
        >>> model(torch.ones(2, 3)), model.theta()
        (tensor([0.7500, 0.7500], grad_fn=<MvBackward0>), tensor([0.2500, 0.2500, 0.2500], grad_fn=<ProdBackward1>))
    """

    def __init__(self, n_features: int, depth: int = 2, init: float = 0.01) -> None:
        super().__init__()
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}.")
        if not init > 0:
            raise ValueError(f"init must be positive, got {init}: a balanced start has every factor at its root.")
        self.factors = nn.Parameter(torch.full((depth, n_features), init ** (1 / depth)))

    def theta(self) -> Tensor:
        """The product of the factors: the weights of the linear model."""
        return product(self.factors)

    def forward(self, x: Tensor) -> Tensor:
        """The linear model, ``(..., features)`` to ``(...)``."""
        return x @ self.theta()


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
