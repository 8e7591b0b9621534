"""MADAM: Adam's normalised gradient in a multiplicative update.

References: Bernstein et al., *Learning compositional functions via multiplicative weight updates*, 2020. Written from
the formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.per_parameter import PerParameter


class Madam(PerParameter):
    r"""Weights change by a factor along the normalised gradient, and no sign ever changes.

    .. math::
        v_k &= \beta v_{k-1} + (1 - \beta)\, g_k^2, \quad \hat v_k = v_k / (1 - \beta^k) \\
        d_k &= \mathrm{clip}(g_k / \sqrt{\hat v_k},\, \pm c) \\
        \theta_{k+1} &= \mathrm{clip}(\theta_k \odot \exp(-\eta\, \mathrm{sign}(\theta_k) \odot d_k),\, \pm b\, \sigma)

    where :math:`\eta, \beta, c, b` are ``lr``, ``beta2``, ``clip``, ``bound`` and :math:`\sigma` is the root mean
    square of the tensor before the first step. A weight moves by at most a factor of :math:`e^{\eta c}`, so
    one learning rate fits many networks. A zero weight stays zero: give it no biases that start at zero.

    The step is the exact dual step of the entropy, ``Mirror(Entropy())``, along :math:`d_k`.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate; relative, so larger than Adam's.
        beta2: Decay rate of the average of the squares.
        clip: Limit of the normalised gradient.
        bound: Limit of the weights, in root mean squares of their start; a tensor that starts at zero has none.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> optimizer = Madam([weight], lr=0.1)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.9048, -1.1052])
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.01, *, beta2: float = 0.999, clip: float = 10.0, bound: float = 3.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta2": beta2, "clip": clip, "bound": bound})

    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {"exp_avg_sq": torch.zeros_like(p), "rms": p.square().mean().sqrt()}

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        v = state["exp_avg_sq"].mul_(group["beta2"]).addcmul_(g, g, value=1 - group["beta2"])
        # in float64: in float32 the difference loses four digits at the first steps
        root = (v / (1 - group["beta2"] ** state["step"].double())).sqrt()
        # an entry that never saw a gradient is 0 / 0: its direction is 0
        d = torch.where(root == 0, 0.0, g / root).clamp(-group["clip"], group["clip"])
        p.mul_(torch.exp(-group["lr"] * p.sign() * d))
        limit = group["bound"] * state["rms"]
        p.clamp_(min=-limit, max=limit)
