"""Pruning at initialisation: a mask found before training, by chance, by SNIP or by SynFlow.

References: Lee, Ajanthan, Torr, *SNIP: Single-shot Network Pruning based on Connection Sensitivity*, 2019. Tanaka,
Kunin, Yamins, Ganguli, *Pruning neural networks without any data by iteratively conserving synaptic flow*, 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.modes import evaluating
from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Options
from horst.sparsity.distributions import Distribution
from horst.sparsity.gradient_scaling import ScalesGradients
from horst.sparsity.state_policy import StatePolicy


class AtInit(ScalesGradients):
    r"""A fixed mask found before the first step.

    - ``"random"``: uniformly at random.
    - ``"snip"``: keep the largest :math:`|w \cdot \partial L / \partial w|`, with :math:`L` from ``loss``.
    - ``"synflow"``: keep the largest :math:`|w \cdot \partial R / \partial w|`, with all parameters replaced by
      their absolute values and :math:`R` the sum of outputs, from ``loss``; in ``rounds`` rounds of exponentially
      falling density. On a network with norms or softmax, this is the score without its conservation law.

    Args:
        score: Name of the score, one of the three above.
        loss: Function of the model that returns the scalar whose gradient is taken: for SNIP the training loss on a
            batch or several, for SynFlow ``lambda m: m(torch.ones(1, 3, 224, 224)).sum()``. Under DDP call the wrapped
            model in it, so that the gradients are averaged over the ranks.
        rounds: Number of rounds of SynFlow; 100 in its paper.
        distribution: Distribution of the zeros; by default global, and uniform for ``"random"``.
        scale_gradients: Whether the updates of each output neuron are scaled by its density, as in SparseOpt; see
            :class:`~horst.sparsity.gradient_scaling.ScalesGradients`. Under Adam it does nothing.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> model = nn.Linear(10, 10)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> AtInit(model, optimizer, sparsity=0.9, score="random", layers="all_linear").current_sparsity
        0.9
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        score: Literal["random", "snip", "synflow"],
        loss: Callable[[nn.Module], Tensor] | None = None,
        rounds: int = 100,
        distribution: Distribution | None = None,
        scale_gradients: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if score not in ("random", "snip", "synflow"):
            raise ValueError(f"score must be 'random', 'snip' or 'synflow', got {score!r}.")
        if (loss is None) != (score == "random"):
            need = "takes no loss" if score == "random" else "needs loss, a function of the model that returns a scalar"
            raise ValueError(f"score={score!r} {need}.")
        if rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {rounds}: without a round nothing is pruned.")
        if distribution is None:
            distribution = "uniform" if score == "random" else "global"
        super().__init__(
            model, optimizer, sparsity=sparsity, distribution=distribution, policy=StatePolicy(), **options
        )
        if score == "synflow":
            self._require_units()
        self.score, self.rounds, self._loss = score, rounds, loss
        self.scale_gradients = scale_gradients
        self._start()

    def _begin(self) -> None:
        if self.score == "random":
            self._draws += 1
            scores = {layer.name: self._random(i) for i, layer in enumerate(self.layers)}
            self._set_pruned(self._select(self.sparsity, scores), "prune")
        elif self.score == "snip":
            self._set_pruned(self._select(self.sparsity, self._sensitivity()), "prune")
        else:
            self._synflow()
        self._loss = None

    def _sensitivity(self) -> dict[str, Tensor]:
        """``w * dL/dw`` of every masked layer; ``p.grad`` is left as it was."""
        assert self._loss is not None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            with torch.enable_grad():
                self._loss(self.model).backward()
            scores = {}
            for layer in self.layers:
                if layer.param.grad is None:
                    raise ValueError(
                        f"the loss does not depend on {layer.name}: give one that does, or exclude this layer."
                    )
                scores[layer.name] = local_shard(layer.param.grad) * local_shard(layer.param)
        finally:
            for p, grad in zip(parameters, before, strict=True):
                p.grad = grad
        return scores

    def _synflow(self) -> None:
        weights = [local_shard(p) for p in self.model.parameters()]
        original = [w.clone() for w in weights]
        try:
            for w in weights:
                w.abs_()
            with evaluating(self.model):
                for r in range(1, self.rounds + 1):
                    target = self.sparsity if r == self.rounds else 1.0 - (1.0 - self.sparsity) ** (r / self.rounds)
                    self._set_pruned(self._select(target, self._sensitivity(), nested=True), "prune")
        finally:
            for w, value in zip(weights, original, strict=True):
                w.copy_(value)
        self._zero_weights(always=True)
