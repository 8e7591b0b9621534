"""AST: straight-through gradients with a decay of the pruned weights that grows slowly, for pretrained models.

References: Huang et al., *Pruning Large Language Models with Semi-Structural Adaptive Sparse Training*, 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.sparsity.controller import Options
from horst.sparsity.ramps import Ramp
from horst.sparsity.srste import SRSTE


class AST(SRSTE):
    r"""SR-STE for a trained model: a new mask every few steps, and a decay of pruned weights that starts at zero.

    The gradient that the optimizer sees after :math:`t` steps is

    .. math:: g = \partial L / \partial \tilde w + \lambda \min(t / T_r, 1)\, (1 - E) \odot w

    where :math:`\lambda, T_r` are ``decay``, ``ramp_steps``, and :math:`w, E, \tilde w` are those of
    :class:`~horst.sparsity.srste.SRSTE`. While the decay is small, weights change sides easily; later the mask settles.

    Args:
        sparsity: Share of zeros, for masks other than N:M.
        decay: Decay of pruned weights at the end of the ramp.
        ramp_steps: Number of steps over which the decay rises from 0, linearly. 10,000 in the paper; in a shorter run
            take a good part of its steps.
        every: Number of steps from one mask to the next.

    The other arguments are those of :class:`~horst.sparsity.srste.SRSTE`.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
        >>> sparsifier = AST(model, optimizer, ramp_steps=500, layers="all_linear")
        >>> int((model.weight != 0).sum())
        16
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        decay: float = 1e-4,
        ramp_steps: int = 10_000,
        every: int = 10,
        **options: Unpack[Options],
    ) -> None:
        if not decay >= 0.0:  # this form refuses NaN too
            raise ValueError(f"decay must be at least 0, got {decay}. AST uses 1e-4.")
        if ramp_steps < 0:
            raise ValueError(f"ramp_steps must be at least 0, got {ramp_steps}. Use 0 for the full decay at once.")
        ramp = Ramp(decay, ramp_steps)
        super().__init__(model, optimizer, sparsity=sparsity, decay=ramp, every=every, **options)
