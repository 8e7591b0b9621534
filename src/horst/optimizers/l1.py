"""An L1 penalty beside any torch optimizer: in the gradient, or as a soft threshold after the step.

Both read the option ``l1`` of each group, so that it is scheduled and saved with the others; a group without it is left
alone. They hang on the optimizer's hooks, which copies and pickles of an optimizer do not keep: call them again there.
:class:`horst.HORST` and :class:`horst.HAM` have the soft threshold as an option of their own, and need neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from horst.kernels.soft_threshold import soft_threshold_
from horst.optimizers.step_parts import at_most, own_parts
from horst.optimizers.together import Together

__all__ = ["penalize_l1", "soft_threshold"]


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
    _refuse_own_l1(optimizer, "penalize_l1")
    return optimizer.register_step_pre_hook(_add_subgradient)


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
    _refuse_own_l1(optimizer, "soft_threshold")
    return optimizer.register_step_post_hook(_shrink)


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


@torch.no_grad()
def _shrink(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if group.get("l1"):
            stepped = [p for p in group["params"] if p.grad is not None]
            lr = at_most(group["lr"], group.get("mirror_max_step"))  # the bound of an optimizer that was composed
            # a fused step under GradScaler may have been skipped on the device
            soft_threshold_(own_parts(stepped), lr * group["l1"], found_inf=getattr(optimizer, "found_inf", None))


def _refuse_own_l1(optimizer: Optimizer, name: str) -> None:
    if isinstance(optimizer, Together):
        for part in optimizer.optimizers:
            _refuse_own_l1(part, name)
    elif "l1" in optimizer.defaults:
        own = type(optimizer).__name__
        raise ValueError(
            f"{own} shrinks the weights of groups with an l1 itself, after every step, and {name} would penalise them "
            f"twice. Leave {name} out: {own}(..., l1=0.03) is enough. Among optimizers that are put together, call it "
            "on the others before."
        )
