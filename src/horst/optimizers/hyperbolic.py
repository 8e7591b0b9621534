"""Adam in the geometry of the hyperbolic entropy: HORST's smooth relative, in one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from horst.optimizers.hyperparameters import check_number

__all__ = ["HyperbolicAdam", "hyperbolic_step"]


class HyperbolicAdam(Optimizer):
    r"""AdamW whose step is taken in the dual coordinates of the hyperbolic entropy.

    With :math:`d_k = \hat m_k / (\sqrt{\hat v_k} + \epsilon)`, Adam's bias-corrected direction,

    .. math::
        \theta_{k+1} = \gamma \sinh\bigl(\mathrm{arcsinh}(\theta_k / \gamma) - \alpha \eta\, d_k\bigr)
            - \eta \lambda\, \theta_k, \qquad \gamma = 1 / \alpha

    where :math:`\eta, \lambda, \epsilon, \alpha` are ``lr``, ``weight_decay``, ``eps``, ``alpha``. To first order a
    weight moves by :math:`\eta \sqrt{1 + \alpha^2 \theta^2}\, d`, where :class:`horst.HORST` moves it by
    :math:`\eta (1 + \alpha |\theta|)\, d`: the two have the same two hyperparameters. Signs may change, and a zero
    weight moves as in AdamW, which is the limit ``alpha=0``.

    Every option is a group's own and is read at each step, so a schedule can change ``alpha``, and with it
    :math:`\gamma`, while training.

    Args:
        params: Parameters or groups, as for any torch optimizer. Each option may differ by group.
        lr: Learning rate.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, as in AdamW.
        alpha: One over :math:`\gamma`, the size of a weight at which the geometry turns from flat to multiplicative.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        >>> optimizer = HyperbolicAdam([weight], lr=0.1, alpha=5.0, weight_decay=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.5962, -0.1042])

    References: HORST, Example 3.10 (the potential) and Section 3.2 (the exact dual step).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        alpha: float = 5.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "alpha": alpha})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with hyperparameters of its own if wished. Nothing changes on an error."""
        group = {**self.defaults, **param_group}
        if not isinstance(group["lr"], Tensor):
            check_number("lr", group["lr"], "1e-3 is AdamW's default")
        check_number("eps", group["eps"], "1e-8 is AdamW's default")
        check_number("weight_decay", group["weight_decay"], "use 0 for no decay")
        check_number("alpha", group["alpha"], "use 0 for plain AdamW")
        for i, b in enumerate(group["betas"]):
            if not 0.0 <= b < 1.0:  # this form refuses NaN too
                raise ValueError(f"betas[{i}] must lie in [0, 1), got {b!r}.")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)
        return loss

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if grad.layout is not torch.strided:
            raise RuntimeError(f"HyperbolicAdam needs dense gradients, got {grad.layout}. Use sparse=False.")
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # a bfloat16 counter stops at 256
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        step = int(state["step"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        u = state["exp_avg"] / root * (group["lr"] / (1 - beta1**step))
        decay = p * (group["lr"] * group["weight_decay"])
        p.copy_(hyperbolic_step(p, u, group["alpha"]).sub_(decay))


def hyperbolic_step(theta: Tensor, u: Tensor, alpha: float) -> Tensor:
    r"""The exact dual step of the hyperbolic entropy with :math:`\gamma = 1 / \alpha`, along ``u`` (``lr`` included).

    .. math::
        \gamma \sinh(\mathrm{arcsinh}(\theta / \gamma) - \alpha u) = \theta \odot e^{-\alpha\, \mathrm{sign}(\theta) u}
            - \frac{\sinh(\alpha u)}{\alpha\, (\sqrt{1 + \alpha^2 \theta^2} + \alpha |\theta|)}

    The right-hand side is computed: HORST's multiplicative step and an additive one that fades as the weight grows.
    Nothing in it overflows or cancels for large :math:`\theta / \gamma`.

    Args:
        theta: Weights.
        u: The step that a flat geometry would take; ``alpha=0`` takes it.
        alpha: At least 0.

    Example:
        >>> hyperbolic_step(torch.tensor([3.0, 0.0]), torch.tensor([0.1, 0.1]), 0.0)
        tensor([ 2.9000, -0.1000])
    """
    if alpha == 0:
        return theta - u
    scaled = alpha * theta
    additive = torch.sinh(alpha * u) / (alpha * (torch.hypot(scaled, torch.ones_like(scaled)) + scaled.abs()))
    return theta * torch.exp(-alpha * theta.sign() * u) - additive
