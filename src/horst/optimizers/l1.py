"""The option ``l1`` for optimizers that lack it: a soft threshold after every step.

It reads ``l1`` of each group, so that it is scheduled and saved with the other options. Groups without it are left
alone. It is a hook of the optimizer, which copies and pickles do not keep: call it again there.
:class:`horst.HORST` has ``l1`` as an option of its own.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horst.kernels.soft_threshold import soft_threshold_
from horst.optimizers.auto_alpha import at_most
from horst.parameters.sharding import local_shard

__all__ = ["refuse_own_l1", "soft_threshold"]

# Optimizers that were given the hook: one under a mirror step does not know of the one around it.
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def soft_threshold(optimizer: Optimizer) -> Any:
    r"""Shrink every weight towards zero by :math:`\eta \lambda` after every step, and to exactly zero from below that.

    .. math:: \theta \leftarrow \mathrm{sign}(\theta) \max(|\theta| - \eta \lambda, 0)

    where :math:`\eta, \lambda` are the group's ``lr``, ``l1``. It is apart from the gradient, as AdamW's decay is.
    Weights without a gradient are left alone, as by the optimizer.

    Returns:
        A handle whose ``remove()`` undoes it. Until then a second call is an error: it would shrink the weights twice.

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
    around = [other for other in _hooked if getattr(other, "base", None) is optimizer]
    for part in (optimizer, getattr(optimizer, "base", optimizer), *around):  # base: of with_mirror_step
        if _shrink in part._optimizer_step_post_hooks.values():
            raise ValueError(
                f"this {type(part).__name__} has a soft threshold already, and a second one would shrink its weights "
                "twice. Leave this call out, or first call remove() on what the first call returned."
            )
    _hooked.add(optimizer)
    return optimizer.register_step_post_hook(_shrink)


@torch.no_grad()
def _shrink(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for group in optimizer.param_groups:
        if not group.get("l1"):
            continue
        # the bound is that of an optimizer with a mirror step
        threshold = _on_host(at_most(group["lr"], group.get("mirror_max_step")) * group["l1"])
        if not isinstance(threshold, Tensor) and not 0 <= threshold < math.inf:
            raise ValueError(f"lr * l1 must be a number of at least 0, got {threshold}. Check lr and l1.")
        # A fused step under GradScaler may have been skipped on the device. The scaler sums over devices: more than 1.
        if (found_inf := getattr(optimizer, "found_inf", None)) is not None:
            stepped = (found_inf == 0).double()
            threshold = _on_host((threshold.to(stepped) if isinstance(threshold, Tensor) else threshold) * stepped)
        for p in group["params"]:
            if p.grad is not None:
                theta = local_shard(p)
                wide = theta.float() if theta.dtype in (torch.bfloat16, torch.float16) else theta
                soft_threshold_([wide], threshold)
                if wide is not theta:
                    theta.copy_(wide)


def _on_host(value: float | Tensor) -> float | Tensor:
    """A number where no device need be waited for. The compiler keeps a tensor: it would compile for each number."""
    return value.item() if isinstance(value, Tensor) and value.is_cpu and not torch.compiler.is_compiling() else value


def refuse_own_l1(optimizer: Optimizer, name: str) -> None:
    """An error where the optimizer has an ``l1`` of its own, which ``name`` would apply a second time."""
    parts = getattr(optimizer, "optimizers", ())  # of several optimizers as one
    for part in parts:
        refuse_own_l1(part, name)
    if not parts and "l1" in optimizer.defaults:
        own = type(optimizer).__name__
        raise ValueError(
            f"{own} shrinks the weights of groups with an l1 itself, and {name} would do so twice. Leave {name} out: "
            f"{own}(..., l1=0.015) is enough. To combine optimizers, call {name} on the others first."
        )
