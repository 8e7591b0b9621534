"""Which samples make up batch k: a permutation per epoch, whole batches, one part of each batch per process.

Nothing here has a state: batch k is a function of (seed, k, rank, world size), so a checkpoint needs to know no more of
the data than the number of steps done.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor


def derive_seed(*parts: int | str) -> int:
    """64 bits that depend on all parts and on nothing else: the same in every process, on every machine.

    Example:
        >>> derive_seed(0, "order", 1) == derive_seed(0, "order", 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def part_of_batch(batch_size: int, rank: int, world_size: int) -> slice:
    """The rows of a batch of all processes that the process ``rank`` takes.

    Example:
        >>> part_of_batch(8, rank=1, world_size=2)
        slice(4, 8, None)
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size), got rank={rank}, world_size={world_size}.")
    if batch_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size counts the rows of all {world_size} processes and must be a positive multiple of their "
            f"number, got {batch_size}."
        )
    size = batch_size // world_size
    return slice(rank * size, (rank + 1) * size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochOrder:
    """The order of the samples: each epoch a new permutation, cut into whole batches; what is left over is not used.

    The batches of all processes together are the same for every world size: a process takes one contiguous part.

    Args:
        samples: Size of the data set.
        batch_size: Samples per batch, over all processes.
        seed: Seed of the permutations.
        rank, world_size: Number of this process, and of all processes.

    Example:
        >>> order = EpochOrder(samples=10, batch_size=4, seed=0, rank=1, world_size=2)
        >>> [(step, epoch, len(index)) for step, epoch, index in itertools.islice(order.batches(1), 3)]
        [(1, 0, 2), (2, 1, 2), (3, 1, 2)]
    """

    samples: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        part_of_batch(self.batch_size, self.rank, self.world_size)  # refuses what cannot be
        if self.samples < self.batch_size:
            raise ValueError(
                f"{self.samples} training samples make no batch of {self.batch_size}. Use a smaller batch_size."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the data set."""
        return self.samples // self.batch_size

    @property
    def part(self) -> slice:
        """What this process takes of a batch."""
        return part_of_batch(self.batch_size, self.rank, self.world_size)

    def permutation(self, epoch: int) -> Tensor:
        """The order of the samples in an epoch, drawn on the CPU: the same on every device."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", epoch))
        return torch.randperm(self.samples, generator=generator)

    def batches(self, start: int = 0, device: torch.device | str = "cpu") -> Iterator[tuple[int, int, Tensor]]:
        """From batch ``start`` on and without end: the step, its epoch, and this process's samples.

        Args:
            start: Steps done so far.
            device: Device for the samples' numbers. They are copied once per epoch, and the host does not wait.
        """
        if start < 0:
            raise ValueError(f"start is the number of steps done and must be at least 0, got {start}.")
        return self._batches(start, torch.device(device))

    def _batches(self, start: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        first_epoch, first_place = divmod(start, self.steps_per_epoch)
        for epoch in itertools.count(first_epoch):
            order = self.permutation(epoch)
            if device.type == "cuda":
                order = order.pin_memory()  # the host would wait for a copy from other memory
            order = order.to(device, non_blocking=True)
            for place in range(first_place, self.steps_per_epoch):
                batch = order[place * self.batch_size : (place + 1) * self.batch_size]
                yield epoch * self.steps_per_epoch + place, epoch, batch[self.part]
            first_place = 0


def evaluation_parts(samples: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> list[Tensor]:
    """Every sample once over all processes, in as many batches for each: a sharded model needs them to keep step.

    Sizes within a process differ by at most 1, so that a compiled model sees two shapes at most. Weigh a batch by its
    size when averaging.

    Args:
        samples: Size of the data set.
        batch_size: Largest batch of one process, if it is 2 or more.

    Example:
        >>> [part.tolist() for part in evaluation_parts(7, 2, rank=1, world_size=2)]
        [[1, 3], [5]]
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, world_size), got rank={rank}, world_size={world_size}.")
    if batch_size < 1:
        raise ValueError(f"the batch size of the evaluation must be at least 1, got {batch_size}.")
    if samples < world_size:
        raise ValueError(f"{samples} test samples do not give each of {world_size} processes one. Use fewer processes.")
    batches = math.ceil(math.ceil(samples / world_size) / batch_size)
    # Shares differ by one sample: no more batches than the smallest share, or one would be empty.
    batches = min(batches, samples // world_size)
    return list(torch.arange(rank, samples, world_size).tensor_split(batches))
