"""SR-STE: learn an N:M mask while training, by straight-through gradients and a decay of the pruned weights.

References: Zhou et al., *Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch*, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Event, Options, Sparsifier
from horst.sparsity.layers import Layer
from horst.sparsity.optimizer_hooks import before_update
from horst.sparsity.ramps import Ramp
from horst.sparsity.state_policy import StatePolicy


class SRSTE(Sparsifier):
    r"""The network computes with the N:M part of its weights, the optimizer updates all of them.

    With dense weights :math:`w`, their mask :math:`E` (the N largest of each M) and :math:`\tilde w = E \odot w`,

    .. math:: g = \partial L / \partial \tilde w + \lambda_w\, (1 - E) \odot w

    is the gradient that the optimizer sees; :math:`\lambda_w` is ``decay``, and 0 gives the plain straight-through
    estimator. A new mask is chosen after every step, or every ``every`` steps.

    Between steps the model's parameters hold :math:`\tilde w`: forward passes, evaluation and checkpoints see exact
    N:M weights, and names and identities of parameters stay (no parametrization, so DDP, FSDP2 and compile work). The
    dense :math:`w` is kept here and swapped in for the duration of ``optimizer.step()``: weights that are loaded into
    the model later have no effect. The decay term is added then, after any clipping; it respects ``GradScaler``.
    Closures that evaluate the loss several times per step (LBFGS) are not supported.

    Args:
        pattern: Pattern of the mask: N:M, by default ``"2:4"``. With ``sparsity``: None (single weights) or a block.
        decay: Decay of pruned weights; 2e-4 in the paper. A :class:`~horst.sparsity.ramps.Ramp` lets it grow.
        every: Number of steps from one mask to the next; 1 in the paper.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier = SRSTE(model, optimizer, layers="all_linear")
        >>> int((model.weight != 0).sum())
        16
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        decay: float | Ramp = 2e-4,
        every: int = 1,
        **options: Unpack[Options],
    ) -> None:
        if not isinstance(decay, Ramp) and not decay >= 0.0:  # this form refuses NaN too
            raise ValueError(f"decay must be at least 0, got {decay}. Use 0 for the plain straight-through estimator.")
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}. Use 1 for a new mask after every step.")
        options.setdefault("pattern", "2:4" if sparsity is None else None)
        policy = StatePolicy(on_restore="keep")
        super().__init__(model, optimizer, sparsity=sparsity, distribution="uniform", policy=policy, **options)
        self.decay, self.every = decay, every
        self._dense: dict[str, Tensor] = {}
        self._swapped = set(range(len(self.optimizers)))  # indices of optimizers whose parameters hold dense weights
        self._start()

    def _add_hooks(self) -> None:
        self._handles += (before_update(opt, self._before_update) for opt in self.optimizers)
        super()._add_hooks()

    def _begin(self) -> None:
        self._on_step()

    def _on_step(self) -> Event | None:
        if not self._swapped:  # no optimizer took its step (GradScaler): the weights are masked as they are
            return None
        for layer in self.layers:
            if self._index(layer) in self._swapped:
                self._dense[layer.name] = local_shard(layer.param).clone()
        self._swapped.clear()
        if self.steps % self.every == 0:
            self._pruned = self._select(self.sparsity, self._dense)
        if self.steps == 0:
            self._masks_changed()  # counts never change, so they are read back once only
            self._zero_weights()
        return None

    def _wants_dense_gradient(self, layer: Layer) -> bool:
        return True

    def _optimizer_masks(self, optimizer: Optimizer) -> bool:
        return False  # inside its update the weights are dense

    @torch.no_grad()
    def _before_update(self, optimizer: Optimizer) -> None:
        decay = self.decay.at(self.steps) if isinstance(self.decay, Ramp) else self.decay
        scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler where the optimizer itself unscales
        for layer in self._layers_of(optimizer):
            if self._index(layer) in self._swapped:
                continue
            dense = self._dense[layer.name]
            local_shard(layer.param).copy_(dense)
            if layer.param.grad is not None and decay > 0.0:
                term = torch.where(self._pruned[layer.name], dense, 0).mul_(decay)
                local_shard(layer.param.grad).add_(term if scale is None else term * scale)
        self._swapped.add(self.optimizers.index(optimizer))

    def _index(self, layer: Layer) -> int:
        return self.optimizers.index(self._owner[layer.name])

    def _extra_state(self) -> dict[str, Any]:
        return {"dense": self._as_saved(self._dense)}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        self._dense = self._from_saved(state["dense"])
        self._swapped = set()
