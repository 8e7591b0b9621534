"""Running code between the gradients and the update of any ``torch.optim.Optimizer``.

Under ``torch.compile(optimizer.step)`` the code runs outside of the graph: masks are changed by counting and selecting,
which reads numbers back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def before_update(optimizer: Optimizer, action: Callable[[Optimizer], None]) -> Any:
    """Run ``action(optimizer)`` at each step when the gradients are there and the weights not yet updated.

    That is at the beginning of ``step()``, or, if it is given a closure that computes the gradients (Lightning's
    trainer always passes one), at the end of the closure.

    Args:
        action: A bound method. The optimizer does not keep its object alive: once that is gone, nothing runs.

    Returns:
        A handle whose ``remove()`` undoes it.
    """
    method = weakref.WeakMethod(action)

    @torch.compiler.disable
    def act(opt: Optimizer) -> None:
        if (alive := method()) is not None:
            alive(opt)

    def pre_hook(opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            act(opt)
            return None

        def closure_then_action() -> Any:
            loss = closure()
            act(opt)
            return loss

        return (args[0], closure_then_action), {k: v for k, v in kwargs.items() if k != "closure"}

    return optimizer.register_step_pre_hook(pre_hook)


def after_update(optimizer: Optimizer, action: Callable[[Optimizer], None]) -> Any:
    """Run ``action(optimizer)`` at the end of each step; otherwise as :func:`before_update`."""
    method = weakref.WeakMethod(action)

    @torch.compiler.disable
    def post_hook(opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (alive := method()) is not None:
            alive(opt)

    return optimizer.register_step_post_hook(post_hook)
