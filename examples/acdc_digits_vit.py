"""A small vision transformer trained with AC/DC on scikit-learn's digits, AdamW beside HORST, at 90 % sparsity.

The paper's Table 1 in miniature: same method (AC/DC, global threshold, reference schedule scaled to the run), same
learning rate, weight decay, label smoothing and triangular schedule. A CPU is enough: well under a minute for each run.
At the paper's rate HORST is ahead; ``--lrs 5e-3 1e-2 2e-2`` shows how AdamW catches up when its rate is raised.

    python examples/acdc_digits_vit.py --seeds 0 1 2 --out acdc_digits.json

Needs scikit-learn (``pip install scikit-learn``) for its 1,797 images of 8 x 8 pixels, which come with the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from horst import HORST
from horst.lab.experiments.result import Result, environment
from horst.sparsity import ACDC, acdc_steps


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the feed-forward part, each beside a residual path."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.proj(attended)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class DigitsViT(nn.Module):
    """Sixteen patches of 2 x 2 pixels; linear layers in ``blocks`` are what AC/DC masks by default."""

    def __init__(self, width: int = 24, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(4, width)
        self.positions = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of (batch, 8, 8) images."""
        patches = images.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        x = self.patch_embed(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,347 training and 450 test images, split by ``seed``."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 8.0 - 1.0
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1347], order[1347:]
    return images[train], labels[train], images[test], labels[test]


def triangular(progress: float) -> float:
    """The paper's schedule: 0.2 of the rate at the start, all of it at 20 % of the run, 0 at the end."""
    return 0.2 + 4.0 * progress if progress < 0.2 else (1.0 - progress) / 0.8


def run(name: str, *, seed: int, lr: float, epochs: int, sparsity: float, batch_size: int = 128) -> dict[str, Any]:
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits(seed)
    model = DigitsViT()
    if name == "HORST":
        optimizer: torch.optim.Optimizer = HORST(model.parameters(), lr=lr, weight_decay=0.1, alpha=5.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    steps_per_epoch = math.ceil(len(train_x) / batch_size)
    total = epochs * steps_per_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangular(step / total))
    sparsifier = ACDC(model, optimizer, sparsity=sparsity, schedule=acdc_steps(total))

    def accuracy() -> float:
        model.eval()
        with torch.no_grad():
            correct = (model(test_x).argmax(1) == test_y).float().mean()
        model.train()
        return float(correct)

    for _ in range(epochs):
        for index in torch.randperm(len(train_x)).split(batch_size):
            loss = F.cross_entropy(model(train_x[index]), train_y[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            event = sparsifier.step()
            scheduler.step()
            if event is not None and event.kind == "restore":
                sparsifier.record(accuracy())
    masked = sum(layer.param.numel() for layer in sparsifier.layers)
    zeros = sum(int((layer.param == 0).sum()) for layer in sparsifier.layers)
    return {
        "optimizer": name,
        "seed": seed,
        "lr": lr,
        "epochs": epochs,
        "accuracy": accuracy(),
        "masked_weights": masked,
        "zeros": zeros,
        "sparsity": zeros / masked,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lrs", type=float, nargs="+", default=[5e-3])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=None, help="the result file")
    options = parser.parse_args()
    start = time.perf_counter()
    result = Result(
        experiment="acdc_digits_vit",
        config={"seeds": options.seeds, "lrs": options.lrs, "epochs": options.epochs, "sparsity": options.sparsity},
        rows=[],
        curves={},
        notes=[],
        environment=environment(),
        seconds=0.0,
    )
    for lr in options.lrs:
        for name in ("AdamW", "HORST"):
            for seed in options.seeds:
                result.rows.append(run(name, seed=seed, lr=lr, epochs=options.epochs, sparsity=options.sparsity))
            accuracies = [100 * row["accuracy"] for row in result.rows[-len(options.seeds) :]]
            each = ", ".join(f"{a:.2f}" for a in accuracies)
            zeros = f"{result.rows[-1]['zeros']:,} of {result.rows[-1]['masked_weights']:,} weights zero"
            print(
                f"{name:6} lr {lr:g}: {statistics.mean(accuracies):.2f} % of test digits ({each}), {zeros}", flush=True
            )
    if options.out:
        dataclasses.replace(result, seconds=round(time.perf_counter() - start, 1)).save(options.out)


if __name__ == "__main__":
    main()
