"""Exact selection of the smallest scores: radix selection over the float bits, with no sorted copy.

The magnitude of a float, read as an integer without its sign bit, orders as the magnitude does. So the k-th smallest
is found digit by digit from the top: a histogram of 11 bits at a time, then only what shares the prefix found so
far. Each pass reads the tensor once in chunks and adds a few thousand counts; under FSDP2 the counts are summed over
the ranks and no shard moves. Equal scores are told apart by their index in the same way, digit by digit.

What "exact" means here, on every device and for any number of ranks:

- exactly ``k`` entries are selected;
- of two equal scores the one with the lower index (row-major, layer after layer) counts as smaller;
- NaN counts as larger than infinity, and all NaN as equal: it is removed last, stays in the network and is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from horst.parameters.sharding import Shard, local_shard, sum_over_ranks

logger = logging.getLogger(__name__)

# Integer type, bits of the magnitude, bits of infinity.
_BITS = {
    torch.float16: (torch.int16, 15, 0x7C00),
    torch.bfloat16: (torch.int16, 15, 0x7F80),
    torch.float32: (torch.int32, 31, 0x7F800000),
    torch.float64: (torch.int64, 63, 0x7FF0000000000000),
}
# 2048 counters of 8 bytes fit the shared memory of a CUDA block, where atomics on one hot bin stay cheap (the zeros of
# an already pruned tensor all fall into one). They also cover the whole exponent of every type.
_DIGIT = 11
# Once so few candidates are left, they are copied out and the remaining passes read the copy: 24 MiB of keys and
# positions at most, and in a tensor of normal weights the third pass is the last over all of it.
_FEW = 1 << 21


def magnitude_keys(x: Tensor) -> Tensor:
    """Integers that order as the magnitudes of ``x`` do, NaN above infinity and all NaN equal."""
    integer, _, infinity = _BITS[x.dtype]
    return (x.view(integer) & torch.iinfo(integer).max).clamp_(max=infinity + 1)


def exact_floor(sparsity: float, n: int) -> int:
    """``floor(sparsity * n)`` with ``sparsity`` read as the decimal it prints as.

    In binary ``0.29 * 100`` is 28.999...; whoever writes 0.29 of 100 weights means 29.

    Example:
        >>> int(0.29 * 100), exact_floor(0.29, 100)
        (28, 29)
    """
    product = Fraction(repr(float(sparsity))) * n
    return product.numerator // product.denominator


def smallest(scores: Sequence[Tensor], k: int, *, among: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Find the ``k`` entries of least magnitude, over all the tensors together.

    Args:
        scores: Floating tensors or DTensors; entries are compared by absolute value.
        k: Number of entries to select, over all ranks.
        among: Boolean masks, shaped like the local scores; entries that are False are never selected.

    Returns:
        For each tensor a boolean mask shaped like this rank's part, True where selected.

    Example:
        >>> smallest([torch.tensor([3.0, -1.0, 1.0, 2.0])], 2)[0]
        tensor([False,  True,  True, False])
    """
    return select([local_shard(s) for s in scores], [Shard.of(s) for s in scores], k, among)


