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

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from horst.parameters.sharding import Shard, local_shard, sum_over_ranks
from horst.user_warnings import warn_user

logger = logging.getLogger(__name__)

# Integer type, bits of the magnitude, bits of infinity.
_BITS = {
    torch.float16: (torch.int16, 15, 0x7C00),
    torch.bfloat16: (torch.int16, 15, 0x7F80),
    torch.float32: (torch.int32, 31, 0x7F800000),
    torch.float64: (torch.int64, 63, 0x7FF0000000000000),
}
FLOATS = tuple(_BITS)  # dtypes of scores
# 2048 counters of 8 bytes fit the shared memory of a CUDA block, where atomics on one hot bin stay cheap (the zeros of
# an already pruned tensor all fall into one). They also cover the whole exponent of every type.
_DIGIT = 11
# Once so few candidates are left, they are copied out and the remaining passes read the copy: 24 MiB of keys and
# positions at most, and in a tensor of normal weights the third pass is the last over all of it.
_FEW = 1 << 21
_Positions = Callable[[Tensor | None], Tensor]


def magnitude_keys(x: Tensor) -> Tensor:
    """Integers that order as the magnitudes of ``x`` do, NaN above infinity and all NaN equal."""
    integer, _, infinity = _BITS[x.dtype]
    return (x.view(integer) & torch.iinfo(integer).max).clamp_(max=infinity + 1)


def warn_of_non_finite(weights: Mapping[str, Tensor]) -> bool:
    """Warn of weights, given by name, of which this rank's part holds NaN or infinity. Returns whether it did."""
    parts = {name: local_shard(weight.detach()) for name, weight in weights.items()}
    bad = [n for n, w in parts.items() if w.numel() and not torch.linalg.vector_norm(w, torch.inf).isfinite()]
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        warn_user(
            f"NaN or infinite weights in {', '.join(bad[:4])}{more}: they count as the largest and are pruned last. "
            "Look for the step at which the training broke down, or for a damaged file."
        )
    return bool(bad)


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

    def is_selected(keys: Tensor, positions: _Positions) -> Tensor:
        chosen = keys < value.prefix
        ties = keys == value.prefix
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

    @property
    def digit(self) -> int:
        """Bits of the next digit."""
        return min(_DIGIT, self.shift)

    def holds(self, keys: Tensor) -> Tensor:
        return (keys >> self.shift) == self.prefix

    def next(self, counts: Tensor) -> _Bin:
        """The bin within it that holds the rank sought, given the histogram of the next digit."""
        cumulative = counts.cumsum(0)
        digit = int(torch.searchsorted(cumulative, self.rank))
        size = int(counts[digit])
        rank = self.rank - (int(cumulative[digit]) - size)
        return _Bin(self.prefix << self.digit | digit, self.shift - self.digit, rank, size)


@dataclass(frozen=True)
class _Part:
    """One tensor of a selection: its entries as seen here, and where they lie among all entries of all tensors."""

    flat: Tensor
    allowed: Tensor | None
    shard: Shard
    base: int

    def chunks(self, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, _Positions, int]]:
        """Keys, candidates, a function from a mask over the chunk to positions, and the start of each chunk."""
        # In cache on a CPU; on a GPU large enough to fill it and small beside a tensor that needs chunks.
        size = 1 << 18 if self.flat.device.type == "cpu" else 1 << 23
        for start in range(0, self.flat.numel(), size):
            keys = magnitude_keys(self.flat[start : start + size].to(dtype))
            allowed = None if self.allowed is None else self.allowed[start : start + size]

            def positions(where: Tensor | None, start: int = start) -> Tensor:
                assert where is not None  # positions are asked for inside a bin only
                return self.shard.positions(where.nonzero().squeeze(1) + start) + self.base

            yield keys, allowed, positions, start


