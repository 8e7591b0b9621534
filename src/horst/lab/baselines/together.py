"""Several optimizers as one: Muon for the matrices and Adam for the rest, say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim import Optimizer


class Together(Optimizer):
    """Optimizers with parameters of their own, stepped one after the other, with one list of groups and one state.

    Schedulers, checkpoints and masks see one optimizer: ``param_groups`` are the groups of all, in their order, and
    ``state`` is shared by all.

    Args:
        *optimizers: Optimizers, at least one; no parameter is in two of them.

    Example:
        >>> matrix, bias = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Together(torch.optim.Muon([matrix], lr=0.02), torch.optim.AdamW([bias], lr=1e-3))
        >>> (matrix @ bias - 1).square().sum().backward()
        >>> optimizer.step()
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"Together takes torch optimizers, got {optimizer!r}.")
        self.optimizers: tuple[Optimizer, ...] = ()
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        for optimizer in optimizers:
            self.state.update(optimizer.state)
        self._hand_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here: add it to one of ``optimizers`` before they are put together."""
        if self.optimizers:
            raise RuntimeError(
                "Together cannot tell which of its optimizers a new group is for. Add the group to one of them first, "
                "then put them together anew."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give each optimizer its groups and the one state: after a load these are new objects."""
        first = 0
        for optimizer in self.optimizers:
            last = first + len(optimizer.param_groups)
            optimizer.__setstate__({"state": self.state, "param_groups": self.param_groups[first:last]})
            first = last

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step each optimizer.

        Args:
            closure: Evaluates the model again and returns the loss; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss
