"""GMP: gradual magnitude pruning.

References: Zhu and Gupta, *To prune, or not to prune: exploring the efficacy of pruning for model compression*, 2017.
The sparse pretraining of language models (sparsellm.com) finds pruning from 25 % to 75 % of training near optimal.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.sparsity.controller import Event, Options, Sparsifier
from horst.sparsity.distributions import Distribution
from horst.sparsity.schedules import Cubic, check_schedule
from horst.sparsity.state_policy import StatePolicy


class GMP(Sparsifier):
    """Remove the smallest weights a few at a time, along a cubic; what is removed stays removed.

    Args:
        schedule: Schedule of the prunings: :class:`~horst.sparsity.schedules.Cubic`; :func:`gmp_steps` makes one.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> import torch
        >>> model = nn.Linear(10, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = GMP(model, optimizer, sparsity=0.8, schedule=Cubic(0, 4, every=2), layers="all_linear")
        >>> [event for _ in range(4) if (event := sparsifier.step())]
        [Event(step=2, kind='prune', sparsity=0.7), Event(step=4, kind='prune', sparsity=0.8)]
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float,
        schedule: Cubic,
        distribution: Distribution = "uniform",
        policy: StatePolicy = StatePolicy(),  # noqa: B008 - frozen
        **options: Unpack[Options],
    ) -> None:
        check_schedule(self, schedule, Cubic)
        super().__init__(model, optimizer, sparsity=sparsity, distribution=distribution, policy=policy, **options)
        if schedule.initial > self.sparsity:
            raise ValueError(f"GMP starts at initial={schedule.initial}, above its sparsity {sparsity}.")
        self._require_units()
        self.schedule = schedule
        self._start()

    def _begin(self) -> None:
        self._on_step()

    def _on_step(self) -> Event | None:
        if not self.schedule.is_due(self.steps):
            return None
        self._set_pruned(self._select(self.schedule.sparsity(self.steps, self.sparsity), nested=True), "prune")
        return self._event("prune")


def gmp_steps(total_steps: int, *, begin: float = 0.25, until: float = 0.75, every: int | None = None) -> Cubic:
    """Sparse pretraining's schedule: dense for a quarter of training, pruned up to 75 % of it, then fixed.

    Args:
        total_steps: Optimizer steps of the whole run.
        begin: Share of training before the first pruning.
        until: Share of training after which the sparsity is reached.
        every: Steps between prunings; None is a fiftieth of the pruning phase, at least 1.

    Example:
        >>> gmp_steps(10_000)
        Cubic(begin=2500, end=7500, every=100, initial=0.0)
    """
    if not 0.0 <= begin < until <= 1.0:
        raise ValueError(f"begin and until are shares of training, 0 <= begin < until <= 1, got {begin} and {until}.")
    first, last = round(begin * total_steps), round(until * total_steps)
    return Cubic(first, last, every=max(1, (last - first) // 50) if every is None else every)
