"""Where a tensor's entries lie when ranks share it: the one place that knows about DTensor.

Everything else in this package works on local tensors and asks a :class:`Shard` two things: which index an entry has
in the whole tensor, and what the sum of a count over the ranks is. That is enough for exact selection (counts), for
random scores and mask hashes (indices), and it never gathers a shard.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    # Importing the module takes as long as half of torch. Where nobody has, no tensor can be a DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` held by this rank, detached and sharing its memory; a plain tensor is its own part."""
    if _is_dtensor(tensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def as_shard_of(whole: Tensor, part: Tensor) -> Tensor:
    """``part``, this rank's part of a tensor shaped like ``whole``, as a DTensor placed like it; else as it is.

    This is what checkpoints hold: ``torch.distributed.checkpoint`` can hand a DTensor to any number of ranks.
    """
    if not _is_dtensor(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def part_of(whole: Tensor, saved: Tensor) -> Tensor:
    """This rank's part, on its device, of a tensor shaped like ``whole`` that was saved whole or as a DTensor.

    Example:
        >>> part_of(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)).shape
        torch.Size([2, 3])
    """
    mine = local_shard(whole)
    if saved.shape != whole.shape:
        raise ValueError(f"a saved tensor has shape {tuple(saved.shape)}, here it is {tuple(whole.shape)}.")
    part = local_shard(saved)
    if not _is_dtensor(saved) and _is_dtensor(whole):
        shard = Shard.of(whole)
        part = part.narrow(shard.dim, shard.offset, shard.length)
    if part.shape != mine.shape:
        raise ValueError(
            f"a saved tensor of shape {tuple(saved.shape)} is cut as on another number of ranks: this rank's part is "
            f"{tuple(part.shape)} there and {tuple(mine.shape)} here. Save and load it with "
            "torch.distributed.checkpoint, which cuts it again, or save it whole."
        )
    if _is_dtensor(saved) and _is_dtensor(whole) and _place(saved) != _place(whole):
        raise ValueError(
            f"a saved tensor of shape {tuple(saved.shape)} holds the part of another rank, at {_place(saved)} of the "
            f"mesh and not at {_place(whole)}: one rank's state was given to all, as accelerate's "
            "register_for_checkpointing does. Save and load it on each rank in a file of its own, or use "
            "torch.distributed.checkpoint."
        )
    return part.to(mine.device)


def _place(tensor: DTensor) -> list[int]:
    """Where on the mesh a part comes from, along the dimensions that cut the tensor; a file keeps it."""
    where = tensor.device_mesh.get_coordinate() or ()
    return [i for i, placement in zip(where, tensor.placements, strict=False) if not placement.is_replicate()]


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that this rank holds, cut along one dimension.

    A flat local index ``i`` has the flat index ``(i // local_block) * global_block + start + i % local_block`` in the
    whole tensor.

    Args:
        shape: Shape of the whole tensor.
        dim: The dimension that is cut. A tensor that is not cut has ``dim=0``, ``offset=0`` and all of its rows.
        offset: Index of this rank's first slice along ``dim``.
        length: Number of slices along ``dim`` held here.
        group: The process group whose ranks hold the other parts; None where the tensor is whole.

    Example:
        >>> Shard((2, 6), dim=1, offset=2, length=2, group=None).positions(torch.arange(4)).tolist()
        [2, 3, 8, 9]
    """

    shape: tuple[int, ...]
    dim: int
    offset: int
    length: int
    group: Any

    @classmethod
    def of(cls, tensor: Tensor) -> Shard:
        """The shard of ``tensor`` on this rank: of a DTensor by its placements, of a plain tensor all of it."""
        shape = tuple(tensor.shape)
        if not _is_dtensor(tensor):
            return cls(shape, 0, 0, shape[0] if shape else 1, None)
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor import Shard as ShardPlacement

        cut = [(i, placement) for i, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
        if not cut:
            return cls(shape, 0, 0, shape[0] if shape else 1, None)
        mesh_dim, placement = cut[0]
        # A subclass of Shard cuts in another order; a sum yet to be made (Partial) is no weight at all.
        if len(cut) > 1 or not isinstance(placement, ShardPlacement) or type(placement) is not ShardPlacement:
            raise NotImplementedError(
                f"masks work on tensors sharded along one mesh dimension, got placements {tensor.placements}. "
                "Shard with fully_shard over one dimension (others may replicate), or exclude this layer."
            )
        dim = placement.dim % len(shape)
        ranks = tensor.device_mesh.size(mesh_dim)
        rows = -(-shape[dim] // ranks)  # as torch.chunk cuts: all parts equal but the last ones
        offset = min(rows * tensor.device_mesh.get_local_rank(mesh_dim), shape[dim])
        length = min(rows, shape[dim] - offset)
        assert tensor.to_local().shape[dim] == length
        return cls(shape, dim, offset, length, tensor.device_mesh.get_group(mesh_dim))

    @property
    def numel(self) -> int:
        """Entries of the whole tensor."""
        return math.prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part held here."""
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :]) if self.shape else ()

    def positions(self, index: Tensor) -> Tensor:
        """The flat index in the whole tensor of each flat local ``index`` (int64)."""
        inner = math.prod(self.shape[self.dim + 1 :])
        local_block, global_block = self.length * inner, math.prod(self.shape[self.dim : self.dim + 1]) * inner
        if local_block == global_block:
            return index
        outer = torch.div(index, max(local_block, 1), rounding_mode="floor")
        return outer * (global_block - local_block) + index + self.offset * inner

    def entry(self, i: int) -> tuple[Shard, Any]:
        """The shard of entry ``i`` along dimension 0, and the index that takes it out of the local part.

        Example:
            >>> Shard((4, 2, 3), dim=0, offset=2, length=2, group=None).entry(3)
            (Shard(shape=(2, 3), dim=0, offset=0, length=2, group=None), 1)
        """
        if self.dim:
            return Shard(self.shape[1:], self.dim - 1, self.offset, self.length, self.group), i
        if self.offset <= i < self.offset + self.length:
            return Shard(self.shape[1:], 0, 0, self.shape[1], self.group), i - self.offset
        return Shard(self.shape[1:], 0, 0, 0, self.group), (slice(0, 0), 0)  # another rank holds it

    def divided(self, by: Sequence[int]) -> Shard:
        """The shard of a grid of blocks of shape ``by`` laid over the tensor; blocks may not cross the cut."""
        if self.offset % by[self.dim] or self.length % by[self.dim]:
            raise ValueError(
                f"blocks of {tuple(by)} do not fit this rank's shard, {self.length} of {self.shape[self.dim]} slices "
                f"along dimension {self.dim}. Choose a block that divides each rank's part, or shard another dimension."
            )
        shape = tuple(size // step for size, step in zip(self.shape, by, strict=True))
        return Shard(shape, self.dim, self.offset // by[self.dim], self.length // by[self.dim], self.group)


def sum_over_ranks(tensor: Tensor, group: Any = "all") -> Tensor:
    """``tensor`` summed over ranks, in place.

    Args:
        tensor: The tensor, on every rank of the group.
        group: The process group; ``"all"`` is every rank there is, None leaves the tensor as it is.

    Example:
        >>> sum_over_ranks(torch.ones(2))
        tensor([1., 1.])
    """
    if isinstance(group, str):
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


# Mixing constants of splitmix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GAMMA, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mix(x: Tensor) -> Tensor:
    """The splitmix64 hash of each int64: the same bits on every device, rank and torch version.

    Example:
        >>> mix(torch.tensor([0, 1])).tolist()
        [-2152535657050944081, -7995527694508729151]
    """
    x = x + _GAMMA
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_scores(shard: Shard, key: int, device: torch.device) -> Tensor:
    """Uniform float32 scores in [0, 1) for the local entries, a hash of ``key`` and the index in the whole tensor.

    Hence no generator state, and the same numbers on one rank as on many, on a CPU as on a GPU.
    """
    positions = shard.positions(torch.arange(math.prod(shard.local_shape), device=device))
    bits = mix(mix(torch.tensor(key, device=device)) ^ positions)
    return (_shift(bits, 40).to(torch.float32) * 2.0**-24).view(shard.local_shape)
