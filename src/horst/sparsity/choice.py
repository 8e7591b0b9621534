"""The choice of weights to prune: pattern, distribution and scores, over all layers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
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
        self.shards = {layer.name: Shard.of(layer.param) for layer in layers}
        self.matrices = {layer.name: layer.matrices() for layer in layers}
        for layer in layers:
            for matrix in self.matrices[layer.name]:
                pattern.check(matrix.name, matrix.shape, matrix.input_dim)
            if isinstance(pattern, NM):
                pattern.check_shard(layer.name, self.shards[layer.name], layer.input_dim)
        if isinstance(distribution, Mapping):
            check_ratios(distribution, [matrix.name for group in self.matrices.values() for matrix in group])
        if isinstance(pattern, Block):
            self.units = {
                matrix.name: pattern.units(self._place(layer, matrix)[0])
                for layer in layers
                for matrix in self.matrices[layer.name]
            }
            self.budget(self.sparsity)  # a bad distribution is refused now, not at the first event

    def budget(self, sparsity: float) -> dict[str, int] | int:
        """Units to remove, by matrix or of all together."""
        units = {name: shard.numel for name, shard in self.units.items()}
        shapes = {matrix.name: matrix.shape for group in self.matrices.values() for matrix in group}
        return allocate(self.distribution, sparsity, units, shapes, final=self.sparsity)

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
        parts = [self._split({name: tensor}) for tensor in (pruned, drop_scores, grow_scores)]
        new = {matrix: self._exchange(matrix, *(part[matrix] for part in parts), fraction) for matrix in parts[0]}
        return self._join(new)[name]

    def count(self, name: str, mask: Tensor) -> int:
        """Number of True entries of ``mask``, of weights of the layer, over all ranks."""
        return int(sum_over_ranks(mask.count_nonzero(), self.shards[name].group))

    def _place(self, layer: Layer, matrix: Layer) -> tuple[Shard, int | None]:
        """The shard of a matrix, and its place in this rank's part of a stack."""
        shard = self.shards[layer.name]
        return (shard, None) if matrix.expert is None else shard.entry(matrix.expert)

    def _split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By matrix, this rank's parts of tensors given by layer."""
        parts = {}
        for layer in self.layers:
            for matrix in self.matrices[layer.name] if layer.name in tensors else ():
                local, (shard, at) = tensors[layer.name], self._place(layer, matrix)
                if matrix.expert is not None:
                    local = local.new_empty(shard.local_shape) if at is None else local[at]
                parts[matrix.name] = local
        return parts

    def _join(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By layer, the masks that are given by matrix."""
        masks = {}
        for layer in self.layers:
            own = [(matrix, parts[matrix.name]) for matrix in self.matrices[layer.name] if matrix.name in parts]
            if layer.experts and own:
                held = [mask for matrix, mask in own if self._place(layer, matrix)[1] is not None]
                empty = own[0][1].new_empty(self.shards[layer.name].local_shape)
                masks[layer.name] = torch.stack(held) if held else empty
            elif own:
                masks[layer.name] = own[0][1]
        return masks

    def _exchange(self, name: str, pruned: Tensor, drop_scores: Tensor, grow_scores: Tensor, fraction: float) -> Tensor:
        assert isinstance(self.pattern, Block)
        kept, units = ~self.pattern.shrink(pruned), self.units[name]
        count = int(sum_over_ranks(kept.count_nonzero(), units.group))
        drop = exact_floor(fraction, count)
        dropped = select([self.pattern.unit_scores(drop_scores)], [units], drop, [kept])[0]
        # Grow the largest of what is free: what remains when the smallest, as many as stay pruned, are taken away.
        stay = units.numel - count
        return self.pattern.expand(select([self.pattern.unit_scores(grow_scores)], [units], stay, [~kept | dropped])[0])

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
            already = sum(
                int(sum_over_ranks(mask.count_nonzero(), unit.group)) for mask, unit in zip(before, units, strict=True)
            )
            # Rounding may give a layer of an ERK budget one unit back from one pruning to the next: it stays pruned.
            more = select(unit_scores, units, max(k - already, 0), [~mask for mask in before])
            chosen = [a | b for a, b in zip(before, more, strict=True)]
        return {name: self.pattern.expand(mask) for name, mask in zip(names, chosen, strict=True)}
