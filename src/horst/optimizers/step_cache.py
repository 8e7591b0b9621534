"""What the step of HORST and HAM would otherwise look up for every parameter at every step."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from horst.kernels.backends import Backend, choose_backend
from horst.kernels.multi_tensor import LaunchCache

__all__ = ["StepCache"]


class StepCache:
    """The lookups of one optimizer, by group. Replace it by a new one to forget them all.

    Groups are told apart by the ``id`` of their list of parameters, which may be changed in place.

    Attributes:
        launches: Tables of the fused backend, by (group, gets the mirror step, has a mask).
    """

    def __init__(self) -> None:
        self.launches: dict[tuple[int, bool, bool], LaunchCache] = defaultdict(LaunchCache)
        self._backends: dict[int, tuple[tuple[Any, ...], Backend]] = {}
        # the group's parameters and all values of optimizer.state when its states were looked up, and these
        self._states: dict[int, tuple[list[Tensor], list[Any], list[dict[str, Any]]]] = {}
        self._counters_on_device: dict[int, bool] = {}

    def backend(self, group: dict[str, Any]) -> Backend:
        """The group's backend; chosen again when its first parameter or its flags have changed."""
        params, foreach, fused = group["params"], group["foreach"], group["fused"]
        if not params or torch.compiler.is_compiling():
            return choose_backend(params, foreach, fused)
        key = (len(params), params[0].device, params[0].dtype, foreach, fused)
        known = self._backends.get(id(params))
        if known is None or known[0] != key:
            trained = [p for p in params if p.requires_grad]  # frozen ones may be anything
            known = self._backends[id(params)] = (key, choose_backend(trained or params, foreach, fused))
        return known[1]

    def states(
        self, state: dict[Tensor, dict[str, Any]], group_params: list[Tensor], params: list[Tensor]
    ) -> list[dict[str, Any]]:
        """The state of each parameter; looked up by hash only when a parameter or a dictionary has been replaced."""
        if torch.compiler.is_compiling():
            return [state[p] for p in params]
        known = self._states.get(id(group_params))
        if known is not None:
            owners, everything, states = known
            if _are_same(owners, params) and _are_same(everything, state.values()):
                return states
        states = list(map(state.__getitem__, params))
        if len(params) == len(group_params):
            self._states[id(group_params)] = (list(params), list(state.values()), states)
        return states

    def place_counters(self, state: dict[Tensor, dict[str, Any]], params: list[Tensor], on_device: bool) -> None:
        """Move the group's step counters to their parameters' device or to the CPU; once, not at every step."""
        placed, key = self._counters_on_device, id(params)
        if key in placed and placed[key] is on_device:  # no get: Dynamo of torch 2.11 does not know it here
            return
        for p in params:
            if found := state.get(p):  # it may have been loaded from one that lived elsewhere
                where = p.device if on_device else "cpu"
                found["step"] = torch.as_tensor(found["step"], dtype=torch.float32, device=where)
        placed[key] = on_device


def _are_same(known: list[Any], now: Collection[Any]) -> bool:
    return len(known) == len(now) and all(map(operator.is_, known, now))
