"""Image data sets that fit into memory, as arrays: their form, and two places to read them from.

CIFAR-10 is in :mod:`horst.lab.data.cifar10`. :class:`horst.lab.data.image_arrays.ImageArrays` makes batches of any of
them.
"""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path

import torch
from torch import Tensor

from horst.extras import load_extra

_ARRAYS = ("images", "labels", "test_images", "test_labels")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageData:
    """Training and test images with their labels.

    Args:
        images, test_images: Bytes, channels last: ``(samples, height, width, channels)``.
        labels, test_labels: int64, in ``[0, classes)``.
        classes: Number of classes.
        mean, std: Statistics per channel, on the scale of the bytes.

    Example:
        >>> images, labels = torch.randint(256, (6, 8, 8, 3), dtype=torch.uint8), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> mean, std = channel_statistics(images)
        >>> data = ImageData(images=images[:4], labels=labels[:4], test_images=images[4:], test_labels=labels[4:],
        ...                  classes=3, mean=mean, std=std)
    """

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("images", "test_images"):
            images: Tensor = getattr(self, name)
            if images.dtype != torch.uint8 or images.dim() != 4 or 0 in images.shape:
                raise ValueError(
                    f"{name} must be bytes of shape (samples, height, width, channels), none of them 0, got "
                    f"{images.dtype} of shape {tuple(images.shape)}."
                )
            labels: Tensor = getattr(self, name.replace("images", "labels"))
            if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
                raise ValueError(
                    f"the labels of {len(images)} {name} must be as many int64 numbers, got {labels.dtype} of shape "
                    f"{tuple(labels.shape)}."
                )
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.classes:
                raise ValueError(f"labels must lie in [0, classes={self.classes}), {name} have {low} to {high}.")
        if self.images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"training images of shape {tuple(self.images.shape[1:])} and test images of shape "
                f"{tuple(self.test_images.shape[1:])} do not go together."
            )
        channels = self.images.shape[-1]
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            raise ValueError(
                f"mean and std need one number for each of {channels} channels, and std a positive one, got "
                f"mean={self.mean}, std={self.std}. If {channels} is not the number of channels, these are not last."
            )


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, exact; a constant channel gets a deviation of 1.

    Args:
        images: Bytes, channels last.

    Example:
        >>> channel_statistics(torch.tensor([[[[0], [4]]]], dtype=torch.uint8))
        ((2.0,), (2.0,))
    """
    values = torch.arange(256, dtype=torch.float64)
    means, deviations = [], []
    for channel in images.unbind(-1):
        share = torch.bincount(channel.flatten(), minlength=256).double().cpu() / channel.numel()
        mean = share @ values
        means.append(float(mean))
        deviations.append(float((share @ (values - mean).square()).sqrt()) or 1.0)
    return tuple(means), tuple(deviations)


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Bytes, channels last, to floats ``(samples, channels, height, width)`` of mean 0 and deviation 1.

    The result is in the memory format ``torch.channels_last``: nothing is moved.
    """
    return ((images - mean) / std).permute(0, 3, 1, 2)


def read_npz(path: Path | str) -> ImageData:
    """A data set from NumPy's ``.npz``: bytes ``images`` and ``test_images``, integers ``labels`` and ``test_labels``.

    Images are channels last, or ``(samples, height, width)``. Files with pickled objects are refused.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. It must be an .npz with {', '.join(_ARRAYS)}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path.name} is no whole .npz archive. Write it with numpy.savez.")
    tensors = {}
    with load_extra("numpy").load(path, allow_pickle=False) as archive:
        missing = [name for name in _ARRAYS if name not in archive]
        if missing:
            raise ValueError(
                f"{path.name} lacks {', '.join(missing)}: it needs {', '.join(_ARRAYS)} and has "
                f"{', '.join(archive) or 'nothing'}."
            )
        for name in _ARRAYS:
            try:
                array = archive[name]
            except (ValueError, zipfile.BadZipFile) as error:  # pickled objects; damaged bytes
                raise ValueError(f"{name} of {path.name} cannot be read: {error}") from error
            if name.endswith("labels"):
                wanted, fits = "integers", array.dtype.kind in "iu"
            else:
                wanted, fits = "bytes (uint8) of 3 or 4 dimensions", array.dtype == "uint8" and array.ndim in (3, 4)
            if not fits:
                raise ValueError(f"{name} of {path.name} must be {wanted}, got {array.dtype} of shape {array.shape}.")
            tensors[name] = torch.from_numpy(array.astype("int64") if wanted == "integers" else array)
            if tensors[name].dim() == 3:
                tensors[name] = tensors[name].unsqueeze(-1)
    labels, test_labels = tensors["labels"], tensors["test_labels"]
    classes = 1 + max((int(part.max()) for part in (labels, test_labels) if part.numel()), default=0)
    mean, std = channel_statistics(tensors["images"])
    return ImageData(**tensors, classes=classes, mean=mean, std=std)


def read_digits(seed: int = 0, *, test_share: float = 0.25) -> ImageData:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 in one channel of values 0 to 16, split by ``seed``.

    Example:
        >>> data = read_digits()
        >>> len(data.images), len(data.test_images), data.classes
        (1348, 449, 10)
    """
    if not 0.0 < test_share < 1.0:
        raise ValueError(f"test_share must lie in (0, 1), got {test_share}.")
    digits = load_extra("sklearn.datasets").load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(-1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    tests = int(test_share * len(labels))
    test, train = order[:tests], order[tests:]
    mean, std = channel_statistics(images[train])
    return ImageData(
        images=images[train],
        labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        classes=10,
        mean=mean,
        std=std,
    )
