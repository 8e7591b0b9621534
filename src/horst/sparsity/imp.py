"""IMP: iterative magnitude pruning with rewinding, the search for lottery tickets; and learning-rate rewinding.

References: Frankle and Carbin, *The Lottery Ticket Hypothesis*, 2019; Frankle, Dziugaite, Roy, Carbin, *Linear Mode
Connectivity and the Lottery Ticket Hypothesis*, 2020 (rewinding to an early step). Renda, Frankle, Carbin, *Comparing
Rewinding and Fine-tuning in Neural Network Pruning*, 2020 (LRR).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.kinds import clean_name
from horst.parameters.sharding import as_shard_of, local_shard, part_of
from horst.sparsity.controller import Event, Options, Sparsifier
from horst.sparsity.distributions import Distribution
from horst.sparsity.masks import check_sparsity
from horst.sparsity.schedules import Rounds, check_schedule
from horst.sparsity.state_policy import StatePolicy


class IMP(Sparsifier):
    """Train, remove the smallest weights, rewind the rest to an early step, train again.

    Each round removes the same share of what is left, so that the last one trains at ``sparsity``. The learning rate is
    yours to rewind: drive it by :attr:`training_step`, for example with
    ``LambdaLR(optimizer, lambda _: rate(sparsifier.training_step))``. The loop of :mod:`horst.training` does so.

    Args:
        schedule: Schedule of the rounds: :class:`~horst.sparsity.schedules.Rounds`; :func:`rounds_to` makes one.
        rewind: What goes back. ``"weights"``: all parameters, buffers and optimizer state. ``"lr"`` (LRR): the learning
            rate alone. The weights that are left keep their values and signs, and the optimizer's state begins anew,
            as in a run of its own.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> import torch
        >>> model = nn.Linear(10, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = IMP(model, optimizer, sparsity=0.75, schedule=Rounds(2, 3), layers="all_linear")
        >>> [event.sparsity for _ in range(9) if (event := sparsifier.step())]
        [0.5, 0.75]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float,
        schedule: Rounds,
        rewind: Literal["weights", "lr"] = "weights",
        distribution: Distribution = "global",
        **options: Unpack[Options],
    ) -> None:
        check_schedule(self, schedule, Rounds)
        if rewind not in ("weights", "lr"):
            raise ValueError(f"rewind must be 'weights' or 'lr' (learning-rate rewinding), got {rewind!r}.")
        super().__init__(
            model, optimizer, sparsity=sparsity, distribution=distribution, policy=StatePolicy(), **options
        )
        self._require_units()
        self.schedule, self.rewind = schedule, rewind
        self._early: dict[str, Tensor] = {}
        self._early_state: list[dict[str, dict[str, Any]]] = []  # by optimizer and parameter
        self._start()

    @property
    def training_step(self) -> int:
        """Steps of training that the present weights have seen: what a learning-rate schedule should be given."""
        return self.schedule.training_step(self.steps)

    def _begin(self) -> None:
        self._on_step()

    def _on_step(self) -> Event | None:
        if self.rewind == "weights" and self.steps == self.schedule.rewind_to:
            self._early = {name: tensor.clone() for name, tensor in self._tensors()}
            self._early_state = [
                {
                    name: {
                        k: local_shard(v).clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()
                    }
                    for name, p in self._params_of(optimizer).items()
                    if p in optimizer.state
                }
                for optimizer in self.optimizers
            ]
        if not self.schedule.starts_round(self.steps):
            return None
        target = self.schedule.sparsity(self.schedule.round_at(self.steps), self.sparsity)
        pruned = self._select(target, nested=True)
        if self.rewind == "weights":
            for name, tensor in self._tensors():
                tensor.copy_(self._early[name])
        early_states = self._early_state if self.rewind == "weights" else [{} for _ in self.optimizers]
        for optimizer, early in zip(self.optimizers, early_states, strict=True):
            _rewind_state(optimizer, self._params_of(optimizer), early)
        self._set_pruned(pruned, "prune")
        return self._event("rewind")

    def _tensors(self) -> list[tuple[str, Tensor]]:
        params = [clean_name(name) for name, _ in self.model.named_parameters()]
        buffers = [(clean_name(name), local_shard(buffer)) for name, buffer in self.model.named_buffers()]
        return [*((name, local_shard(self._whole[name])) for name in params), *buffers]

    def _params_of(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's parameters by name; by position where they are not the model's."""
        names = {id(tensor): name for name, tensor in self._whole.items()}
        params = [p for group in optimizer.param_groups for p in group["params"]]
        return {names.get(id(p), str(i)): p for i, p in enumerate(params)}

    def _extra_state(self) -> dict[str, Any]:
        saved = []
        for optimizer, early in zip(self.optimizers, self._early_state, strict=False):
            params = self._params_of(optimizer)
            saved.append({name: _state_as_saved(params[name], state) for name, state in early.items()})
        return {"early": self._as_saved(self._early), "early_state": saved}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._early = self._from_saved(state.get("early", {}))
        self._early_state = []
        for optimizer, saved in zip(self.optimizers, state.get("early_state", []), strict=False):
            params = self._params_of(optimizer)
            self._early_state.append({name: _state_from_saved(params[name], entry) for name, entry in saved.items()})


def rounds_to(sparsity: float, steps_per_round: int, *, share: float = 0.2) -> Rounds:
    """The fewest rounds to ``sparsity`` of which none removes more than ``share`` of what is left.

    Args:
        sparsity: Share of zeros at the end.
        steps_per_round: Optimizer steps of a round, from the beginning of the learning-rate schedule to its end.
        share: Share of the weights left that a pruning may remove; 0.2 in LRR.

    Example:
        >>> rounds_to(0.9, 1000).rounds, round(1 - 0.1 ** (1 / 11), 3)
        (11, 0.189)
    """
    check_sparsity(sparsity)
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must lie in (0, 1), got {share}. Give a fraction: 0.2, not 20.")
    # a hair less, so that four rounds of 0.2 are enough for 1 - 0.8 ** 4
    return Rounds(max(1, math.ceil(math.log(1 - sparsity) / math.log(1 - share) - 1e-9)), steps_per_round)


def _state_as_saved(p: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's optimizer state for a checkpoint; what is shaped like it is sharded like it."""
    shape = local_shard(p).shape
    return {k: as_shard_of(p, v) if isinstance(v, Tensor) and v.shape == shape else v for k, v in state.items()}


def _state_from_saved(p: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of what :func:`_state_as_saved` gave."""
    return {k: part_of(p, v) if isinstance(v, Tensor) and v.shape == p.shape else v for k, v in saved.items()}


def _rewind_state(optimizer: Optimizer, params: Mapping[str, Tensor], early: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the state back. A parameter that had none has none again; the optimizer makes a new one."""
    for name, p in params.items():
        if name not in early:
            optimizer.state.pop(p, None)
            continue
        for key in [key for key in optimizer.state[p] if key not in early[name]]:
            del optimizer.state[p][key]
        for key, value in early[name].items():
            if isinstance(value, Tensor):
                local_shard(optimizer.state[p][key]).copy_(value)
            else:
                optimizer.state[p][key] = value
