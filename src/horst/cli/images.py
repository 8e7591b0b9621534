"""Images for a model, as batches: what ``--data`` names is recognised by its form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from horst.cli.models import LoadedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from horst.lab.data.image_arrays import ImageArrays
    from horst.lab.data.imagenet import ImageNet

DIGITS = "digits"
_RESIZE = 256 / 224  # short side of an image over the side of its middle that is cut out, as DeiT is evaluated


def open_images(
    data: str,
    loaded: LoadedModel,
    *,
    batch_size: int,
    train_batch_size: int = 1,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> ImageArrays | ImageNet:
    """A source of images that fit the model.

    Args:
        data: ``digits`` (scikit-learn's), an ``.npz`` file, the folder of CIFAR-10's binary files, or a folder with
            ``train`` and ``val``, each of class folders or of tar shards.
        loaded: The model; its classes and the size of its images are checked.
        batch_size: Images per batch of the test images.
        train_batch_size: Images per batch of the training images, over all processes.
        rank, world_size: Number of this process, and of those that share the training images.
        device: Device of the batches.
        workers: Processes that decode image files.
    """
    from horst.lab.data.image_arrays import ImageArrays
    from horst.lab.data.image_data import TEST_FILE, read_cifar10, read_digits, read_npz
    from horst.lab.data.imagenet import ImageNet

    path = Path(data)
    _, side, _ = loaded.image_shape
    images: ImageArrays | ImageNet
    if data != DIGITS and not path.exists():
        raise FileNotFoundError(f"there is no {data}. Images are {DIGITS}, an .npz file, or a folder.")
    if (path / "val").is_dir():
        images = ImageNet(
            path, batch_size=train_batch_size, image_size=side, resize=round(_RESIZE * side), device=device,
            workers=workers, evaluation_batch_size=batch_size, rank=rank, world_size=world_size,
        )  # fmt: skip
    else:
        if data == DIGITS:
            read = read_digits()
        elif path.is_file():
            read = read_npz(path)
        elif (path / TEST_FILE).exists():
            read = read_cifar10(path)
        else:
            raise ValueError(
                f"{data} is neither a folder with train and val (class folders or shards) nor one with CIFAR-10's "
                "binary files."
            )
        found = (read.images.shape[3], *read.images.shape[1:3])
        if found != loaded.image_shape:
            raise ValueError(f"the images of {data} are {_size(found)}, the model takes {_size(loaded.image_shape)}.")
        images = ImageArrays(
            read, batch_size=train_batch_size, padding=0, flip=False, device=device, evaluation_batch_size=batch_size,
            rank=rank, world_size=world_size,
        )  # fmt: skip
    if images.classes > loaded.classes:
        raise ValueError(f"{data} has {images.classes} classes, the model has {loaded.classes}.")
    return images


def evaluation_images(images: ImageArrays | ImageNet, loaded: LoadedModel) -> Iterator[tuple[Tensor, Tensor]]:
    """The test images with their classes, scaled as the model wants them."""
    return ((rescaled(pixels, images, loaded), labels) for pixels, labels in images.evaluation_batches())


def calibration_images(images: ImageArrays | ImageNet, loaded: LoadedModel, samples: int) -> list[Tensor]:
    """Training images, not mixed: batches of one image, ``samples`` of them, put together."""
    import torch

    drawn: Iterable[tuple[Tensor, Tensor]] = itertools.islice(images.batches(), samples)
    return list(torch.cat([rescaled(pixels, images, loaded) for pixels, _ in drawn]).split(32))


def rescaled(pixels: Tensor, images: ImageArrays | ImageNet, loaded: LoadedModel) -> Tensor:
    """From ImageNet's mean and deviation to those in the model's config: some models have their own.

    Data sets in arrays are scaled by their own statistics, as models trained on them here are.
    """
    import torch

    from horst.lab.data.imagenet import MEAN, STD, ImageNet

    wanted = loaded.pixel_statistics
    if not isinstance(images, ImageNet) or wanted is None:
        return pixels

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), device=pixels.device).view(-1, 1, 1)

    shares = (pixels * column(STD) + column(MEAN)) / 255
    return (shares - column(wanted[0])) / column(wanted[1])


def _size(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{height} x {width} in {channels} channel{'s' * (channels > 1)}"
