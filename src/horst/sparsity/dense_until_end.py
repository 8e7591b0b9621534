"""What methods share that train dense weights towards a mask and apply it at the last step."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Options, Sparsifier
from horst.sparsity.distributions import Distribution
from horst.sparsity.masks import load_bits, save_bits
from horst.sparsity.schedules import Refresh
from horst.sparsity.state_policy import StatePolicy


class DenseUntilEnd(Sparsifier):
    """Dense weights with a mask in view, which becomes theirs at the end; abstract: use ADMM or CAST.

    Args:
        schedule: When the mask in view is chosen anew, and when it is applied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None,
        schedule: Refresh,
        distribution: Distribution,
        **options: Unpack[Options],
    ) -> None:
        policy = StatePolicy()
        super().__init__(model, optimizer, sparsity=sparsity, distribution=distribution, policy=policy, **options)
        self.schedule = schedule
        self._outside: dict[str, Tensor] = {}  # by layer, what the mask in view leaves out; empty from the end on

    @property
    def is_finished(self) -> bool:
        """Whether the mask has been applied and is fixed."""
        return not self._outside

    @torch.no_grad()
    def finish(self) -> Event | None:
        """Zero what the mask leaves out and fix it: done by itself at the last step, and by hand to end earlier.

        Returns:
            The event; None where that has been done already.
        """
        if self.is_finished:
            return None
        event = self._apply_mask()
        self._after_event(event)
        return event

    @abc.abstractmethod
    def _choose_again(self) -> None:
        """Choose the mask in view anew."""

    def _scores(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What the mask is chosen by, from the weights."""
        return weights

    def _on_step(self) -> Event | None:
        if self.is_finished or not self.schedule.is_due(self.steps):
            return None
        if self.steps == self.schedule.end:
            return self._apply_mask()
        self._choose_again()
        return None

    def _apply_mask(self) -> Event:
        pruned = self._select(self.sparsity, self._scores({l.name: local_shard(l.param) for l in self.layers}))
        self._outside = {}
        self._set_pruned(pruned, "prune")
        return self._event("prune")

    def _extra_state(self) -> dict[str, Any]:
        outside = self._outside
        return {"outside": {l.name: save_bits(l.param, outside[l.name]) for l in self.layers if l.name in outside}}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        params: dict[str, Tensor] = {layer.name: layer.param for layer in self.layers}
        self._outside = {name: load_bits(params[name], bits) for name, bits in state.get("outside", {}).items()}
