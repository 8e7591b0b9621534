r"""Mixup, cutmix and label smoothing as DeiT trains with them, drawn from a seed per step.

Images are mixed in pairs with one :math:`\lambda` per batch, :math:`\lambda \sim \mathrm{Beta}(a, a)`:

.. math::
    x_i' = \lambda x_i + (1 - \lambda) x_j, \qquad y_i' = \lambda y_i + (1 - \lambda) y_j

Cutmix instead pastes a box of :math:`x_j` whose sides are :math:`\sqrt{1 - \lambda}` of the image's, its centre uniform
over the image; what lies outside is cut off, and :math:`\lambda` becomes the share of :math:`x_i` that is really left.

This is timm's ``Mixup`` in batch mode, equal in distribution, with two differences. Image i is paired with its
neighbour (0 with 1, 2 with 3, ...) instead of the batch's mirror image: batches come in random order, so no pair is
likelier than another, and a process that holds an even part of a batch holds whole pairs. The numbers come from the
seed instead of NumPy's global state: processes agree on them and a resumed run repeats them. They are drawn on the
host, which therefore never waits for the device, and the device does the mixing.
"""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from torch import Tensor

Box = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a batch is mixed with: lambda, and for cutmix the box ``(top, bottom, left, right)``."""

    lam: float
    box: Box | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixes a batch and makes its labels soft. The defaults are DeiT's own; the paper names the methods, no numbers.

    Args:
        mixup: Parameter of the Beta distribution for mixup; 0 for no mixup.
        cutmix: Parameter of the Beta distribution for cutmix; 0 for no cutmix. With both, a batch gets one of the two.
        label_smoothing: Share of a target that is spread evenly over all classes.

    Example:
        >>> images, labels = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
        >>> mixed, targets = Mixing()(images, labels, classes=3, seed=7)
        >>> mixed.shape, targets.sum(dim=1)
        (torch.Size([4, 3, 8, 8]), tensor([1., 1., 1., 1.]))
    """

    mixup: float = 0.8
    cutmix: float = 1.0
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}.")

    def draw(self, seed: int, height: int, width: int) -> Draw:
        """Lambda and the box for one batch.

        Args:
            seed: Seed of the draw.
            height, width: Size of the images.
        """
        if not (self.mixup or self.cutmix):
            return Draw(1.0)
        generator = random.Random(seed)
        switch = 0.5 if self.mixup and self.cutmix else float(not self.mixup)
        if generator.random() >= switch:
            return Draw(generator.betavariate(self.mixup, self.mixup))
        ratio = math.sqrt(1.0 - generator.betavariate(self.cutmix, self.cutmix))
        top, bottom = _side(height, ratio, generator)
        left, right = _side(width, ratio, generator)
        area = (bottom - top) * (right - left)
        return Draw(1.0 - area / (height * width), (top, bottom, left, right))

    def __call__(self, images: Tensor, labels: Tensor, *, classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mixed images, and targets of shape ``(batch, classes)`` for ``F.cross_entropy``; the inputs stay as they are.

        Args:
            images: ``(batch, channels, height, width)``, floats.
            labels: ``(batch,)``, the classes' numbers.
            classes: Number of classes.
            seed: Seed of this step; the same in every process.
        """
        draw = self.draw(seed, *images.shape[-2:])
        targets = soft_targets(labels, classes, self.label_smoothing)
        if not (self.mixup or self.cutmix):
            return images, targets
        if len(images) % 2:
            raise ValueError(
                f"mixup and cutmix mix neighbours: a process needs an even number of images, got {len(images)}. "
                "Choose a batch_size that 2 x world_size divides."
            )
        if draw.box is None:
            mixed = torch.lerp(images, neighbours(images), 1.0 - draw.lam)
        else:
            top, bottom, left, right = draw.box
            mixed = images.clone()
            mixed[..., top:bottom, left:right] = neighbours(images[..., top:bottom, left:right])
        return mixed, torch.lerp(targets, neighbours(targets), 1.0 - draw.lam)


def neighbours(batch: Tensor) -> Tensor:
    """Each sample's partner, 0 with 1, 2 with 3 and so on.

    Example:
        >>> neighbours(torch.arange(6))
        tensor([1, 0, 3, 2, 5, 4])
    """
    return batch.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def soft_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """One-hot rows of which the share ``smoothing`` is spread evenly over all classes.

    Example:
        >>> soft_targets(torch.tensor([1]), 4, smoothing=0.5)
        tensor([[0.1250, 0.6250, 0.1250, 0.1250]])
    """
    hot = labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)
    return hot * (1.0 - smoothing) + smoothing / classes


def _side(size: int, ratio: float, generator: random.Random) -> tuple[int, int]:
    """One side of the box: ``ratio`` of ``size`` around a uniform centre, cut off at the borders."""
    cut, centre = int(size * ratio), generator.randrange(size)
    return max(centre - cut // 2, 0), min(centre + (cut + 1) // 2, size)