def select(
    scores: Sequence[Tensor], shards: Sequence[Shard], k: int, among: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """:func:`smallest` for local scores that come with their :class:`~horst.parameters.sharding.Shard`."""
    selection = _Selection(scores, shards, among)
    candidates = selection.count()
    if not 0 <= k <= candidates:
        raise ValueError(f"k must lie between 0 and the number of candidates, {candidates}, got {k}.")
    if k == 0:
        return [torch.zeros(part.shard.local_shape, dtype=torch.bool, device=part.flat.device) for part in selection]
    value = selection.kth_value(k)
    if value.is_taken_whole:
        return selection.masks(lambda keys, positions: (keys >> value.shift) <= value.prefix)
    # Several scores equal the threshold and not all of them go: the same search, over their indices.
    index = selection.kth_index(value)

    def is_selected(keys: Tensor, positions: Callable[[Tensor], Tensor]) -> Tensor:
        chosen = keys < value.prefix
        ties = (keys == value.prefix).nonzero().squeeze(1)
        chosen[ties] = (positions(ties) >> index.shift) <= index.prefix
        return chosen

    return selection.masks(is_selected)


def kth_magnitude(scores: Sequence[Tensor], k: int, *, among: Sequence[Tensor] | None = None) -> float:
    """The ``k``-th smallest magnitude, counted from 1, over all the tensors together and all ranks.

    Example:
        >>> kth_magnitude([torch.tensor([3.0, -1.0]), torch.tensor([2.0])], 2)
        2.0
    """
    selection = _Selection([local_shard(s) for s in scores], [Shard.of(s) for s in scores], among)
    candidates = selection.count()
    if not 1 <= k <= candidates:
        raise ValueError(f"k must lie between 1 and the number of candidates, {candidates}, got {k}.")
    key = selection.kth_value(k, to_the_last_bit=True).prefix
    return float(torch.tensor(key, dtype=_BITS[selection.dtype][0]).view(selection.dtype))


@dataclass(frozen=True)
class _Bin:
    """The keys whose top bits, ``key >> shift``, equal ``prefix``: ``size`` of them, of which ``rank`` are to go."""

    prefix: int
    shift: int
    rank: int
    size: int

    @property
    def is_taken_whole(self) -> bool:
        return self.rank == self.size


@dataclass(frozen=True)
class _Part:
    """One tensor of a selection: its entries as seen here, and where they lie among all entries of all tensors."""

    flat: Tensor
    allowed: Tensor | None
    shard: Shard
    base: int

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor], int]]:
        """Keys, candidates, and the way from indices in the chunk to positions; and the start of each chunk."""
        # In cache on a CPU; on a GPU large enough to fill it and small beside a tensor that needs chunks.
        size = 1 << 18 if self.flat.device.type == "cpu" else 1 << 23
        for start in range(0, self.flat.numel(), size):
            keys = magnitude_keys(self.flat[start : start + size].to(dtype))
            allowed = None if self.allowed is None else self.allowed[start : start + size]

            def positions(index: Tensor, start: int = start) -> Tensor:
                return self.shard.positions(index + start) + self.base

            yield keys, allowed, positions, start


