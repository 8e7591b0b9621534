"""The patterns of a mask: single weights, blocks, or N:M; and how masks are packed and hashed.

A pattern divides each weight tensor into *units* that are kept or removed whole. For an unstructured mask a unit is a
weight, for ``(rows, columns)`` it is a block of a matrix; how many units go is the distribution's business, which ones
is :mod:`horst.sparsity.selection`'s. N:M keeps N of each M neighbours along the input dimension and so needs neither.

Masks are boolean, True where a weight is kept. What the engine stores, and calls ``pruned``, is the opposite, because
zeroing is ``masked_fill_(pruned, 0)``: unlike a product with the mask, it also clears NaN and infinity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor, nn

from horst.parameters.sharding import Shard, as_shard_of, local_shard, mix, part_of, sum_over_ranks
from horst.sparsity.selection import exact_floor, magnitude_keys, select


@dataclass(frozen=True)
class Block:
    """Units are blocks of ``rows`` x ``columns`` of a matrix; ``Block(1, 1)`` is an unstructured mask.

    A block's score is the sum of its entries' magnitudes.

    Example:
        >>> magnitude_mask(torch.tensor([[9.0, 0.0, 1.0, 1.0]]), 0.5, pattern=(1, 2))
        tensor([[ True,  True, False, False]])
    """

    rows: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"a block needs at least one row and one column, got {self.rows} x {self.columns}.")

    @property
    def is_unstructured(self) -> bool:
        """Whether each weight is its own unit."""
        return self.rows == self.columns == 1

    def check(self, name: str, shape: Sequence[int], input_dim: int) -> None:
        """Refuse a tensor that the blocks do not tile."""
        if self.is_unstructured:
            return
        if len(shape) != 2 or shape[0] % self.rows or shape[1] % self.columns:
            raise ValueError(
                f"blocks of {self.rows} x {self.columns} do not tile {name} of shape {tuple(shape)}. "
                "Choose a block that divides the matrix, or exclude this layer."
            )

    def units(self, shard: Shard) -> Shard:
        """The shard of the grid of units."""
        return shard if self.is_unstructured else shard.divided((self.rows, self.columns))

    def unit_scores(self, scores: Tensor) -> Tensor:
        """One score for each unit of the local ``scores``."""
        if self.is_unstructured:
            return scores
        # A 16-bit sum would round unequal blocks to the same score, or to infinity.
        dtype = torch.promote_types(scores.dtype, torch.float32)
        return self._grid(scores).abs().sum(dim=(1, 3), dtype=dtype)

    def shrink(self, mask: Tensor) -> Tensor:
        """A mask over weights, constant on every unit, as a mask over units."""
        return mask if self.is_unstructured else self._grid(mask)[:, 0, :, 0]

    def expand(self, units: Tensor) -> Tensor:
        """A mask over units as a mask over weights."""
        if self.is_unstructured:
            return units
        return units.repeat_interleave(self.rows, 0).repeat_interleave(self.columns, 1)

    def _grid(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] // self.rows, self.rows, x.shape[1] // self.columns, self.columns)


@dataclass(frozen=True)
class NM:
    """Keep the ``n`` largest of each ``m`` consecutive weights along the input dimension.

    Ties as everywhere: of two equal weights the one with the lower index goes first.

    Example:
        >>> NM(2, 4).mask(torch.tensor([[4.0, -3.0, 2.0, 1.0]]), input_dim=1)
        tensor([[ True,  True, False, False]])
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise ValueError(f"N:M needs 0 < N < M, got {self.n}:{self.m}. 2:4 keeps two of each four weights.")

    @property
    def sparsity(self) -> float:
        """Share of zeros, (M - N) / M."""
        return (self.m - self.n) / self.m

    def check(self, name: str, shape: Sequence[int], input_dim: int) -> None:
        """Refuse a tensor whose input dimension is no multiple of M."""
        if shape[input_dim] % self.m:
            raise ValueError(
                f"{self.n}:{self.m} needs an input dimension that is a multiple of {self.m}, but {name} has "
                f"{shape[input_dim]} (shape {tuple(shape)}). Exclude this layer or choose another M."
            )

    def check_shard(self, name: str, shard: Shard, input_dim: int) -> None:
        """Refuse a cut between ranks that goes through a group."""
        if shard.dim == input_dim and (shard.offset % self.m or shard.length % self.m):
            raise ValueError(
                f"groups of {self.m} cross the cut between ranks: this one holds {shard.length} of the "
                f"{shard.shape[input_dim]} inputs of {name}. Shard another dimension, or exclude this layer."
            )

    def mask(self, scores: Tensor, input_dim: int) -> Tensor:
        """The mask of a tensor with these scores, True where a weight is kept."""
        inputs_last = scores.movedim(input_dim, -1)
        groups = magnitude_keys(inputs_last.reshape(-1, self.m))
        # The rank of each weight in its group, counted by comparison: for small M far cheaper than a sort.
        rank = torch.zeros(groups.shape, dtype=torch.int16, device=groups.device)
        for j in range(self.m):
            pivot = groups[:, j : j + 1]
            rank[:, :j] += groups[:, :j] > pivot
            rank[:, j + 1 :] += groups[:, j + 1 :] >= pivot
        return (rank >= self.m - self.n).view(inputs_last.shape).movedim(-1, input_dim).contiguous()


