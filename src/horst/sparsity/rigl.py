"""RigL and SET: keep the sparsity, exchange the smallest weights for those of largest gradient, or for random ones.

References: Evci, Gale, Menick, Castro, Elsen, *Rigging the Lottery: Making All Tickets Winners*, 2020. Mocanu et al.,
*Scalable training of artificial neural networks with adaptive sparse connectivity inspired by network science*, 2018.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Options
from horst.sparsity.distributions import Distribution
from horst.sparsity.gradient_scaling import ScalesGradients
from horst.sparsity.layers import Layer
from horst.sparsity.optimizer_hooks import after_update, before_update
from horst.sparsity.schedules import DropGrow, check_schedule
from horst.sparsity.state_policy import StatePolicy


class Exchange(ScalesGradients, abc.ABC):
    """A random mask whose weights are exchanged now and then, each layer keeping its count. Base of RigL and SET.

    The exchange takes the place of that step's update, as in the published code: the optimizer is shown no gradients,
    so neither weights nor state nor step counts move. Grown weights start at zero with their state zeroed; a weight
    that is dropped and at once grown again keeps its value. A step that ``GradScaler`` skips puts the exchange off to
    the next one that is taken.

    Args:
        schedule: Schedule of the exchanges: :class:`~horst.sparsity.schedules.DropGrow`.
        scale_gradients: Whether the updates of each output neuron are scaled by its density, as in SparseOpt; see
            :class:`~horst.sparsity.gradient_scaling.ScalesGradients`. Under Adam it does next to nothing.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float,
        schedule: DropGrow,
        distribution: Distribution = "erk",
        policy: StatePolicy = StatePolicy(on_restore="reset-regrown", moments="both"),  # noqa: B008 - frozen
        scale_gradients: bool = False,
        **options: Unpack[Options],
    ) -> None:
        check_schedule(self, schedule, DropGrow)
        super().__init__(model, optimizer, sparsity=sparsity, distribution=distribution, policy=policy, **options)
        self._require_units()
        if distribution == "global":
            raise ValueError(
                f"{type(self).__name__} keeps a count for each layer: use 'erk', 'uniform' or a dictionary."
            )
        self.schedule = schedule
        self._due: set[int] = set()  # indices of optimizers whose next step is an exchange
        self._exchanged = False
        self._hidden: dict[nn.Parameter, Tensor] = {}  # gradients not shown to the optimizer
        self.scale_gradients = scale_gradients
        self._start()

    def _add_hooks(self) -> None:
        for opt in self.optimizers:  # before those that scale: growth is by the true gradients
            self._handles += [before_update(opt, self._before_update), after_update(opt, self._after_update)]
        super()._add_hooks()

    @abc.abstractmethod
    def _growth_scores(self, layer: Layer) -> Tensor | None:
        """Scores of all weights, of which the largest that are not kept grow; None leaves the layer as it is."""

    def _begin(self) -> None:
        self._draws += 1
        scores = {layer.name: self._random(i) for i, layer in enumerate(self.layers)}
        self._set_pruned(self._select(self.sparsity, scores), "prune")

    def _on_step(self) -> Event | None:
        if self.schedule.is_due(self.steps):
            self._due = set(range(len(self.optimizers)))
            self._draws += 1
        event = self._event("update") if self._exchanged else None
        self._exchanged = False
        return event

    def _wants_dense_gradient(self, layer: Layer) -> bool:
        return self.optimizers.index(self._owner[layer.name]) in self._due

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer) -> None:
        index = self.optimizers.index(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # set by GradScaler where the optimizer itself skips the step
        if index not in self._due or (found_inf is not None and bool(found_inf)):
            return
        fraction = self.schedule.drop_fraction(self.steps)
        new = {}
        for layer in self._layers_of(optimizer):
            if (scores := self._growth_scores(layer)) is not None:
                pruned, weight = self._pruned[layer.name], local_shard(layer.param)
                new[layer.name] = self._chooser.exchange(layer.name, pruned, weight, scores, fraction)
        self._set_pruned(new, "update")
        self._due.discard(index)
        self._exchanged = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._hidden[p] = p.grad
                    p.grad = None

    def _after_update(self, optimizer: Optimizer) -> None:
        for p, grad in self._hidden.items():
            p.grad = grad
        self._hidden.clear()

    def _extra_state(self) -> dict[str, Any]:
        return {"due": sorted(self._due), "exchanged": self._exchanged}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._due, self._exchanged = set(state["due"]), bool(state["exchanged"])


class RigL(Exchange):
    """Drop the smallest weights, grow those of largest gradient; see :class:`Exchange` for the arguments.

    Gradients are dense in the one step that exchanges, and masked in all others.

    Example:
        >>> model = nn.Linear(16, 16)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> sparsifier = RigL(model, optimizer, sparsity=0.9, schedule=DropGrow(every=2, end=8), layers="all_linear")
        >>> for _ in range(4):
        ...     model(torch.randn(4, 16)).square().mean().backward()
        ...     optimizer.step()
        ...     event = sparsifier.step()
        ...     optimizer.zero_grad()
        >>> sum(int((w == 0).sum()) for w in [model.weight]) >= 230, sparsifier.current_sparsity
        (True, 0.8984375)
    """

    def _growth_scores(self, layer: Layer) -> Tensor | None:
        return None if layer.param.grad is None else local_shard(layer.param.grad)


class SET(Exchange):
    """Drop the smallest weights, grow random ones; see :class:`Exchange` for the arguments.

    The random choice is a hash of seed, exchange and index, so it needs no generator and is equal on every rank.
    """

    def _growth_scores(self, layer: Layer) -> Tensor | None:
        return self._random(self.layers.index(layer))
