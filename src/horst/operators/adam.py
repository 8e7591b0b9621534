"""Adam as an operator, the practical stand-in for the sign operator of Example 3.5, with its memory made explicit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from horst.operators.base import Operator, State, check_shapes


@final
@dataclass(frozen=True)
class Adam(Operator):
    r"""Adam's direction, without its learning rate.

    .. math::
        m_k &= \beta_1 m_{k-1} + (1 - \beta_1)\, g_k \\
        v_k &= \beta_2 v_{k-1} + (1 - \beta_2)\, g_k^2 \\
        A(\theta_k, g_k) &= \hat m_k / (\sqrt{\hat v_k} + \epsilon), \quad
            \hat m_k = m_k / (1 - \beta_1^k), \quad \hat v_k = v_k / (1 - \beta_2^k)

    where :math:`\beta_1, \beta_2` are ``betas`` and :math:`\epsilon` is ``eps``. The state holds :math:`m, v, k` under
    torch's names ``exp_avg``, ``exp_avg_sq``, ``step``. ``Mirror(Entropy()) @ Adam()`` is the paper's Exp-Adam,
    ``Adam() @ Mirror(Entropy())`` its Adam-Exp.

    Args:
        betas: Decay of the two averages, each in [0, 1).
        eps: Constant added to the root, at least 0.

    Example:
        >>> adam, theta = Adam(), torch.zeros(2)
        >>> direction, state = adam.update(theta, torch.tensor([10.0, -0.1]), adam.init(theta))
        >>> direction.round(decimals=5)
        tensor([ 1., -1.])
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    is_stateful = True

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}. The usual ones are (0.9, 0.999).")
        if not self.eps >= 0:
            raise ValueError(f"eps must be at least 0, got {self.eps}.")

    def init(self, theta: Tensor) -> State:
        """Zero averages, no step taken."""
        return {
            # float32 whatever theta is: a bfloat16 counter stops at 256.
            "step": torch.zeros((), dtype=torch.float32, device=theta.device),
            "exp_avg": torch.zeros_like(theta),
            "exp_avg_sq": torch.zeros_like(theta),
        }

    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """The bias-corrected direction and the new averages."""
        check_shapes(theta, g)
        missing = {"step", "exp_avg", "exp_avg_sq"} - state.keys()
        if missing:
            raise ValueError(f"Adam's state lacks {sorted(missing)}. Start from state = operator.init(theta).")
        beta1, beta2 = self.betas
        step = state["step"] + 1
        m = beta1 * state["exp_avg"] + (1 - beta1) * g
        v = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
        m_hat = m / _bias_correction(beta1, step, m.dtype)
        v_hat = v / _bias_correction(beta2, step, v.dtype)
        # With eps = 0 an entry that never saw a gradient is 0 / 0: its direction is 0, as sign(0) is.
        direction = torch.where(m_hat == 0, torch.zeros_like(m_hat), m_hat / (v_hat.sqrt() + self.eps))
        return direction, {"step": step, "exp_avg": m, "exp_avg_sq": v}


def _bias_correction(beta: float, step: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - beta**step, without the cancellation that costs float32 four digits at the first steps."""
    k = step.to(torch.promote_types(dtype, torch.float32))
    return (torch.ones_like(k) if beta == 0 else -torch.expm1(k * math.log(beta))).to(dtype)
