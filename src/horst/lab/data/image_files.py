"""Images in files, found once and read at random: class folders, or tar shards.

A shard is an uncompressed ``.tar`` with an image and its class for each sample, ``0001.jpg`` and ``0001.cls``, as
webdataset writes them. The headers are read once for where each image lies; from then on a shard is as good as a folder
for reading in any order, with no package and no unpacking.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor

from horst.extras import load_extra

if TYPE_CHECKING:
    from PIL.Image import Image

_logger = logging.getLogger(__name__)

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImageFiles:
    """Where each image lies, and its label.

    Args:
        paths: Files, a NumPy array of bytes: loader processes would copy a list of strings by counting references.
        file: Number of each image's file, int64, ``(images,)``.
        offset: First byte of each image in its file.
        size: Bytes of each image; -1 for all of the file.
        labels: Class of each image, int64, from 0.
        classes: Number of classes.
        class_names: Names of the folders by label; None for shards, which know numbers alone.
    """

    paths: Any
    file: Tensor
    offset: Tensor
    size: Tensor
    labels: Tensor
    classes: int
    class_names: tuple[str, ...] | None

    def __len__(self) -> int:
        return len(self.labels)

    def place(self, index: int) -> str:
        """The image's file and where in it, for messages."""
        offset = int(self.offset[index])
        path = os.fsdecode(self.paths[int(self.file[index])])
        return f"{path} at byte {offset}" if int(self.size[index]) >= 0 else path

    def load(self, index: int) -> Image:
        """Decode one image, as RGB."""
        load_extra("torchvision")  # brings Pillow, and names the extra where it is missing
        import PIL.Image

        size = int(self.size[index])
        with open(os.fsdecode(self.paths[int(self.file[index])]), "rb") as file:
            file.seek(int(self.offset[index]))
            content = file.read(size)
        try:
            with PIL.Image.open(io.BytesIO(content)) as image:
                return image.convert("RGB")
        # Pillow's errors are OSErrors, but for two: a PNG's SyntaxError, and a size that is beyond reason.
        except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise ValueError(f"{self.place(index)} is no whole image: {error}. Replace it or take it out.") from error


def find_images(folder: Path | str) -> ImageFiles:
    """Images in a folder of class folders (torchvision's ``ImageFolder`` layout) or of ``.tar`` shards.

    Classes are numbered by the sorted names of their folders; images come in sorted order. Shards hold the numbers.

    Example:
        >>> import PIL.Image, tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("cat", "dog"):
        ...     (folder / name).mkdir()
        ...     PIL.Image.new("RGB", (8, 8)).save(folder / name / "1.jpg")
        >>> files = find_images(folder)
        >>> files.class_names, files.labels
        (('cat', 'dog'), tensor([0, 1]))
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder. It must hold a folder for each class, or .tar shards.")
    shards = sorted(folder.glob("*.tar"))
    return _in_shards(shards) if shards else _in_folders(folder)


def _in_folders(root: Path) -> ImageFiles:
    numpy = load_extra("numpy")
    class_names = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir()))
    if not class_names:
        raise FileNotFoundError(
            f"{root} holds neither class folders nor .tar shards. Sort the images into a folder for each class, or "
            "give shards; compressed ones (.tar.gz) must be unpacked to .tar first."
        )
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(class_names):
        before = len(paths)
        for parent, _, files in os.walk(root / name, followlinks=True):
            paths += (os.fsencode(os.path.join(parent, file)) for file in files if file.lower().endswith(EXTENSIONS))
        if len(paths) == before:
            raise FileNotFoundError(f"{root / name} holds no image. Images end in {', '.join(EXTENSIONS)}.")
        paths[before:] = sorted(paths[before:])
        labels += [label] * (len(paths) - before)
    count = len(paths)
    return ImageFiles(
        paths=numpy.array(paths),
        file=torch.arange(count),
        offset=torch.zeros(count, dtype=torch.int64),
        size=torch.full((count,), -1),
        labels=torch.tensor(labels),
        classes=len(class_names),
        class_names=class_names,
    )


def _in_shards(shards: list[Path]) -> ImageFiles:
    numpy = load_extra("numpy")
    _logger.info("reading the headers of %d shards in %s", len(shards), shards[0].parent)
    rows: list[tuple[int, int, int, int]] = []
    for number, shard in enumerate(shards):
        images, labels = _read_shard(shard)
        unpaired = sorted(images.keys() ^ labels.keys())
        if unpaired:
            raise ValueError(
                f"{shard} must have an image and a .cls file for each sample; only one of the two is there for "
                f"{', '.join(unpaired[:4])} ({len(unpaired)} in all)."
            )
        rows += ((number, *images[key], labels[key]) for key in images)
    if not rows:
        raise ValueError(f"the {len(shards)} shards in {shards[0].parent} hold no image.")
    file, offset, size, label = torch.tensor(rows).unbind(1)
    if int(label.min()) < 0:
        raise ValueError(f"labels count from 0, the shards in {shards[0].parent} have {int(label.min())}.")
    return ImageFiles(
        paths=numpy.array([os.fsencode(shard) for shard in shards]),
        file=file,
        offset=offset,
        size=size,
        labels=label,
        classes=int(label.max()) + 1,
        class_names=None,
    )


def _read_shard(path: Path) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """By key (the name up to its first dot): the image's place and size; the label."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        # The colon: uncompressed, or images could not be read at random.
        with open(path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                parent, name = os.path.split(member.name)
                stem, dot, extension = name.partition(".")
                key = os.path.join(parent, stem)
                if (dot + extension).lower() in EXTENSIONS:
                    if key in images:
                        raise ValueError(f"{path} has two images called {key!r}.")
                    images[key] = (member.offset_data, member.size)
                elif extension == "cls":
                    content = tar.extractfile(member)
                    assert content is not None, "a regular file has content"
                    text = content.read()
                    try:
                        labels[key] = int(text)
                    except ValueError:
                        raise ValueError(
                            f"{member.name} of {path} must hold a class number, got {text[:20]!r}."
                        ) from None
            _check_end(file, tar.offset)
    except tarfile.TarError as error:
        raise ValueError(
            f"{path} is no whole uncompressed tar file: {error}. Unpack compressed shards to .tar, or copy it again."
        ) from error
    return images, labels


def _check_end(file: BinaryIO, end: int) -> None:
    """See that a tar ends where ``tarfile`` says, which takes any header that is cut or damaged for the end.

    Zeros end a tar, and fill it up; after them may come nothing.
    """
    file.seek(end)
    if len(file.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"it ends at byte {file.tell()} without the zeros that close one")
    file.seek(end)
    while block := file.read(1 << 20):
        if any(block):
            raise tarfile.ReadError(f"no header can be read at byte {end}, but there is more behind it")
