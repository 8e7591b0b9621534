r"""spred and deep weight factorisation: L2 decay of the factors is an L1-like penalty on the weights.

.. math:: \min_{f_1 \odot \dots \odot f_D = W} \tfrac1D \sum_d \|f_d\|_2^2 = \sum_i |W_i|^{2/D}

so two factors give the L1 norm, and more of them a penalty that is not convex.

References: Ziyin and Wang, *spred: Solving L1 Penalty with SGD*, 2023 (two factors). Kolb et al., *Deep Weight
Factorization: Sparse Learning Through the Lens of Artificial Symmetries*, arXiv 2502.02496, 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.factored import Factored
from horst.operators import Operator


class DeepFactors(Factored):
    r"""Each weight as a product of ``depth`` factors with decay; two factors are spred.

    With three or more factors a weight that reaches zero may stay there: the gradient of each factor is then zero too.

    Args:
        params: Parameters or groups, as for any torch optimizer. Each product begins as the weight itself.
        lr: Learning rate.
        weight_decay: Decoupled decay of every factor. In gradient descent it is the gradient of the penalty
            :math:`\frac{D}{2} \lambda \sum_i |W_i|^{2/D}`: for two factors, an L1 penalty of this strength.
        operator: Operator that steps the factors; None is Adam.
        depth: Number of factors, at least 2.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
        >>> optimizer = DeepFactors([weight], lr=0.01, weight_decay=0.1, depth=3)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["factors"].shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        operator: Operator | None = None,
        *,
        depth: int = 2,
    ) -> None:
        if depth < 2:
            raise ValueError(f"depth must be at least 2, got {depth}. A weight of one factor needs no factorisation.")
        super().__init__(params, lr, weight_decay, operator, depth=depth)

    def _constants(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        scale = p.square().mean().sqrt() ** (1 / group["depth"])
        return {"scale": torch.where(scale == 0, torch.ones_like(scale), scale)}

    def _split(self, theta: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        # Factors that are equal up to sign, weight by weight, would stay so under Adam, and no weight could change its
        # sign. So all but one start the same everywhere, at the scale that makes the factors alike on the whole.
        scale, others = state["scale"], group["depth"] - 1
        return torch.stack([theta / scale**others, *[scale.expand_as(theta)] * others])

    @torch.no_grad()
    def draw(self, smallest: float = 3e-3) -> None:
        r"""Draw all factors anew, as deep weight factorisation begins; the weights become their products.

        Each factor is normal with variance :math:`\sigma^{2/D}`, where :math:`\sigma` is the standard deviation of the
        tensor, drawn again until :math:`\epsilon^{1/D} < |f| < \min(1, (2 \sigma)^{1/D})`.

        Args:
            smallest: Lower limit :math:`\epsilon` of a product of factors; the paper's code does not tell. At most half
                a standard deviation is used.

        Example:
            >>> weight = torch.nn.Parameter(torch.randn(100, 100) * 0.1)
            >>> DeepFactors([weight], depth=4).draw()
            >>> bool(weight.abs().max() < 0.2)
            True
        """
        for group in self.param_groups:
            for p in group["params"]:
                sigma, root = float(p.std(correction=0)) if p.numel() else 0.0, 1 / group["depth"]
                if sigma:
                    factors = self._state_of(p, group)["factors"]
                    low, high = min(smallest, sigma / 2) ** root, min(1.0, (2 * sigma) ** root)
                    _fill_truncated(factors, sigma**root, low, high)
                    p.copy_(factors.prod(0))


def _fill_truncated(factors: Tensor, scale: float, low: float, high: float) -> None:
    """Normal numbers of standard deviation ``scale``, drawn again where their size is not between the limits."""
    if not low < high:
        raise ValueError(f"no factor lies between {low:.3g} and {high:.3g}: the weights are too large to be drawn so.")
    missing = torch.ones_like(factors, dtype=torch.bool)
    while bool(missing.any()):
        factors.copy_(torch.where(missing, torch.randn_like(factors) * scale, factors))
        missing = (factors.abs() <= low) | (factors.abs() >= high)
