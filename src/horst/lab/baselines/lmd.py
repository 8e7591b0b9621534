"""LMD, log-normal multiplicative dynamics, without its noise.

References: *Log-Normal Multiplicative Dynamics for Stable Low-Precision Training of Large Networks*,
arXiv 2506.17768, 2025. Its exact pseudo-code is not public. Here is the core that its abstract describes: two positive
parts, the gradient scaled by the part, the sign of the momentum, a decay apart from the momentum. Left out are the
log-normal noise on the parts, its estimate of their spread, and whatever the authors tuned besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.per_parameter import PerParameter


class LMD(PerParameter):
    r"""Exponentiated gradient on two positive parts of each weight, with the sign of a momentum.

    .. math::
        \theta &= a^+ - a^-, \quad
            m^\pm_k = \beta m^\pm_{k-1} \pm (1 - \beta)\, a^\pm_k \odot g_k \\
        a^\pm_{k+1} &= a^\pm_k \odot \exp(-\eta\, (\mathrm{sign}(m^\pm_k) + \lambda))

    where :math:`\eta, \beta, \lambda` are ``lr``, ``momentum``, ``weight_decay``. The parts start with
    :math:`a^+ a^- = \gamma^2`, where :math:`\gamma` is ``gamma``, and stay positive. While the two signs are opposite
    and nothing decays, the step is the exact dual step of ``HyperbolicEntropy(2 * gamma)`` along the sign.

    A weight that something else has changed, a mask for one, is split into parts anew.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate; relative, so larger than Adam's.
        momentum: Decay rate of the momentum.
        weight_decay: Decay of both parts.
        gamma: Size of the parts of a zero weight; below it a weight moves as if it were this large.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.0]))
        >>> optimizer = LMD([weight], lr=0.1, gamma=0.01)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9048, -1.1052, -0.0020])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.02,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        gamma: float = 0.01,
    ) -> None:
        if not gamma > 0:
            raise ValueError(f"gamma must be above 0, got {gamma}: a part of size 0 stays there.")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "gamma": gamma}
        super().__init__(params, defaults)

    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        parts = _split(p, group["gamma"])
        return {"parts": parts, "momentum_parts": torch.zeros_like(parts)}

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        parts, momentum = state["parts"], state["momentum_parts"]
        changed = parts[0] - parts[1] != p
        parts.copy_(torch.where(changed, _split(p, group["gamma"]), parts))
        scaled = parts * torch.stack((g, -g))
        momentum.lerp_(scaled, 1 - group["momentum"])
        parts.mul_(torch.exp(-group["lr"] * (momentum.sign() + group["weight_decay"])))
        p.copy_(parts[0] - parts[1])


def _split(theta: Tensor, gamma: float) -> Tensor:
    """The two positive parts with difference ``theta`` and product ``gamma ** 2``."""
    # The smaller part as a quotient: as a difference of nearly equal numbers it would round to zero.
    larger = (theta.abs() + torch.hypot(theta, torch.full_like(theta, 2 * gamma))) / 2
    smaller = gamma * (gamma / larger)
    return torch.stack((torch.where(theta < 0, smaller, larger), torch.where(theta < 0, larger, smaller)))
