"""Changes to the groups of an optimizer that end with a block, or that an error takes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

from horst.optimizers.step_parts import at_most

__all__ = ["limited_lr", "restored_on_error"]


@contextlib.contextmanager
def limited_lr(groups: list[dict[str, Any]], bound: str) -> Iterator[None]:
    """Within the block a learning rate above its group's bound, which the groups have under that name, is the bound."""
    bounded = [(group, group["lr"]) for group in groups if group[bound] is not None]
    for group, lr in bounded:
        group["lr"] = at_most(lr, group[bound])
    limited = [group["lr"] for group, _ in bounded]
    try:
        yield
    finally:
        for (group, lr), there in zip(bounded, limited, strict=True):
            if group["lr"] is there:  # else the optimizer has set its own
                group["lr"] = lr


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
