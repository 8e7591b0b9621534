"""A vision transformer of DeiT-small's size trained with AC/DC on CIFAR-10, AdamW beside HORST, at 90 % sparsity.

The paper's Table 1 at a scale one GPU finishes in minutes: same method (AC/DC, one global threshold over the linear
layers of the blocks, the reference schedule scaled to the run: of 60 epochs 6 dense, then 3 sparse / 3 dense, the last
dense phase 6, the last sparse phase 9), same batch size and weight decay. Images are 32 x 32 in patches of 4 x 4, so 64
patches and a class token. Augmentation is a random crop and flip; mixup, cutmix and label smoothing are options.

    python examples/acdc_cifar10_vit.py --data cifar-10-batches-bin --out acdc_cifar10.json
    python examples/acdc_cifar10_vit.py --data cifar-10-batches-bin --optimizers horst --alpha 5 20 --seeds 0 1 2

The images stay on the device and are augmented there a batch at a time; the host waits for it once an epoch, and where
the test accuracy is measured. Every configuration starts from the weights and the data order of its seed alone.

Needs timm (``pip install timm``) and the six files of CIFAR-10's binary version.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.models.vision_transformer import VisionTransformer
from timm.utils import random_seed
from torch import Tensor, nn

from horst import HORST, param_groups
from horst.experiments.result import Result, environment
from horst.sparsity import ACDC, acdc_steps

TRAIN_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"
CLASSES, SIDE, PADDING = 10, 32, 4
RECORD = 1 + 3 * SIDE * SIDE  # the label, then the red, green and blue planes
# Of the training images, on the scale of their bytes.
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)
TEST_BATCH = 1000
WARMUP = 0.1  # share of the steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """CIFAR-10 on the device: bytes, channels last; training images have a black frame to crop from."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Data:
        """Read the six binary files of ``folder``."""
        missing = [name for name in (*TRAIN_FILES, TEST_FILE) if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {', '.join(missing)}. --data must name the folder with the six files of CIFAR-10's "
                "binary version, as unpacked from cifar-10-binary.tar.gz (https://www.cs.toronto.edu/~kriz/cifar.html)."
            )
        train_images, train_labels = read_records([folder / name for name in TRAIN_FILES])
        test_images, test_labels = read_records([folder / TEST_FILE])
        return cls(
            train_images=F.pad(train_images, (0, 0, PADDING, PADDING, PADDING, PADDING)).to(device),
            train_labels=train_labels.to(device),
            test_images=test_images.to(device),
            test_labels=test_labels.to(device),
            mean=torch.tensor(MEAN, device=device),
            std=torch.tensor(STD, device=device),
        )

    def training_batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The images and labels at ``index``, each image cropped and flipped by chance."""
        n, device = len(index), index.device
        inside = torch.arange(SIDE, device=device)
        top, left = torch.randint(2 * PADDING + 1, (2, n, 1), device=device)
        flips = torch.rand(n, 1, device=device) < 0.5
        rows, columns = top + inside, left + torch.where(flips, inside.flip(0), inside)
        images = self.train_images[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return self.normalise(images), self.train_labels[index]

    def normalise(self, images: Tensor) -> Tensor:
        """Bytes, channels last, to floats of mean 0 and deviation 1, channels first."""
        return ((images - self.mean) / self.std).permute(0, 3, 1, 2)


def read_records(paths: Sequence[Path]) -> tuple[Tensor, Tensor]:
    """Images (channels last, bytes) and labels of files in CIFAR-10's binary format."""
    parts = []
    for path in paths:
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        if len(content) % RECORD:
            raise ValueError(
                f"{path.name} has {len(content)} bytes, which is no whole number of records of {RECORD} bytes. "
                "Unpack CIFAR-10's binary version again."
            )
        parts.append(content.view(-1, RECORD))
    records = torch.cat(parts)
    images = records[:, 1:].view(-1, 3, SIDE, SIDE).permute(0, 2, 3, 1).contiguous()
    return images, records[:, 0].long()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What one run differs in from the others of the process."""

    optimizer: str
    alpha: float
    lr: float
    sparsity: float
    seed: int

    def __str__(self) -> str:
        name = f"horst alpha {self.alpha:g}" if self.optimizer == "horst" else self.optimizer
        return f"{name}, lr {self.lr:g}, sparsity {self.sparsity:g}, seed {self.seed}"


def configurations(options: argparse.Namespace) -> list[Configuration]:
    """All that the options ask for; the optimizers that are compared come one after the other."""
    methods = [(name, a) for name in options.optimizers for a in (options.alpha if name == "horst" else [0.0])]
    return [
        Configuration(optimizer=name, alpha=alpha, lr=lr, sparsity=sparsity, seed=seed)
        for seed, sparsity, lr, (name, alpha) in itertools.product(options.seeds, options.sparsity, options.lr, methods)
    ]


def make_model(options: argparse.Namespace) -> VisionTransformer:
    """A new transformer, on the CPU, so that a seed gives the same weights on every device."""
    return VisionTransformer(
        img_size=SIDE,
        patch_size=options.patch_size,
        embed_dim=options.width,
        depth=options.depth,
        num_heads=options.heads,
        num_classes=CLASSES,
    )


def make_optimizer(model: nn.Module, run: Configuration, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW or HORST over the same groups: no decay for norms, biases, positions and the class token."""
    groups = param_groups(model, weight_decay=weight_decay, alpha=run.alpha)
    if run.optimizer == "horst":
        return HORST(groups, lr=run.lr)
    return torch.optim.AdamW(groups, lr=run.lr, fused=next(model.parameters()).is_cuda)


