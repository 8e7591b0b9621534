"""Training a DeiT with AC/DC for an experiment: the paper's recipe (Table 2) as defaults, every choice a field."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from horst.fields import option
from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.data.image_arrays import ImageArrays
from horst.lab.data.image_data import ImageData, read_cifar10, read_digits, read_npz
from horst.lab.data.imagenet import ImageNet
from horst.lab.data.mixing import Mixing
from horst.lab.experiments import identity
from horst.lab.experiments.mask_methods import Method, SparseRun, make_sparsifier
from horst.lab.models.deit import DeiTConfig, build_deit
from horst.sparsity import IMP, Recorder
from horst.sparsity.layers import Preset
from horst.training import LoopConfig, Task, TrainResult, Triangular, WarmupCosine, accuracy, parallelize, train
from horst.training.distributed import World

Dataset = Literal["imagenet", "cifar10", "digits", "npz"]
Source = ImageArrays | ImageNet
CENTRE = 0.875  # of an ImageNet image's short side is evaluated on: 224 of 256 pixels
WARMUP = 0.1  # share of the steps, for schedule="cosine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """How the vision transformers of an experiment are trained.

    Args:
        dataset: Kind of the data set. Digits come with scikit-learn and need no ``data``.
        data: ImageNet's folder with ``train`` and ``val`` (class folders or tar shards), the folder of CIFAR-10's
            binary files, or an ``.npz`` file.
        model: Shape of the model, which must be that of the data; ImageNet's images are cut to its size.
        optimization: Settings of the optimizers. The paper's code decays all tensors.
        loop: Settings of the training loop; ``eval_every`` and ``checkpoint_every`` count epochs. The paper does not
            state a gradient-norm limit, and its base code does not clip.
        epochs: Epochs of training.
        batch_size: Images per step, over all processes.
        schedule: Learning-rate schedule: the paper's triangle, or a linear warm-up over a tenth and a cosine (DeiT's).
        mixup: Strength of mixup. The paper names the methods without numbers; these are DeiT's own.
        cutmix: Strength of cutmix.
        smoothing: Share of label smoothing.
        padding: Width of the frame that random crops are taken from, for data sets that stay on the device.
        flip: Whether to mirror images at random, for data sets that stay on the device.
        layers: Layers that AC/DC masks. The paper does not state them; its base code masks every linear layer.
        restore: Values with which pruned weights leave a sparse phase: zeros (AC/DC's reference), or those they had
            before (code that masks in the forward pass only, as the paper's base code does).
        parallel: With torchrun: whole copies (ddp) or shards (fsdp).
        workers: Processes that decode images, for ImageNet.
    """

    dataset: Dataset = "imagenet"
    data: pathlib.Path = pathlib.Path("data/imagenet")
    model: DeiTConfig = DeiTConfig()
    optimization: Optimization = Optimization(lr=5e-3, decay="all")
    loop: LoopConfig = LoopConfig(eval_every=10, log_every=50, checkpoint_every=10)
    epochs: int = 300
    batch_size: int = 1024
    schedule: Literal["triangular", "cosine"] = "triangular"
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    padding: int = 4
    flip: bool = True
    layers: Preset = "blocks"
    restore: Literal["zeros", "values"] = "zeros"
    parallel: Literal["ddp", "fsdp"] = option("ddp", affects="nothing")
    workers: int = option(8, affects="nothing")

    def without_effect(self) -> dict[str, str]:
        """Fields that this data set does not read, and why."""
        if self.dataset == "imagenet":
            return dict.fromkeys(("padding", "flip"), "ImageNet's images are cropped and mirrored as DeiT does it.")
        unread = {"workers": f"the images of {self.dataset} stay in memory, and none are decoded."}
        if self.dataset == "digits":
            unread["data"] = (
                "the data set is digits, which comes with scikit-learn. To train on other images, name their kind as "
                "well (--dataset npz, cifar10 or imagenet), or choose another --scale."
            )
        return unread


def in_words(config: VisionConfig) -> str:
    """What is trained on what, for a result file.

    Example:
        >>> in_words(VisionConfig(epochs=600)).split(", ")[:2]
        ['a DeiT of 12 blocks of width 384 on imagenet (224 x 224 in patches of 16)', '600 epochs of batches of 1024']
    """
    model, size = config.model, config.model.image_size
    return (
        f"a DeiT of {model.depth} blocks of width {model.width} on {config.dataset} ({size} x {size} in patches of "
        f"{model.patch_size}), {config.epochs} epochs of batches of {config.batch_size}, learning rate "
        f"{config.optimization.lr:g} ({config.schedule}); the paper: ImageNet (224 x 224 in patches of 16), 300 epochs "
        "of batches of 1024, learning rate 0.005 (triangular)"
    )


def open_source(config: VisionConfig, seed: int, world: World) -> Source:
    """The training and test images, as batches of this process.

    Raises:
        ValueError: The model is not for such images.
    """
    size = config.model.image_size
    mixes = config.mixup or config.cutmix or config.smoothing
    common: dict[str, Any] = {
        "batch_size": config.batch_size,
        "seed": seed,
        "rank": world.rank,
        "world_size": world.size,
        "device": world.device,
        "mixing": Mixing(mixup=config.mixup, cutmix=config.cutmix, label_smoothing=config.smoothing) if mixes else None,
    }
    if config.dataset == "imagenet":
        resize = int(size / CENTRE)
        source = ImageNet(config.data, image_size=size, resize=resize, workers=config.workers, **common)
        _check_fit(config, {"classes": source.classes, "channels": 3})
        return source
    data, _ = _read_arrays(config)
    _, height, width, channels = data.images.shape
    if height != width:
        raise ValueError(f"the images of {config.dataset} are {height} x {width} pixels; the models are for squares.")
    _check_fit(config, {"classes": data.classes, "channels": channels, "image_size": height})
    return ImageArrays(data, padding=config.padding, flip=config.flip, **common)


def _check_fit(config: VisionConfig, data: Mapping[str, int]) -> None:
    """Refuse a model that is for other images, before it is trained."""
    wrong = {name: value for name, value in data.items() if getattr(config.model, name) != value}
    if wrong:
        words = [f"{name} is {wrong[name]} in the data, {getattr(config.model, name)} in the model" for name in wrong]
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in wrong.items())
        raise ValueError(f"the model does not fit {config.dataset}: {'; '.join(words)}. Use {options}.")


def _read_arrays(config: VisionConfig) -> tuple[ImageData, dict[str, Any]]:
    """The images and their identity, read and hashed once while their files stay as they are."""
    path = pathlib.Path() if config.dataset == "digits" else config.data
    return _read(config.dataset, path, () if config.dataset == "digits" else identity.stamp(path))


@functools.lru_cache(maxsize=1)  # every run of a table asks for the same
def _read(dataset: Dataset, path: pathlib.Path, stamp: Any) -> tuple[ImageData, dict[str, Any]]:
    readers = {"cifar10": read_cifar10, "npz": read_npz, "digits": lambda _: read_digits()}
    data = readers[dataset](path)
    return data, identity.image_data(data)


def run_identity(
    config: VisionConfig, optimizer: Name, sparsity: float, seed: int, method: Method = "acdc"
) -> dict[str, Any]:
    """All that a run's outcome depends on."""
    return {
        "run": identity.settings(config, optimizer),
        "optimizer": optimizer,
        "masks": {"method": method, "sparsity": sparsity} if sparsity else None,
        "seed": seed,
        "data": identity.image_folders(config.data.resolve())
        if config.dataset == "imagenet"
        else _read_arrays(config)[1],
    }


def train_sparse_vision_model(
    config: VisionConfig,
    optimizer: Name,
    sparsity: float,
    seed: int,
    directory: pathlib.Path,
    world: World,
    method: Method = "acdc",
) -> tuple[nn.Module, TrainResult, dict[str, Any]]:
    """Train from the seed's weights with masks; sparsity 0 is a dense run. A contender may bring masks of its own.

    Returns:
        The model, the loop's result, and what the masks hold at the end; under ``"phases"`` what happened on the way:
        ``records``, one for each change of masks, and ``accuracy``, one for each evaluation.
    """
    about = run_identity(config, optimizer, sparsity, seed, method)
    source = open_source(config, seed, world)
    torch.manual_seed(seed)
    model = parallelize(build_deit(config.model), config.parallel, world.device)
    steps = config.epochs * source.steps_per_epoch
    contender = config.optimization.make(model, optimizer, steps=steps)
    task = Task(
        model=model,
        loss=lambda model, images, targets: F.cross_entropy(model(images).float(), targets),
        train=source,
        evaluate=lambda model: accuracy(model, source.evaluation_batches(), precision=config.loop.precision),
        identity={**about, "run": identity.deciding(about["run"])},
    )
    loop, per_epoch = config.loop, source.steps_per_epoch
    start = functools.partial(
        train,
        task,
        contender,
        dataclasses.replace(
            loop,
            eval_every=loop.eval_every and loop.eval_every * per_epoch,
            checkpoint_every=loop.checkpoint_every and loop.checkpoint_every * per_epoch,
        ),
        steps=steps,
        directory=directory,
    )
    own = config.optimization.masks(model, contender, optimizer, sparsity=sparsity or None, layers=config.layers)
    if own is None and not sparsity:
        result = start(schedule=_schedule(config, steps))
        return model, result, {"phases": _history([], source, directory, world)}
    masked_run = SparseRun(
        sparsity=sparsity, epochs=config.epochs, steps_per_epoch=per_epoch, layers=config.layers, restore=config.restore
    )
    with own or make_sparsifier(method, model, contender, masked_run) as sparsifier:
        recorder = Recorder(sparsifier, quantiles=())  # counts at the events alone; nothing in between
        length = sparsifier.schedule.steps_per_round if isinstance(sparsifier, IMP) else steps
        result = start(schedule=_schedule(config, length), sparsifier=sparsifier)
        masked = sum(layer.param.numel() for layer in sparsifier.layers)
        found = {
            "masked_weights": masked,
            "zeros": round(sparsifier.current_sparsity * masked),
            "masked_layers": [layer.name for layer in sparsifier.layers],
            "phases": _history(recorder.records, source, directory, world),
        }
    return model, result, found


def _schedule(config: VisionConfig, steps: int) -> Triangular | WarmupCosine:
    """The learning rate over a run, or over a round of it."""
    return Triangular() if config.schedule == "triangular" else WarmupCosine(warmup_steps=int(WARMUP * steps))


def _history(
    records: Sequence[Mapping[str, Any]], source: Source, directory: pathlib.Path, world: World
) -> dict[str, list[dict[str, Any]]]:
    """Mask changes with what each new phase begins with, and the accuracies in the metrics that rank 0 has written."""
    per_epoch = source.steps_per_epoch
    lines = (directory / "metrics.jsonl").read_text().splitlines() if world.rank == 0 else []
    return {
        "records": [
            {
                "step": record["step"],
                "epoch": record["step"] / per_epoch,
                "phase": "sparse" if record["sparsity"] else "dense",
                **{key: record[key] for key in ("sparsity", "overlap", "sign_flips")},
            }
            for record in records
        ],
        "accuracy": [
            {"epoch": line["step"] / per_epoch, "top1": line["eval_top1"]}
            for line in map(json.loads, lines)
            if "eval_top1" in line
        ],
    }
