"""CIFAR-10 from the six files of its binary version."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from horst.lab.data.image_data import ImageData

TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
CLASSES, SIDE = 10, 32
RECORD = 1 + 3 * SIDE * SIDE  # the label, then the red, green and blue planes
# Of the training images, on the scale of their bytes.
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)

_logger = logging.getLogger(__name__)


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
        classes=CLASSES,
        mean=MEAN,
        std=STD,
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
        if int(records[:, 0].max()) >= CLASSES:
            raise ValueError(
                f"{path.name} has a label of {int(records[:, 0].max())}; CIFAR-10's are 0 to {CLASSES - 1}. "
                "Unpack CIFAR-10's binary version again (CIFAR-100 has another format)."
            )
        parts.append(records)
    records = torch.cat(parts)
    images = records[:, 1:].view(-1, 3, SIDE, SIDE).permute(0, 2, 3, 1).contiguous()
    return images, records[:, 0].long()