def cosine(progress: float) -> float:
    """A linear warm-up over the first tenth of the run, then half a cosine to 0."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 + 0.5 * math.cos(math.pi * (progress - WARMUP) / (1.0 - WARMUP))


def triangular(progress: float) -> float:
    """The paper's schedule: 0.2 of the rate at the start, all of it at 20 % of the run, 0 at the end."""
    return 0.2 + 4.0 * progress if progress < 0.2 else (1.0 - progress) / 0.8


LR_SCHEDULES: dict[str, Callable[[float], float]] = {"cosine": cosine, "triangular": triangular}


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def now(device: torch.device) -> float:
    """The time at which the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def test_accuracy(model: nn.Module, data: Data) -> float:
    """Share of the test images that are classified correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=data.test_labels.device)
    with precision(correct.device):
        for images, labels in zip(data.test_images.split(TEST_BATCH), data.test_labels.split(TEST_BATCH), strict=True):
            correct += (model(data.normalise(images)).argmax(1) == labels).sum()
    model.train()
    return int(correct) / len(data.test_labels)


def train(
    run: Configuration, options: argparse.Namespace, model: nn.Module, forward: nn.Module, data: Data
) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Train from the seed's weights to the end of the last sparse phase.

    Args:
        model: Its parameters are overwritten: one compiled model serves every configuration.
        forward: ``model``, compiled or not.

    Returns:
        The row of the result, and its curves by epoch.
    """
    device = data.mean.device
    started = now(device)
    random_seed(run.seed)
    model.load_state_dict(make_model(options).state_dict())
    optimizer = make_optimizer(model, run, options.weight_decay)
    # Whole batches only: another shape would compile the model again.
    steps_per_epoch = len(data.train_labels) // options.batch_size
    total = options.epochs * steps_per_epoch
    factor = LR_SCHEDULES[options.schedule]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step / total))
    phases = dataclasses.replace(acdc_steps(total), steps_per_epoch=steps_per_epoch)
    evaluate_at = {epoch * steps_per_epoch for epoch in range(options.eval_every, options.epochs, options.eval_every)}
    evaluate_at |= {phases.prune_at[-1], total}
    mix = None
    if options.mixup or options.cutmix:
        mix = Mixup(options.mixup, options.cutmix, label_smoothing=options.label_smoothing, num_classes=CLASSES)
    smoothing = 0.0 if mix else options.label_smoothing  # Mixup returns smoothed targets

    accuracies: dict[int, float] = {}
    losses: list[float] = []
    epoch_seconds: list[float] = []
    with ACDC(model, optimizer, sparsity=run.sparsity, schedule=phases, layers="blocks") as sparsifier:
        for epoch in range(1, options.epochs + 1):
            phase = "sparse" if sparsifier.is_sparse else "dense"
            loss_sum = torch.zeros((), device=device)
            start, paused = now(device), 0.0
            order = torch.randperm(len(data.train_labels), device=device)
            for index in order[: steps_per_epoch * options.batch_size].split(options.batch_size):
                images, targets = data.training_batch(index)
                if mix:
                    images, targets = mix(images, targets)
                with precision(device):
                    logits = forward(images)
                loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                loss_sum += loss.detach()
                # Before the masks change, so that the end of a dense phase is measured dense.
                if (step := sparsifier.steps + 1) in evaluate_at:
                    pause = now(device)
                    with sparsifier.evaluate(model):
                        accuracies[step] = test_accuracy(model, data)
                    paused += now(device) - pause
                sparsifier.step()
            epoch_seconds.append(now(device) - start - paused)
            losses.append(float(loss_sum) / steps_per_epoch)
            rate = steps_per_epoch * options.batch_size / epoch_seconds[-1]
            tested = accuracies.get(epoch * steps_per_epoch)
            shown = "" if tested is None else f"  test {100 * tested:6.2f} %"
            print(
                f"epoch {epoch:3d}  {phase:6}  loss {losses[-1]:.4f}  {rate:8,.0f} images/s{shown}",
                flush=True,
            )
        weights = sum(layer.param.numel() for layer in sparsifier.layers)
        pruned = sum(int((layer.param == 0).sum()) for layer in sparsifier.layers)
    row = {
        **dataclasses.asdict(run),
        "masked_weights": weights,
        "pruned": pruned,
        "accuracy": test_accuracy(model, data),
        "dense_phase_accuracy": accuracies[phases.prune_at[-1]],
        "train_loss": losses[-1],
        # The median leaves out the epochs that compile.
        "images_per_second": steps_per_epoch * options.batch_size / statistics.median(epoch_seconds),
        "seconds": now(device) - started,
    }
    tests = [accuracies.get(epoch * steps_per_epoch) for epoch in range(1, options.epochs + 1)]
    return row, {"train_loss": losses, "test_accuracy": tests}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with data_batch_1.bin ... data_batch_5.bin, test_batch.bin")
    add("--out", type=Path, default=Path("runs/acdc_cifar10_vit.json"), help="result, rewritten after every run")
    add("--optimizers", nargs="+", choices=("adamw", "horst"), default=["adamw", "horst"])
    add("--alpha", type=float, nargs="+", default=[5.0], help="HORST's mirror step; one run for each value")
    add("--lr", type=float, nargs="+", default=[1e-3])
    add("--sparsity", type=float, nargs="+", default=[0.9])
    add("--seeds", type=int, nargs="+", default=[0])
    add("--minutes", type=float, default=math.inf, help="begin no run that would not end in time, the first excepted")
    add("--epochs", type=int, default=60)
    add("--batch-size", type=int, default=1024)
    add("--weight-decay", type=float, default=0.1)
    add("--schedule", choices=tuple(LR_SCHEDULES), default="cosine", help="of the learning rate")
    add("--mixup", type=float, default=0.0, help="DeiT's is 0.8")
    add("--cutmix", type=float, default=0.0, help="DeiT's is 1.0")
    add("--label-smoothing", type=float, default=0.0, help="DeiT's is 0.1")
    add("--eval-every", type=int, default=5, help="epochs between measurements of the test accuracy")
    add("--patch-size", type=int, default=4)
    add("--width", type=int, default=384)
    add("--depth", type=int, default=12)
    add("--heads", type=int, default=6)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true", help="run the model as it is")
    options = parser.parse_args(arguments)
    if (options.mixup or options.cutmix) and options.batch_size % 2:
        parser.error(f"mixup and cutmix mix pairs: --batch-size must be even, got {options.batch_size}.")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    start = time.perf_counter()
    options = parse(arguments)
    device = torch.device(options.device)
    data = Data.load(options.data, device)
    if len(data.train_labels) < options.batch_size:
        raise SystemExit(f"{len(data.train_labels)} training images make no batch of {options.batch_size}.")
    model = make_model(options).to(device)
    forward = model if options.no_compile else torch.compile(model, dynamic=False)
    config = {key: value for key, value in vars(options).items() if key not in ("data", "out")}  # no paths
    runs = configurations(options)
    rows: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[Any]]] = {}
    for done, run in enumerate(runs):
        longest = max((row["seconds"] for row in rows), default=0.0)
        if rows and time.perf_counter() - start + longest > 60 * options.minutes:
            print(f"{len(runs) - done} of {len(runs)} runs are left out: {options.minutes:g} minutes would not do.")
            break
        print(run, flush=True)
        row, curves[str(run)] = train(run, options, model, forward, data)
        rows.append(row)
        print(
            f"{run}: {100 * row['accuracy']:.2f} % of the test images with {row['pruned']:,} of "
            f"{row['masked_weights']:,} weights zero ({100 * row['dense_phase_accuracy']:.2f} % at the end of the last "
            f"dense phase); {row['images_per_second']:,.0f} images/s, {row['seconds']:.0f} s",
            flush=True,
        )
        Result(
            experiment="acdc_cifar10_vit",
            config=config,
            rows=rows,
            curves=curves,
            notes=[f"{len(rows)} of {len(runs)} configurations are done."],
            environment=environment(options.device),
            seconds=round(time.perf_counter() - start, 3),
        ).save(options.out)


if __name__ == "__main__":
    main()
