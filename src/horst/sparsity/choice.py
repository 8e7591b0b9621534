"""The choice of weights to prune: pattern, distribution and scores, over all layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from horst.parameters.sharding import Shard, sum_over_ranks
from horst.sparsity.distributions import Distribution, allocate, check_ratios
from horst.sparsity.layers import Layer
from horst.sparsity.masks import NM, Block, check_sparsity
from horst.sparsity.selection import exact_floor, select


class Chooser:
    """Chooses the pruned weights of ``layers`` by least score; each matrix of a stack is a layer of its own here.

    Args:
        layers: The masked layers.
        pattern: Pattern of the masks: unstructured, block or N:M.
        distribution: Division of the zeros among the layers.
        sparsity: The sparsity of the whole run; None where the pattern fixes it.
    """

    def __init__(
        self, layers: Sequence[Layer], pattern: Block | NM, distribution: Distribution, sparsity: float | None
    ) -> None:
        check_sparsity(sparsity, pattern)
        self.layers, self.pattern, self.distribution = layers, pattern, distribution
        self.sparsity = pattern.sparsity if sparsity is None and isinstance(pattern, NM) else float(sparsity or 0.0)
        self.shards = {layer.name: _shard_of(layer) for layer in layers}
        self.shapes: dict[str, tuple[int, ...]] = {}  # by matrix
        self.units: dict[str, Shard] = {}  # by matrix, the grid of units; empty for N:M
        self._places: dict[str, tuple[str, Any]] = {}  # by matrix, its layer and its index in this rank's part of it
        for layer in layers:
            if isinstance(pattern, NM):
                pattern.check_shard(layer.name, self.shards[layer.name], layer.input_dim)
            for matrix in layer.matrices():
                pattern.check(matrix.name, matrix.shape, matrix.input_dim)
                shard = self.shards[layer.name]
                shard, index = (shard, ...) if matrix.expert is None else shard.entry(matrix.expert)
                self.shapes[matrix.name], self._places[matrix.name] = matrix.shape, (layer.name, index)
                if isinstance(pattern, Block):
                    self.units[matrix.name] = pattern.units(shard)
        if isinstance(distribution, Mapping):
            check_ratios(distribution, list(self.shapes))
        if isinstance(pattern, Block):
            self.budget(self.sparsity)  # a bad distribution is refused now, not at the first event

    def budget(self, sparsity: float) -> dict[str, int] | int:
        """Units to remove, by matrix or of all together."""
        units = {name: shard.numel for name, shard in self.units.items()}
        return allocate(self.distribution, sparsity, units, self.shapes, final=self.sparsity)

    def choose(
        self, sparsity: float, scores: Mapping[str, Tensor], old: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """By layer, a mask that is True where a weight is to be pruned.

        Args:
            sparsity: The share of zeros to reach.
            scores: Scores by layer, shaped like the local weights; the smallest magnitudes go.
            old: Weights that are pruned already and stay so, by layer; only the rest is chosen.
        """
        if isinstance(self.pattern, NM):
            return {layer.name: ~self.pattern.mask(scores[layer.name], layer.input_dim) for layer in self.layers}
        budget = self.budget(sparsity)
        scores, old = self._split(scores), self._split(old) if old else None
        if isinstance(budget, int):
            return self._join(self._choose(list(scores), scores, budget, old))
        return self._join(
            {name: mask for one, k in budget.items() for name, mask in self._choose([one], scores, k, old).items()}
        )

    def exchange(self, name: str, pruned: Tensor, drop_scores: Tensor, grow_scores: Tensor, fraction: float) -> Tensor:
        """The pruned weights of one layer after the smallest ``fraction`` of its kept units makes room for others."""
        assert isinstance(self.pattern, Block)
        drop_by, grow_by = self._split({name: drop_scores}), self._split({name: grow_scores})
        new = {}
        for one, mask in self._split({name: pruned}).items():
            kept, units = ~self.pattern.shrink(mask), self.units[one]
            count = self.count(one, kept)
            drop = exact_floor(fraction, count)
            dropped = select([self.pattern.unit_scores(drop_by[one])], [units], drop, [kept])[0]
            # Grow the largest of what is free: what remains when the smallest, as many as stay pruned, are taken away.
            stay = units.numel - count
            free = [~kept | dropped]
            new[one] = self.pattern.expand(select([self.pattern.unit_scores(grow_by[one])], [units], stay, free)[0])
        return self._join(new)[name]

    def count(self, name: str, mask: Tensor) -> int:
        """Number of True entries of ``mask``, of a layer's weights or a matrix's units, over all ranks."""
        return int(sum_over_ranks(mask.count_nonzero(), self.shards[self._places.get(name, (name,))[0]].group))

    def _split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By matrix, views of tensors given by layer."""
        return {name: tensors[layer][index] for name, (layer, index) in self._places.items() if layer in tensors}

    def _join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By layer, the masks that are given by matrix."""
        masks: dict[str, Tensor] = {}
        for name, mask in parts.items():
            layer, index = self._places[name]
            if index is ...:
                masks[layer] = mask
                continue
            if layer not in masks:
                masks[layer] = mask.new_empty(self.shards[layer].local_shape)
            masks[layer][index] = mask
        return masks

    def _choose(
        self, names: Sequence[str], scores: Mapping[str, Tensor], k: int, old: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        assert isinstance(self.pattern, Block)
        units = [self.units[name] for name in names]
        unit_scores = [self.pattern.unit_scores(scores[name]) for name in names]
        if not old:
            chosen = select(unit_scores, units, k)
        else:
            before = [self.pattern.shrink(old[name]) for name in names]
            already = sum(self.count(name, mask) for name, mask in zip(names, before, strict=True))
            # Rounding may give a layer of an ERK budget one unit back from one pruning to the next: it stays pruned.
            more = select(unit_scores, units, max(k - already, 0), [~mask for mask in before])
            chosen = [a | b for a, b in zip(before, more, strict=True)]
        return {name: self.pattern.expand(mask) for name, mask in zip(names, chosen, strict=True)}


def _shard_of(layer: Layer) -> Shard:
    try:
        return Shard.of(layer.param)
    except NotImplementedError as error:
        raise NotImplementedError(f"{layer.name} cannot be masked: {error}") from None
