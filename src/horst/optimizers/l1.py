"""A soft threshold after the step of any torch optimizer: the option ``l1`` for optimizers that lack it.

It reads ``l1`` of each group, so that it is scheduled and saved with the other options. A group without it is left
alone. It is a hook of the optimizer, and copies and pickles of an optimizer do not keep hooks: call it again there.
:class:`horst.HORST` has ``l1`` as an option of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horst.kernels.soft_threshold import soft_threshold_
from horst.optimizers.step_parts import at_most, own_parts

__all__ = ["refuse_own_l1", "soft_threshold"]


def soft_threshold(optimizer: Optimizer) -> Any:
    r"""Shrink every weight towards zero by :math:`\eta \lambda` after every step, and to exactly zero from below that.

    .. math:: \theta \leftarrow \mathrm{sign}(\theta) \max(|\theta| - \eta \lambda, 0)

    the proximal step of the penalty, decoupled from the gradient as AdamW's decay is; :math:`\eta, \lambda` are the
    group's ``lr``, ``l1``. Weights without a gradient are left alone, as by the optimizer.

    Returns:
        A handle whose ``remove()`` undoes it.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0, 0.2]))
        >>> optimizer = torch.optim.SGD([{"params": [weight], "l1": 0.5}], lr=1.0)
        >>> handle = soft_threshold(optimizer)
        >>> weight.grad = torch.zeros(3)
        >>> optimizer.step()
        >>> weight.detach()
        tensor([ 0.5000, -0.5000,  0.0000])
    """
    refuse_own_l1(optimizer, "soft_threshold")
    return optimizer.register_step_post_hook(_shrink)


@torch.no_grad()
def _shrink(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if group.get("l1"):
            stepped = [p for p in group["params"] if p.grad is not None]
            lr = at_most(group["lr"], group.get("mirror_max_step"))  # the bound of an optimizer that was composed
            # a fused step under GradScaler may have been skipped on the device
            soft_threshold_(own_parts(stepped), lr * group["l1"], found_inf=getattr(optimizer, "found_inf", None))


def refuse_own_l1(optimizer: Optimizer, name: str) -> None:
    """An error where the optimizer has an ``l1`` of its own, which ``name`` would apply a second time."""
    parts = getattr(optimizer, "optimizers", ())  # of several optimizers as one
    for part in parts:
        refuse_own_l1(part, name)
    if not parts and "l1" in optimizer.defaults:
        own = type(optimizer).__name__
        raise ValueError(
            f"{own} shrinks the weights of groups with an l1 itself, after every step, and {name} would penalise them "
            f"twice. Leave {name} out: {own}(..., l1=0.03) is enough. Among optimizers that are put together, call it "
            "on the others before."
        )