class _Selection:
    """A search over several tensors together, digit by digit."""

    def __init__(self, scores: Sequence[Tensor], shards: Sequence[Shard], among: Sequence[Tensor] | None) -> None:
        self.dtype = scores[0].dtype
        for s in scores[1:]:
            self.dtype = torch.promote_types(self.dtype, s.dtype)
        if self.dtype not in _BITS:
            raise TypeError(f"scores must be floating point ({', '.join(map(str, _BITS))}), got {self.dtype}.")
        groups = {shard.group for shard in shards if shard.group is not None}
        if len(groups) > 1:
            raise NotImplementedError(
                "one selection runs over tensors sharded on one mesh dimension, got several. "
                "Use a layerwise distribution ('uniform', 'erk' or a dictionary) instead of 'global'."
            )
        self.group: Any = groups.pop() if groups else None
        self.parts: list[_Part] = []
        self.total = 0
        for i, (s, shard) in enumerate(zip(scores, shards, strict=True)):
            allowed = None if among is None else among[i].reshape(-1)
            self.parts.append(_Part(s.reshape(-1), allowed, shard, self.total))
            self.total += shard.numel
        # By part, keys and positions of all that is still in the running; None as long as it is too much to copy.
        self.remaining: list[tuple[Tensor, Tensor]] | None = None

    def __iter__(self) -> Iterator[_Part]:
        return iter(self.parts)

    def count(self) -> int:
        """Candidates over all ranks."""
        if self.parts[0].allowed is None:
            return self.total
        return int(self._over_ranks([part.allowed.count_nonzero() for part in self if part.allowed is not None]))

    def kth_value(self, k: int, *, to_the_last_bit: bool = False) -> _Bin:
        """The bin of the k-th smallest key: the narrowest there is, or the first that is to be taken whole."""
        _, bits, infinity = _BITS[self.dtype]
        found = _Bin(0, bits, k, -1)
        while found.shift > 0 and (to_the_last_bit or not found.is_taken_whole):
            width = min(_DIGIT, found.shift)
            counts = self._over_ranks([self._count_values(i, found, width, bits) for i in range(len(self.parts))])
            if found.shift == bits and (bad := int(counts[infinity >> (bits - width) :].sum())):
                logger.warning("%d non-finite scores in a selection: NaN and infinity count as largest.", bad)
            found = _descend(found, counts, width)
            if self.remaining is None and found.size <= _FEW:
                self.remaining = [self._collect(part, found) for part in self]
        return found

    def kth_index(self, value: _Bin) -> _Bin:
        """Among the candidates that all equal ``value``, the bin of positions up to which they go."""
        found = _Bin(0, self.total.bit_length(), value.rank, -1)
        while found.shift > 0 and not found.is_taken_whole:
            width = min(_DIGIT, found.shift)
            counts = [self._count_positions(i, value, found, width) for i in range(len(self.parts))]
            found = _descend(found, self._over_ranks(counts), width)
        return found

    def masks(self, is_selected: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
        """Evaluate ``is_selected(keys, positions)`` on every chunk of every tensor."""
        out = []
        for part in self:
            mask = torch.empty(part.flat.numel(), dtype=torch.bool, device=part.flat.device)
            for keys, allowed, positions, start in part.chunks(self.dtype):
                chosen = is_selected(keys, positions)
                mask[start : start + keys.numel()] = chosen if allowed is None else chosen & allowed
            out.append(mask.view(part.shard.local_shape))
        return out

    def _count_values(self, i: int, found: _Bin, width: int, bits: int) -> Tensor:
        """Histogram, over the candidates of part ``i`` in the bin ``found``, of the next digit of their keys."""
        if self.remaining is not None:
            keys, _ = self.remaining[i]
            return _histogram(keys[(keys >> found.shift) == found.prefix], found.shift - width, width)
        total = torch.zeros(1 << width, dtype=torch.int64, device=self.parts[i].flat.device)
        for keys, allowed, _, _ in self.parts[i].chunks(self.dtype):
            if found.shift < bits:
                inside = (keys >> found.shift) == found.prefix
                keys = keys[inside if allowed is None else inside & allowed]
            elif allowed is not None:
                keys = keys[allowed]
            total += _histogram(keys, found.shift - width, width)
        return total

    def _count_positions(self, i: int, value: _Bin, found: _Bin, width: int) -> Tensor:
        """The same for the positions of those whose key is ``value``."""
        if self.remaining is not None:
            keys, positions = self.remaining[i]
            positions = positions[keys == value.prefix]
            return _histogram(positions[(positions >> found.shift) == found.prefix], found.shift - width, width)
        total = torch.zeros(1 << width, dtype=torch.int64, device=self.parts[i].flat.device)
        for keys, allowed, positions_of, _ in self.parts[i].chunks(self.dtype):
            ties = keys == value.prefix
            positions = positions_of((ties if allowed is None else ties & allowed).nonzero().squeeze(1))
            positions = positions[(positions >> found.shift) == found.prefix]
            total += _histogram(positions, found.shift - width, width)
        return total

    def _collect(self, part: _Part, found: _Bin) -> tuple[Tensor, Tensor]:
        """Keys and positions of the candidates in the bin ``found``."""
        keys_found, positions_found = [], []
        for keys, allowed, positions, _ in part.chunks(self.dtype):
            inside = (keys >> found.shift) == found.prefix
            index = (inside if allowed is None else inside & allowed).nonzero().squeeze(1)
            keys_found.append(keys[index])
            positions_found.append(positions(index))
        empty = torch.empty(0, dtype=torch.int64, device=part.flat.device)
        return torch.cat(keys_found or [empty]), torch.cat(positions_found or [empty])

    def _over_ranks(self, counts: Sequence[Tensor]) -> Tensor:
        """Add up counts of each tensor: those of a shard over the ranks, those of a whole tensor once."""
        sharded, whole = torch.zeros_like(counts[0]), torch.zeros_like(counts[0])
        for count, part in zip(counts, self, strict=True):
            (whole if part.shard.group is None else sharded).add_(count.to(whole.device))
        return sum_over_ranks(sharded, self.group) + whole


def _histogram(keys: Tensor, shift: int, width: int) -> Tensor:
    return torch.bincount((keys >> shift) & ((1 << width) - 1), minlength=1 << width)


def _descend(found: _Bin, counts: Tensor, width: int) -> _Bin:
    """From a bin to the one within it, given the histogram of the next ``width`` bits, that holds the rank sought."""
    cumulative = counts.cumsum(0)
    digit = int(torch.searchsorted(cumulative, found.rank))
    size = int(counts[digit])
    rank = found.rank - (int(cumulative[digit]) - size)
    return _Bin(found.prefix << width | digit, found.shift - width, rank, size)
