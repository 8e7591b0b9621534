"""Changes to the groups of an optimizer that end with a block, or that an error takes back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.optim import Optimizer

from horst.optimizers.step_parts import at_most

__all__ = ["limited_lr", "restored_on_error"]

T = TypeVar("T")


@contextlib.contextmanager
def limited_lr(groups: list[dict[str, Any]], bound: str) -> Iterator[Callable[[Callable[[], T]], T]]:
    """Within the block a learning rate above its group's bound, which the groups have under that name, is the bound.

    Yields a function that calls another as if outside of the block: what a closure of the user sees are its own rates.
    """
    bounded = [group for group in groups if group[bound] is not None]
    given: list[Any] = []
    limited: list[Any] = []

    def limit() -> None:
        given[:] = [group["lr"] for group in bounded]
        limited[:] = [at_most(lr, group[bound]) for group, lr in zip(bounded, given, strict=True)]
        for group, lr in zip(bounded, limited, strict=True):
            group["lr"] = lr

    def lift() -> None:
        for group, lr, there in zip(bounded, given, limited, strict=True):
            if group["lr"] is there:  # else the optimizer has set its own
                group["lr"] = lr

    def outside(function: Callable[[], T]) -> T:
        lift()
        try:
            return function()
        finally:
            limit()

    limit()
    try:
        yield outside
    finally:
        lift()


@contextlib.contextmanager
def restored_on_error(base: Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """If the block fails, ``base`` has its list of groups and its state again, and ``groups`` their contents."""
    param_groups, members, state = base.param_groups, list(base.param_groups), base.state
    contents = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, content in zip(groups, contents, strict=True):
            group.clear()
            group.update(content)
        param_groups[:] = members
        base.param_groups, base.state = param_groups, state
        raise
