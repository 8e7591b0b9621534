"""Batches from a data set that stays on the device and is augmented there: no workers, no copies, no waiting."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.lab.data.epoch_order import EpochOrder, derive_seed, evaluation_parts
from horst.lab.data.image_data import ImageData, normalise
from horst.lab.data.mixing import Mixing


class ImageArrays:
    """A source of batches: random crops and flips, and mixing if wanted.

    Batch k depends on (seed, k, rank, world size) alone, so a run resumes with ``batches(k)``. Order and mixing are the
    same on every device; crops and flips are drawn by the device's own generator. Everything is drawn for the batch of
    all processes, of which each takes its part: together they see the same images for every world size.

    Args:
        data: Images, as :func:`~horst.lab.data.image_data.read_cifar10` returns them.
        batch_size: Samples per batch, over all processes.
        seed: Seed of order, augmentation and mixing.
        rank, world_size: Number of this process, and of all processes.
        device: Device that holds the images. The sides of training images grow by ``2 * padding``.
        padding: An image is cropped at random out of a black frame of this width; 0 for none.
        flip: Whether half of the images are mirrored. Not for digits.
        mixing: Mixup, cutmix and label smoothing; targets are then rows of shares instead of the classes' numbers.
        evaluation_batch_size: Images per batch of one process.

    Example:
        >>> from horst.lab.data.image_data import read_digits
        >>> source = ImageArrays(read_digits(), batch_size=64, padding=1, flip=False, mixing=Mixing())
        >>> images, targets = next(source.batches(start=100))
        >>> images.shape, targets.shape, source.steps_per_epoch
        (torch.Size([64, 1, 8, 8]), torch.Size([64, 10]), 21)
    """

    def __init__(
        self,
        data: ImageData,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        padding: int = 4,
        flip: bool = True,
        mixing: Mixing | None = None,
        evaluation_batch_size: int = 1000,
    ) -> None:
        if padding < 0:
            raise ValueError(f"padding must be at least 0, got {padding}. Use 0 for no random crop.")
        self.order = EpochOrder(
            samples=len(data.images), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size
        )
        parts = evaluation_parts(len(data.test_images), evaluation_batch_size, rank=rank, world_size=world_size)
        self.classes = data.classes
        self.padding = padding
        self.flip = flip
        self.mixing = mixing
        self.device = torch.device(device)
        frame = (0, 0, padding, padding, padding, padding)
        self._images = F.pad(data.images, frame).to(self.device)
        self._labels = data.labels.to(self.device)
        self._rows, self._columns = (torch.arange(side, device=self.device) for side in data.images.shape[1:3])
        self._tests = [
            (data.test_images[part].to(self.device), data.test_labels[part].to(self.device)) for part in parts
        ]
        self._mean = torch.tensor(data.mean, device=self.device)
        self._std = torch.tensor(data.std, device=self.device)
        self._generator = torch.Generator(self.device)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training images."""
        return self.order.steps_per_epoch

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's parts of batch ``start`` and all that follow, without end: images and targets."""
        return (self._batch(step, index) for step, _, index in self.order.batches(start, self.device))

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images, not augmented, with the classes' numbers."""
        return ((normalise(images, self._mean, self._std), labels) for images, labels in self._tests)

    def _batch(self, step: int, index: Tensor) -> tuple[Tensor, Tensor]:
        order = self.order
        self._generator.manual_seed(derive_seed(order.seed, "augment", step))
        # For the batch of all processes, of which this one takes its part.
        shifts = self._random(2 * self.padding + 1, (2, order.batch_size))[:, order.part]
        flips = self._random(2, (order.batch_size,))[order.part]
        rows = shifts[0, :, None] + self._rows
        columns = shifts[1, :, None] + self._columns
        if self.flip:
            columns = torch.where(flips[:, None] == 1, columns.flip(1), columns)
        cropped = self._images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        images, labels = normalise(cropped, self._mean, self._std), self._labels[index]
        if self.mixing is None:
            return images, labels
        return self.mixing(images, labels, classes=self.classes, seed=derive_seed(order.seed, "mixing", step))

    def _random(self, high: int, size: tuple[int, ...]) -> Tensor:
        return torch.randint(high, size, generator=self._generator, device=self.device)
