"""Image data sets that fit into memory, as arrays: their form, and where to read them from.

:class:`horst.lab.data.image_arrays.ImageArrays` makes batches of them.
"""

from __future__ import annotations

import dataclasses
import logging
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from horst.extras import load_extra

_ARRAYS = ("images", "labels", "test_images", "test_labels")
TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))  # of CIFAR-10's binary version
TEST_FILE = "test_batch.bin"
RECORD = 1 + 3 * 32 * 32  # the label, then the red, green and blue planes

_logger = logging.getLogger(__name__)


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


def read_cifar10(folder: Path | str) -> ImageData:
    """Read CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 in 10 classes.

    Files with fewer images are read too, and named in a warning.

    Args:
        folder: Holds ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in (*TRAIN_FILES, TEST_FILE):
        ...     size = (folder / name).write_bytes(2 * bytes(RECORD))
        >>> read_cifar10(folder).images.shape
        torch.Size([10, 32, 32, 3])
    """
    folder = Path(folder)
    missing = [name for name in (*TRAIN_FILES, TEST_FILE) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}. Name the folder with the six files of CIFAR-10's binary version, as "
            "unpacked from cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html)."
        )
    images, labels = _read_records([folder / name for name in TRAIN_FILES])
    test_images, test_labels = _read_records([folder / TEST_FILE])
    if (len(images), len(test_images)) != (50_000, 10_000):
        _logger.warning(
            "%s holds %d training and %d test images; CIFAR-10 has 50,000 and 10,000.",
            folder,
            len(images),
            len(test_images),
        )
    return ImageData(
        images=images,
        labels=labels,
        test_images=test_images,
        test_labels=test_labels,
        classes=10,
        mean=(125.3, 123.0, 113.9),  # of the training images
        std=(63.0, 62.1, 66.7),
    )


def _read_records(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """Images (channels last, bytes) and labels."""
    parts = []
    for path in paths:
        content = bytearray(path.read_bytes())
        if not content or len(content) % RECORD:
            raise ValueError(
                f"{path.name} has {len(content)} bytes, which is no whole number of records of {RECORD} bytes. "
                "Unpack CIFAR-10's binary version again."
            )
        records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
        if int(records[:, 0].max()) >= 10:
            raise ValueError(
                f"{path.name} has a label of {int(records[:, 0].max())}; CIFAR-10's are 0 to 9. "
                "Unpack CIFAR-10's binary version again (CIFAR-100 has another format)."
            )
        parts.append(records)
    records = torch.cat(parts)
    images = records[:, 1:].view(-1, 3, 32, 32).permute(0, 2, 3, 1).contiguous()
    return images, records[:, 0].long()


def read_digits() -> ImageData:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 in one channel of values 0 to 16; a quarter of them for testing.

    Example:
        >>> data = read_digits()
        >>> len(data.images), len(data.test_images), data.classes
        (1348, 449, 10)
    """
    digits = load_extra("sklearn.datasets").load_digits()
    images = torch.from_numpy(digits.images).to(torch.uint8).unsqueeze(-1)
    labels = torch.from_numpy(digits.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(labels) // 4], order[len(labels) // 4 :]
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