class _Selection:
    """A search over several tensors together, digit by digit."""

    def __init__(self, scores: Sequence[Tensor], shards: Sequence[Shard], among: Sequence[Tensor] | None) -> None:
        self.dtype = functools.reduce(torch.promote_types, [s.dtype for s in scores])
        if self.dtype not in FLOATS:
            raise TypeError(f"scores must be floating point ({', '.join(map(str, FLOATS))}), got {self.dtype}.")
        groups = {shard.group for shard in shards if shard.group is not None}
        if len(groups) > 1:
            raise NotImplementedError(
                "one selection runs over tensors sharded on one mesh dimension, got several. "
                "Use a layerwise distribution ('uniform', 'erk' or a dictionary) instead of 'global'."
            )
        _, self.bits, self.infinity = _BITS[self.dtype]
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
        found = _Bin(0, self.bits, k, -1)
        while found.shift > 0 and (to_the_last_bit or not found.is_taken_whole):
            counts = self._histogram(found)
            if found.shift == self.bits and (bad := int(counts[self.infinity >> (self.bits - _DIGIT) :].sum())):
                logger.warning("%d non-finite scores in a selection: NaN and infinity count as largest.", bad)
            found = found.next(counts)
            if self.remaining is None and found.size <= _FEW:
                self.remaining = [self._collect(i, found) for i in range(len(self.parts))]
        return found

    def kth_index(self, value: _Bin) -> _Bin:
        """Among the candidates that all equal ``value``, the bin of positions up to which they go."""
        found = _Bin(0, self.total.bit_length(), value.rank, -1)
        while found.shift > 0 and not found.is_taken_whole:
            found = found.next(self._histogram(found, value))
        return found

    def masks(self, is_selected: Callable[[Tensor, _Positions], Tensor]) -> list[Tensor]:
        """Evaluate ``is_selected(keys, positions)`` on every chunk of every tensor."""
        out = []
        for part in self:
            mask = torch.empty(part.flat.numel(), dtype=torch.bool, device=part.flat.device)
            for keys, allowed, positions, start in part.chunks(self.dtype):
                chosen = is_selected(keys, positions)
                mask[start : start + keys.numel()] = chosen if allowed is None else chosen & allowed
            out.append(mask.view(part.shard.local_shape))
        return out

    def _histogram(self, found: _Bin, value: _Bin | None = None) -> Tensor:
        """Counts of the next digit of all keys in ``found``; with ``value``, of the positions of its keys instead."""
        counts = []
        for i, part in enumerate(self.parts):
            total = torch.zeros(1 << found.digit, dtype=torch.int64, device=part.flat.device)
            for keys, positions in self._candidates(i, value or found):
                numbers = keys
                if value is not None:
                    numbers = positions()
                    numbers = numbers[found.holds(numbers)]
                digits = (numbers >> (found.shift - found.digit)) & (len(total) - 1)
                total += torch.bincount(digits, minlength=len(total))
            counts.append(total)
        return self._over_ranks(counts)

    def _candidates(self, i: int, within: _Bin) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """The keys of part ``i`` in the bin ``within``, chunk by chunk, and a function that gives their positions."""
        if self.remaining is not None:
            keys, positions = self.remaining[i]
            inside = within.holds(keys)
            yield keys[inside], functools.partial(positions.__getitem__, inside)
            return
        for keys, allowed, positions_of, _ in self.parts[i].chunks(self.dtype):
            where = allowed
            if within.shift < self.bits:  # not the first pass, which counts all keys
                where = within.holds(keys) if allowed is None else within.holds(keys) & allowed
            yield keys if where is None else keys[where], functools.partial(positions_of, where)

    def _collect(self, i: int, found: _Bin) -> tuple[Tensor, Tensor]:
        """Keys and positions of the candidates in the bin ``found``."""
        chunks = [(keys, positions()) for keys, positions in self._candidates(i, found)]
        empty = torch.empty(0, dtype=torch.int64, device=self.parts[i].flat.device)
        return torch.cat([keys for keys, _ in chunks] or [empty]), torch.cat([at for _, at in chunks] or [empty])

    def _over_ranks(self, counts: Sequence[Tensor]) -> Tensor:
        """Add up counts of each tensor: those of a shard over the ranks, those of a whole tensor once."""
        sharded, whole = torch.zeros_like(counts[0]), torch.zeros_like(counts[0])
        for count, part in zip(counts, self, strict=True):
            (whole if part.shard.group is None else sharded).add_(count.to(whole.device))
        return sum_over_ranks(sharded, self.group) + whole