Pattern = str | tuple[int, int] | Block | NM | None


def parse_pattern(pattern: Pattern) -> Block | NM:
    """The pattern that None (single weights), ``"2:4"``, or ``(rows, columns)`` of a block stands for.

    Example:
        >>> parse_pattern("2:4"), parse_pattern((16, 16))
        (NM(n=2, m=4), Block(rows=16, columns=16))
    """
    if isinstance(pattern, (Block, NM)):
        return pattern
    if isinstance(pattern, tuple) and len(pattern) == 2:
        return Block(*pattern)
    if pattern is None:
        return Block()
    if isinstance(pattern, str) and (match := re.fullmatch(r"(\d+):(\d+)", pattern)):
        return NM(int(match[1]), int(match[2]))
    raise ValueError(
        f"pattern must be None for single weights, 'N:M' such as '2:4', or (rows, columns) of a block, got {pattern!r}."
    )


def magnitude_mask(weight: Tensor, sparsity: float | None = None, *, pattern: Pattern = None) -> Tensor:
    """The mask that keeps the largest weights of one tensor: exactly ``floor(sparsity * units)`` units go.

    Args:
        weight: A tensor or DTensor; of a DTensor the mask of this rank's part is returned.
        sparsity: Share of zeros, in [0, 1); None for N:M, which fixes it.
        pattern: Pattern of the mask, see :func:`parse_pattern`. N:M groups along dimension 1, the input of
            ``nn.Linear``.

    Example:
        >>> magnitude_mask(torch.tensor([3.0, -1.0, 2.0, 1.0]), 0.5)
        tensor([ True, False,  True, False])
    """
    parsed = parse_pattern(pattern)
    parsed.check("the weight", weight.shape, min(1, weight.dim() - 1))
    check_sparsity(sparsity, parsed)
    if isinstance(parsed, NM):
        return parsed.mask(local_shard(weight), min(1, weight.dim() - 1))
    assert sparsity is not None
    units, scores = parsed.units(Shard.of(weight)), parsed.unit_scores(local_shard(weight))
    return ~parsed.expand(select([scores], [units], exact_floor(sparsity, units.numel))[0])


