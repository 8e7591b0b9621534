"""What the optimizers of this folder share: a step that is one rule for one tensor at a time."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from horst.optimizers.hyperparameters import check_number


class PerParameter(Optimizer, abc.ABC):
    """A torch optimizer made of two rules for one tensor: its state before the first step, and its step.

    All options are those of the groups, each a number of at least 0. ``state[p]["step"]`` counts the steps.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)

    @abc.abstractmethod
    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step."""

    @abc.abstractmethod
    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Step ``p`` and its state in place; ``state["step"]`` is 1 at the first step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own options if given. An error changes nothing."""
        if isinstance(param_group, dict):  # else the base class says what is wrong
            for name, default in self.defaults.items():
                value = param_group.get(name, default)
                if isinstance(default, float) and not isinstance(value, Tensor):
                    check_number(name, value, f"{default:g} is the default")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: Function that evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.numel() == 0:
                    continue
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense gradients, got {p.grad.layout} for a parameter of shape "
                        f"{tuple(p.shape)}. Use sparse=False in nn.Embedding."
                    )
                self._state_of(p, group)["step"] += 1
                self._update(p, p.grad, self.state[p], group)
        return loss

    def _state_of(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter, made if it is missing."""
        if not self.state[p]:
            # float32 whatever p is: a bfloat16 counter stops at 256
            step = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p] = {"step": step, **self._start(p, group)}
        state: dict[str, Tensor] = self.state[p]
        return state
