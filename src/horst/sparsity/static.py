"""A fixed mask: train sparse from here on, or keep the zeros of an already pruned model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from horst.parameters.sharding import local_shard
from horst.sparsity.controller import Options
from horst.sparsity.distributions import Distribution
from horst.sparsity.gradient_scaling import ScalesGradients
from horst.sparsity.masks import NM, parse_pattern
from horst.sparsity.state_policy import StatePolicy


class Static(ScalesGradients):
    """A mask that never changes: the model's present zeros, a given one, or the smallest weights now.

    Args:
        sparsity: Share of zeros to prune the smallest weights to. None (and no N:M pattern, and no ``masks``): the
            weights that are zero now stay zero.
        masks: Masks by layer name, True where a weight is kept; of whole weights or of this rank's parts.
        distribution: Division of the zeros among the layers, where ``sparsity`` is given.
        scale_gradients: Whether the updates of each output neuron are scaled by its density, as in SparseOpt; see
            :class:`~horst.sparsity.gradient_scaling.ScalesGradients`. Under Adam it does nothing.

    The other arguments are those of :class:`~horst.sparsity.controller.Sparsifier`.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> Static(model, torch.optim.SGD(model.parameters()), layers="all").masks["weight"]
        tensor([[ True, False],
                [False,  True]])
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        sparsity: float | None = None,
        masks: Mapping[str, Tensor] | None = None,
        distribution: Distribution = "uniform",
        scale_gradients: bool = False,
        **options: Unpack[Options],
    ) -> None:
        pattern = parse_pattern(options.get("pattern"))
        by_magnitude = sparsity is not None or isinstance(pattern, NM)
        if masks is not None and by_magnitude:
            raise ValueError("masks and sparsity (or an N:M pattern) both say what to prune: give one of them.")
        super().__init__(
            model,
            optimizer,
            sparsity=sparsity if by_magnitude else 0.0,
            distribution=distribution,
            policy=StatePolicy(),
            **options,
        )
        self._by_magnitude = by_magnitude
        self._given = masks
        self.scale_gradients = scale_gradients
        self._start()

    def _begin(self) -> None:
        if self._by_magnitude:
            pruned = self._select(self.sparsity)
        elif self._given is not None:
            pruned = self._from_masks(self._given)
        else:
            pruned = {layer.name: local_shard(layer.param) == 0 for layer in self.layers}
        self._given = None
        self._set_pruned(pruned, "prune")

    def _from_masks(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        names = [layer.name for layer in self.layers]
        if set(masks) != set(names):
            raise ValueError(f"masks must name the masked layers, {names}, got {list(masks)}.")
        pruned = {}
        for layer in self.layers:
            mask, weight, shard = masks[layer.name], local_shard(layer.param), self._chooser.shards[layer.name]
            if mask.dtype != torch.bool:
                raise TypeError(f"the mask of {layer.name} must be boolean, True where kept, got {mask.dtype}.")
            if mask.shape == layer.param.shape:
                mask = mask.narrow(shard.dim, shard.offset, shard.length)
            elif mask.shape != weight.shape:
                raise ValueError(f"the mask of {layer.name} has shape {tuple(mask.shape)}, not {tuple(weight.shape)}.")
            pruned[layer.name] = ~mask.to(weight.device)
        return pruned


def keep_zeros(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Unpack[Options]) -> Static:
    """From now on, training leaves every zero weight of an already pruned ``model`` at zero.

    It needs no ``sparsifier.step()``: hooks on the optimizers do it, and hold it for as long as the optimizers live.
    ``close()`` of what is returned ends it, or the end of a ``with`` statement around the training.

    Args:
        options: Options of :class:`Static`; ``layers`` is ``"all"`` by default: linear layers and convolutions.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model.weight.data = torch.tensor([[1.0, 0.0]])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> kept = keep_zeros(model, optimizer)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> model.weight[0, 1].item()
        0.0
        >>> kept.close()
    """
    options.setdefault("layers", "all")
    sparsifier = Static(model, optimizer, **options)

    @torch.compiler.disable
    def zero_again(*_: object) -> None:
        sparsifier.step()

    sparsifier._handles += [opt.register_step_post_hook(zero_again) for opt in sparsifier.optimizers]
    return sparsifier
