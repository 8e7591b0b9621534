"""ImageNet, or any images in class folders or tar shards, as DeiT is trained on it, less RandAugment.

Training: a random-resized crop (8 to 100 % of the area, bicubic) and a flip; mixup, cutmix and label smoothing on the
device. Evaluation: the short side to 256, then the middle 224 x 224. Loader processes read, decode and crop, and hand
over bytes; the device turns them to floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from horst.extras import load_extra
from horst.lab.data.epoch_order import EpochOrder, derive_seed, evaluation_parts
from horst.lab.data.image_data import normalise
from horst.lab.data.image_files import ImageFiles, find_images
from horst.lab.data.mixing import Mixing

if TYPE_CHECKING:
    from PIL.Image import Image

# On the scale of bytes.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)

Item = tuple[int, int]  # the epoch and the image
Sample = tuple[Tensor, int]  # pixels and label


class ImageNet:
    """A source of batches from files.

    Batch k depends on (seed, k, rank, world size) alone: a run resumes with ``batches(k)``, and the crop of an image
    follows from (seed, epoch, image), whatever the number of workers. Torch's global generator is left alone.

    Args:
        root: Folder with ``train`` and ``val``, each with class folders or with ``.tar`` shards.
        batch_size: Samples per batch, over all processes.
        seed: Seed of order, augmentation and mixing.
        rank, world_size: Number of this process, and of all processes.
        device: Device of the batches; to a GPU they are copied from pinned memory while it computes.
        image_size: Side of the images for the model.
        resize: Short side of an image before its middle is cut out for the evaluation.
        mixing: Mixup, cutmix and label smoothing; targets are then rows of shares instead of the classes' numbers.
        workers: Loader processes; 0 loads in this one.
        evaluation_batch_size: Images per batch of one process.

    Example:
        >>> import PIL.Image, tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        ...     (root / name).mkdir(parents=True)
        ...     PIL.Image.new("RGB", (300, 200)).save(root / name / "1.jpg")
        >>> source = ImageNet(root, batch_size=2, mixing=Mixing(), workers=0)
        >>> images, targets = next(source.batches(start=5000))
        >>> images.shape, targets.shape
        (torch.Size([2, 3, 224, 224]), torch.Size([2, 2]))
    """

    def __init__(
        self,
        root: Path | str,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        image_size: int = 224,
        resize: int = 256,
        mixing: Mixing | None = None,
        workers: int = 8,
        evaluation_batch_size: int = 256,
    ) -> None:
        if not 0 < image_size <= resize:
            raise ValueError(f"image_size must lie in [1, resize={resize}], got {image_size}. Give resize too.")
        if workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}.")
        transforms = load_extra("torchvision.transforms.v2")
        bicubic = transforms.InterpolationMode.BICUBIC
        train, test = find_images(Path(root) / "train"), find_images(Path(root) / "val")
        if train.class_names != test.class_names or test.classes > train.classes:
            lone = sorted(set(train.class_names or ()) ^ set(test.class_names or ()))
            example = f"; only one of them has the folder {lone[0]!r}" if lone else ""
            counts = f"{train.classes} and {test.classes}"
            raise ValueError(f"train and val of {root} must have the same classes, got {counts}{example}.")
        self.order = EpochOrder(samples=len(train), batch_size=batch_size, seed=seed, rank=rank, world_size=world_size)
        self.classes = train.classes
        self.mixing = mixing
        self.workers = workers
        self.device = torch.device(device)
        crop = transforms.RandomResizedCrop(image_size, interpolation=bicubic)
        self._train = _Images(train, transforms.Compose([crop, transforms.RandomHorizontalFlip()]), seed)
        centre = [transforms.Resize(resize, interpolation=bicubic), transforms.CenterCrop(image_size)]
        self._test = _Images(test, transforms.Compose(centre), seed)
        self._test_parts = evaluation_parts(len(test), evaluation_batch_size, rank=rank, world_size=world_size)
        self._mean = torch.tensor(MEAN, device=self.device)
        self._std = torch.tensor(STD, device=self.device)
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training images."""
        return self.order.steps_per_epoch

    def batches(self, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's parts of batch ``start`` and all that follow, without end: images and targets."""
        items = ([(epoch, i) for i in index.tolist()] for _, epoch, index in self.order.batches(start))
        return (self._batch(step, *batch) for step, batch in enumerate(self._load(self._train, items), start))

    def evaluation_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the validation images, not augmented, with the classes' numbers."""
        items = ([(0, i) for i in part.tolist()] for part in self._test_parts)
        return (self._to_device(*batch) for batch in self._load(self._test, items))

    def _load(self, images: _Images, items: Iterator[list[Item]]) -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader[Any] = DataLoader(
            images,
            batch_sampler=items,  # type: ignore[arg-type]  # any iterable will do
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else the global generator would move by a draw
            collate_fn=_collate,
        )
        for batch in loader:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def _batch(self, step: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self._to_device(images, labels)
        if self.mixing is None:
            return images, labels
        return self.mixing(images, labels, classes=self.classes, seed=derive_seed(self.order.seed, "mixing", step))

    def _to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._copies is None:
            images, labels = images.to(self.device), labels.to(self.device)
        else:
            # On a stream of their own, copies run beside the step before, which the host has only queued.
            with torch.cuda.stream(self._copies):
                images = images.to(self.device, non_blocking=True)
                labels = labels.to(self.device, non_blocking=True)
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._copies)
            images.record_stream(current)
            labels.record_stream(current)
        return normalise(images, self._mean, self._std), labels


class _Images(Dataset[Sample | Exception]):
    """What a loader process does: read, decode, transform, as bytes with channels last.

    What cannot be read comes back as the error: one raised in a loader process would reach the caller as the text of a
    traceback.
    """

    def __init__(self, files: ImageFiles, transform: Callable[[Image], Image], seed: int) -> None:
        self.files, self.transform, self.seed = files, transform, seed

    def __getitem__(self, item: Item) -> Sample | Exception:
        epoch, index = item
        try:
            image = self.files.load(index)
        except (OSError, ValueError) as error:
            return error
        # torchvision draws from the global generator, which with workers=0 is the training run's own.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "augment", epoch, index))
            image = self.transform(image)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, 3), int(self.files.labels[index])


def _collate(samples: list[Sample | Exception]) -> Any:
    """A batch of samples, or the first error among them."""
    return next((sample for sample in samples if isinstance(sample, Exception)), None) or default_collate(samples)
