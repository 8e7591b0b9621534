"""HAM, the paper's Algorithm 1: the mirror step along the raw gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.optimizers.mirrored_adam import MirroredAdam

__all__ = ["HAM"]


class HAM(MirroredAdam):
    r"""AdamW, then an entropy-mirror step along the gradient.

    .. math::
        \theta_{k+1/2} &= \theta_k - \mathrm{Adam}(g_k, \eta) - \eta \lambda\, \theta_k \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\eta\, (\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot g_k + \beta))

    where :math:`\eta, \lambda, \alpha, \beta` are ``lr``, ``weight_decay``, ``alpha``, ``beta``. The gradient is what
    ``p.grad`` holds when ``step`` is called: clipped if you clip, unscaled under a GradScaler.

    As in its authors' public code, the mirror step is taken on tensors of two or more dimensions, and its exponent is
    clamped to 5 on both sides. Unlike Adam's step the gradient has no fixed size, so ``alpha`` does not carry over from
    HORST.

    Args:
        alpha: Strength of the mirror step; 200 in its authors' code.
        beta: Decay inside the mirror step; 1e-3 in its authors' code.

    The other arguments are those of :class:`horst.HORST`; HAM has no ``l1``.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = HAM(model.parameters(), lr=1e-3)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()

    References: HORST, Algorithm 1; Jacobs et al., HAM: a hyperbolic step to regulate implicit bias (2025).
    """

    _along_gradient = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        alpha: float = 200.0,
        beta: float = 1e-3,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "beta": beta,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults)

    def _choose_mirrored(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        return [p.ndim >= 2 for p in params]
