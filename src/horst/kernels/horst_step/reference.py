"""Algorithms 1 (HAM) and 2 (HORST) of the paper, one step each, written as the paper writes them.

Out of place, in the dtype and the shape they are given (leading dimensions are a batch), with no regard for speed:
every fast path is tested against these in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horst.kernels.horst_step.operands import HAM_MAX_EXPONENT
from horst.kernels.soft_threshold import soft_threshold_reference


def horst_step_reference(
    theta: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: float | Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    alpha: float,
    beta: float,
    l1: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""One step of Algorithm 2: AdamW, then the entropy mirror step along the same direction.

    .. math::
        u_k &= \eta\, \hat m_k / (\sqrt{\hat v_k} + \epsilon) \\
        \theta_{k+1/2} &= \theta_k - u_k - \eta \lambda\, \theta_k \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda, \epsilon, \alpha, \beta` are ``lr``, ``weight_decay``, ``eps``, ``alpha``, ``beta``.

    Args:
        step: Number of this step, counted from 1.
        l1: Strength of the soft threshold ``lr * l1`` that ends the step; 0, as in the paper, disables it.

    Returns:
        The new ``theta``, ``m`` and ``v``.
    """
    u, m, v = _adam(g, m, v, step, lr, beta1, beta2, eps)
    theta_half = theta - u - lr * weight_decay * theta
    theta = theta_half * torch.exp(-alpha * theta_half.sign() * u - lr * beta)
    return soft_threshold_reference(theta, lr * l1) if l1 else theta, m, v


def ham_step_reference(
    theta: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: float | Tensor,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    alpha: float,
    beta: float,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""One step of Algorithm 1: AdamW, then the entropy mirror step along the raw gradient.

    .. math::
        \theta_{k+1/2} &= \theta_k - \mathrm{Adam}(g_k, \eta) - \eta \lambda\, \theta_k \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\eta\, (\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot g_k + \beta))

    with the symbols of :func:`horst_step_reference`.
    """
    u, m, v = _adam(g, m, v, step, lr, beta1, beta2, eps)
    theta_half = theta - u - lr * weight_decay * theta
    exponent = -lr * (alpha * theta_half.sign() * g + beta)
    return theta_half * torch.exp(exponent.clamp(-HAM_MAX_EXPONENT, HAM_MAX_EXPONENT)), m, v


def _adam(
    g: Tensor, m: Tensor, v: Tensor, step: float | Tensor, lr: float | Tensor, beta1: float, beta2: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam's step at rate lr (the paper's Adam(g, eta)), and its new moments."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = lr * (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
    return u, m, v
