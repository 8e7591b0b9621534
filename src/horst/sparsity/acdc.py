"""AC/DC: alternate dense and sparse phases, the method the paper trains DeiT with (Section 6, Table 1).

References: Peste, Iofinova, Vladu, Alistarh, *AC/DC: Alternating Compressed/DeCompressed Training*, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Options, Sparsifier
from horst.sparsity.distributions import Distribution
from horst.sparsity.schedules import Phases, check_schedule
from horst.sparsity.state_policy import ACDC_REFERENCE, StatePolicy


class ACDC(Sparsifier):
    """Dense and sparse phases in turn; every sparse phase at the full sparsity, the run ends in one.

    Args:
        schedule: The phases: :func:`~horst.sparsity.schedules.acdc_epochs` (the reference's),
            :func:`~horst.sparsity.schedules.acdc_steps` or your own :class:`~horst.sparsity.schedules.Phases`.
        restore: Values of restored weights. ``"zeros"``: pruned weights come back as zeros (the reference).
            ``"values"``: with the values they had when they were pruned, as code that masks in the forward pass only
            has it.
        distribution: One global threshold, as the reference. Its uniform variant is ``"uniform"``.
        policy: State policy; by default the reference's: first moments of all parameters are zeroed at each restore.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> from horst.sparsity.schedules import acdc_steps
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=acdc_steps(20), layers="all_linear")
        >>> for _ in range(20):
        ...     model(torch.randn(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     event = sparsifier.step()
        ...     optimizer.zero_grad()
        >>> sparsifier.current_sparsity
        0.9
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        schedule: Phases,
        restore: Literal["zeros", "values"] = "zeros",
        distribution: Distribution = "global",
        policy: StatePolicy = ACDC_REFERENCE,
        **options: Unpack[Options],
    ) -> None:
        check_schedule(self, schedule, Phases)
        if restore not in ("zeros", "values"):
            raise ValueError(f"restore must be 'zeros' or 'values', got {restore!r}.")
        super().__init__(model, optimizer, sparsity=sparsity, distribution=distribution, policy=policy, **options)
        self.schedule, self.restore = schedule, restore
        self._values: dict[str, Tensor] = {}  # by layer, what its pruned weights were; zero where kept
        self._start()

    def _begin(self) -> None:
        self._on_step()

    def _on_step(self) -> Event | None:
        change = self.schedule.change(self.steps)
        if change == "prune":
            pruned = self._select(self.sparsity)
            if self.restore == "values":
                weights = {layer.name: local_shard(layer.param) for layer in self.layers}
                self._values = {name: torch.where(mask, weights[name], 0) for name, mask in pruned.items()}
            self._set_pruned(pruned, "prune")
        elif change == "restore":
            self._zero_weights(always=True)
            self._set_pruned({name: torch.zeros_like(pruned) for name, pruned in self._pruned.items()}, "restore")
            for layer in self.layers:
                if layer.name in self._values:
                    local_shard(layer.param).add_(self._values.pop(layer.name))
        return self._event(change) if change else None

    def _extra_state(self) -> dict[str, Any]:
        return {"values": self._as_saved(self._values)}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._values = self._from_saved(state.get("values", {}))
