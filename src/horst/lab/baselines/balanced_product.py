r"""PILoT and Sign-In: weights as :math:`m \odot w` with :math:`m^2 - w^2 = 1`, whose geometry moves from L2 to L1.

Under gradient flow the product follows a mirror flow of the hyperbolic entropy with
:math:`\gamma = (m^2 - w^2) / 2`. The flow keeps :math:`m^2 - w^2`, decay of both factors makes it vanish, and with it
:math:`\gamma`: weights then move as in an L1 geometry, and stop at zero instead of changing their sign.

References: Jacobs and Burkholz, *Mask in the Mirror: Implicit Sparsification*, arXiv 2408.09966, 2024 (PILoT).
Gadhikar et al., *Sign-In to the Lottery: Reparameterizing Sparse Training*, arXiv 2504.12801, 2025.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.factored import Factored
from horst.operators import Operator
from horst.optimizers.hyperparameters import check_number


def balanced_factors(theta: Tensor) -> Tensor:
    r"""The factors with product ``theta`` and :math:`m^2 - w^2 = 1`, stacked.

    .. math:: m^2 = \tfrac12 (1 + \sqrt{1 + 4 \theta^2}), \quad w = \theta / m

    Example:
        >>> balanced_factors(torch.tensor([0.0, 1.0])).square()
        tensor([[1.0000, 1.6180],
                [0.0000, 0.6180]])
    """
    m = ((1 + torch.hypot(torch.ones_like(theta), 2 * theta)) / 2).sqrt()
    return torch.stack((m, theta / m))


class PILoT(Factored):
    r"""Weights :math:`m \odot w` with a decay that changes during training.

    .. math::
        \min_{m, w} L(m \odot w) + a_k \sum (m^2 + w^2), \quad m_0^2 - w_0^2 = 1

    where :math:`a_0` is ``strength``, for every tensor its own. Each step :math:`a_k` falls by the share ``rate``; with
    a ``target`` it rises by as much while :math:`\|m \odot w\|_1` is above that share of its start.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate.
        operator: Operator that steps the factors; None is Adam. The decay is apart from it, which in gradient descent
            makes no difference.
        strength: First strength of the decay.
        target: Share of the first L1 norm above which the strength rises; None lets it fall all the time.
        rate: Relative change of the strength per step.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
        >>> optimizer = PILoT([weight], lr=0.01, strength=0.1)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> bool((weight < torch.tensor([0.5, -0.5])).all())
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        operator: Operator | None = None,
        *,
        strength: float = 0.1,
        target: float | None = None,
        rate: float = 0.01,
    ) -> None:
        if target is not None:
            check_number("target", target, "use None for a strength that only falls")
        super().__init__(params, lr, 0.0, operator, strength=strength, target=target, rate=rate)

    def _constants(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        first = p.abs().sum()
        return {"strength": torch.full_like(first, group["strength"]), "first_l1_norm": first}

    def _split(self, theta: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        return balanced_factors(theta)

    def _decay(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> float | Tensor:
        a, rises = state["strength"], torch.zeros_like(state["strength"])
        if group["target"] is not None:
            rises = (p.abs().sum() > group["target"] * state["first_l1_norm"]).to(a.dtype)
        state["strength"] = a * torch.exp(group["rate"] * (2 * rises - 1))
        return 2 * a + group["weight_decay"]


class SignIn(Factored):
    r"""Weights :math:`m \odot w` that are brought back to :math:`m^2 - w^2 = 1` now and then, which lets signs flip.

    Every ``every`` steps the factors are split anew; the weights stay as they are. Between the resets both factors step
    and decay by themselves. Use it with masks, of :class:`horst.sparsity.ACDC`, :class:`horst.sparsity.RigL` or random
    ones given to :class:`horst.sparsity.Static`.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate.
        weight_decay: Decoupled decay of both factors.
        operator: Operator that steps the factors; None is Adam.
        every: Number of steps from one reset to the next.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.5, -0.5]))
        >>> optimizer = SignIn([weight], lr=0.01, every=10)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> bool((weight < torch.tensor([0.5, -0.5])).all())
        True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        operator: Operator | None = None,
        *,
        every: int = 100,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}. For no reset give a number beyond the last step.")
        super().__init__(params, lr, weight_decay, operator, every=every)

    def _split(self, theta: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        return balanced_factors(theta)

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        super()._update(p, g, state, group)
        due = state["step"] % group["every"] == 0
        # p stays as it is: the product of the new factors differs from it by rounding
        state["factors"] = torch.where(due, balanced_factors(p), state["factors"])
