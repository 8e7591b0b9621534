"""The second line of Algorithm 2, with the step recovered from the weights before and after it."""

from __future__ import annotations

import torch
from torch import Tensor


def mirror_step_reference(
    theta_half: Tensor,
    theta: Tensor,
    *,
    lr: float,
    weight_decay: float,
    alpha: float,
    beta: float,
) -> Tensor:
    r"""The entropy mirror step along the displacement of the step before.

    .. math::
        u_k &= (1 - \eta \lambda)\, \theta_k - \theta_{k+1/2} \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda, \alpha, \beta` are ``lr``, ``weight_decay``, ``alpha``, ``beta``, and
    :math:`\theta_k, \theta_{k+1/2}` are ``theta``, ``theta_half``.
    """
    u = (1 - lr * weight_decay) * theta - theta_half
    return theta_half * torch.exp(-alpha * theta_half.sign() * u - lr * beta)
