"""Scion: steps towards the corner of a norm ball, its own norm for matrices and for the head.

References: Pethick et al., *Training Deep Learning Models with Norm-Constrained LMOs*, arXiv 2502.07529, 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.per_parameter import PerParameter
from horst.operators import LInf, Norm, Spectral, Steepest


class Scion(PerParameter):
    r"""A convex combination of the weight and the point of a norm ball that the momentum points away from.

    .. math::
        m_k = (1 - \mu)\, m_{k-1} + \mu\, g_k, \quad
        \theta_{k+1} = (1 - \eta)\, \theta_k - \eta \rho\, s \arg\max_{\|d\| \le 1} \langle m_k, d \rangle

    where :math:`\eta, \mu, \rho` are ``lr``, ``momentum``, ``radius``. In a group with ``sign=False`` the norm is the
    spectral one and :math:`s = \sqrt{n_{out} / n_{in}}`: every step has spectral norm :math:`\eta \rho s`, but for the
    share that a gradient without full rank leaves out. With ``sign=True``, for embeddings and heads, it is the
    largest entry, and :math:`s = 1 / n_{in}`. Weights stay within the ball, which takes the place of weight decay.

    The argmax comes from a singular value decomposition: exact, and slow for matrices of many thousands of columns.

    Args:
        params: Parameters or groups of matrices, stored as (outputs, inputs).
        lr: Learning rate.
        momentum: Share of the new gradient in the momentum; 1 has no memory.
        radius: Radius of the ball: 50 for matrices in the blocks, 3000 for the head.
        sign: Whether the norm is the largest entry.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Scion([weight], lr=0.01, radius=50.0)
        >>> weight.grad = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> optimizer.step()
        >>> weight.detach().round(decimals=4) + 0.0
        tensor([[-0.5000,  0.0000],
                [ 0.0000, -0.5000]])
    """

    def __init__(
        self, params: ParamsT, lr: float = 2.0**-12, *, momentum: float = 0.1, radius: float = 50.0, sign: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "radius": radius, "sign": sign})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() != 2:
                self.param_groups.pop()
                raise ValueError(f"Scion steps matrices, got shape {tuple(p.shape)}. Give vectors to AdamW.")

    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(p)}

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        momentum = state["momentum_buffer"].lerp_(g, group["momentum"])
        outputs, inputs = p.shape
        norm: Norm = LInf() if group["sign"] else Spectral()
        scale = 1 / inputs if group["sign"] else (outputs / inputs) ** 0.5
        corner = group["radius"] * scale * Steepest(norm)(p, momentum)
        p.mul_(1 - group["lr"]).sub_(group["lr"] * corner)
