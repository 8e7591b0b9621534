"""An L1 penalty in the gradient of any torch optimizer: the textbook way to ask for sparsity.

It reads ``l1`` of each group, so that it is scheduled and saved with the other options. A group without it is left
alone. It is a hook of the optimizer, and copies and pickles of an optimizer do not keep hooks: call it again there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horst.optimizers.l1 import refuse_own_l1


def penalize_l1(optimizer: Optimizer) -> Any:
    r"""Add the subgradient :math:`\lambda\, \mathrm{sign}(\theta)` of an L1 penalty to ``p.grad`` before every step.

    It is what ``loss + l1 * weights.abs().sum()`` would do, after any clipping of the loss's own gradient. Adam then
    divides it by the root of the gradients' second moment like the rest, and weights hover around zero without staying
    there. :math:`\lambda` is the group's ``l1``.

    Returns:
        A handle whose ``remove()`` undoes it.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.0]))
        >>> optimizer = torch.optim.SGD([{"params": [weight], "l1": 0.5}], lr=1.0)
        >>> handle = penalize_l1(optimizer)
        >>> weight.grad = torch.zeros(3)
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    refuse_own_l1(optimizer, "penalize_l1")
    return optimizer.register_step_pre_hook(_add_subgradient)


@torch.no_grad()
def _add_subgradient(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
        raise RuntimeError("penalize_l1 acts before step(), when a closure has no gradients yet: step without one.")
    scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler that leaves it to a fused step to divide by it
    for group in optimizer.param_groups:
        if group.get("l1"):
            for p in group["params"]:
                if p.grad is not None:
                    subgradient = p.sign() if scale is None else p.sign() * scale.to(p.device, non_blocking=True)
                    p.grad.add_(subgradient, alpha=group["l1"])