def check_sparsity(sparsity: float | None, pattern: Block | NM | None = None) -> None:
    """Refuse what is no share of zeros in [0, 1), or not the one that N:M fixes. None is for N:M only."""
    if sparsity is None:
        if not isinstance(pattern, NM):
            raise ValueError("sparsity is needed unless the pattern is N:M. Give a fraction: 0.5 removes half.")
        return
    if not isinstance(sparsity, SupportsFloat):
        raise TypeError(f"sparsity must be a number in [0, 1), got {sparsity!r}. Give a fraction: 0.5, not '50%'.")
    if not 0.0 <= sparsity < 1.0:  # this form refuses NaN too
        raise ValueError(f"sparsity must lie in [0, 1), got {sparsity}. Give a fraction: 0.9, not 90.")
    if isinstance(pattern, NM) and sparsity != pattern.sparsity:
        raise ValueError(
            f"{pattern.n}:{pattern.m} fixes the sparsity at {pattern.sparsity}, got sparsity={sparsity}. "
            "Leave sparsity out, or choose another pattern."
        )


_WEIGHTS_OF_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack(mask: Tensor) -> Tensor:
    """Eight booleans per byte (uint8, lowest bit first), for checkpoints.

    Example:
        >>> pack(torch.tensor([True, False, True]))
        tensor([5], dtype=torch.uint8)
    """
    flat = mask.reshape(-1)
    packed = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=mask.device)
    for bit, weight in enumerate(_WEIGHTS_OF_BITS):
        lane = flat[bit::8]
        packed[: lane.numel()] |= lane.to(torch.uint8) * weight
    return packed


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """The boolean mask of ``shape`` that :func:`pack` made ``packed`` of.

    Example:
        >>> unpack(torch.tensor([5], dtype=torch.uint8), (3,))
        tensor([ True, False,  True])
    """
    n = math.prod(shape)
    flat = torch.empty(n, dtype=torch.bool, device=packed.device)
    for bit, weight in enumerate(_WEIGHTS_OF_BITS):
        lane = flat[bit::8]
        lane.copy_((packed[: lane.numel()] & weight) != 0)
    return flat.view(tuple(shape))


def save_bits(weight: Tensor, bits: Tensor) -> Tensor:
    """This rank's booleans for a checkpoint: eight per byte, or for a sharded weight a DTensor placed like it."""
    whole = as_shard_of(weight, bits)
    return pack(bits) if whole is bits else whole


def load_bits(weight: Tensor, saved: Tensor) -> Tensor:
    """This rank's part, on its device, of what :func:`save_bits` gave on any number of ranks."""
    return part_of(weight, unpack(saved, tuple(weight.shape)) if saved.dtype == torch.uint8 else saved)


def mask_hash(masks: Sequence[Tensor], shards: Sequence[Shard]) -> int:
    """A 64-bit hash of the masks of whole tensors, computed from shards: the same for any number of ranks.

    The sum, modulo 2^64, of the hashes of the indices where the masks are True: sums add up over ranks, whatever the
    order.
    """
    total, base = 0, 0
    for mask, shard in zip(masks, shards, strict=True):
        part = torch.zeros(1, dtype=torch.int64, device=mask.device)
        flat = mask.reshape(-1)
        for start in range(0, flat.numel(), 1 << 22):
            index = flat[start : start + (1 << 22)].nonzero().squeeze(1) + start
            part += mix(shard.positions(index) + base).sum()
        total += int(sum_over_ranks(part, shard.group))
        base += shard.numel
    return total % (1 << 64)


def check_replicas(model: nn.Module, mask_hash: Callable[[], int]) -> None:
    """Under DDP: refuse masks that differ between ranks, which would silently train different networks."""
    model = getattr(model, "_orig_mod", model)  # torch.compile goes around DDP
    if not (dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel)):
        return
    mine = mask_hash()
    hashes: list[Any] = [None] * dist.get_world_size(model.process_group)
    dist.all_gather_object(hashes, mine, group=model.process_group)
    if any(other != mine for other in hashes):
        raise RuntimeError(
            f"masks differ between ranks: hashes {hashes}. The replicas' weights must be equal; compute scores from "
            "gradients that are averaged over the ranks."
        )
