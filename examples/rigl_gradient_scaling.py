"""SparseOpt's scaling of gradients in RigL, on the small vision transformer of ``acdc_digits_vit.py`` at 90 % zeros.

The scaling is known from SGD and ResNets, which have batch norms. Does it help a transformer with layer norms? And
what is left of it under AdamW, which divides every gradient by its own size?

    python examples/rigl_gradient_scaling.py --seeds 0 1 --out gradient_scaling.json
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
from acdc_digits_vit import DigitsViT, digits, triangular
from torch import nn

from horst.lab.experiments.result import Result, environment
from horst.sparsity import RigL, rigl_steps


def run(name: str, *, lr: float, seed: int, epochs: int, sparsity: float, scaled: bool) -> dict[str, Any]:
    """One training run; what its row of the result holds."""
    train_x, train_y, test_x, test_y = digits(seed)
    torch.manual_seed(seed)
    model, batch_size = DigitsViT(), 64
    if name == "SGD":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    total = epochs * math.ceil(len(train_x) / batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: triangular(step / total))
    schedule = rigl_steps(total, every=total // 75)
    sparsifier = RigL(model, optimizer, sparsity=sparsity, schedule=schedule, seed=seed, scale_gradients=scaled)
    for _ in range(epochs):
        for index in torch.randperm(len(train_x)).split(batch_size):
            loss = F.cross_entropy(model(train_x[index]), train_y[index], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            sparsifier.step()
            scheduler.step()
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
    kept = torch.cat([mask.sum(1) / mask.sum(1, dtype=torch.float32).mean() for mask in sparsifier.masks.values()])
    return {
        "optimizer": name,
        "scale_gradients": scaled,
        "lr": lr,
        "seed": seed,
        "epochs": epochs,
        "accuracy": accuracy,
        "training_loss": float(loss.detach()),
        "masked_weights": sum(mask.numel() for mask in sparsifier.masks.values()),
        "zeros": sum(int((layer.param == 0).sum()) for layer in sparsifier.layers),
        "smallest_factor": float(kept.min().sqrt()),
        "largest_factor": float(kept.max().sqrt()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sgd-lrs", type=float, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--adamw-lrs", type=float, nargs="+", default=[1e-2])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=None, help="the result file")
    options = parser.parse_args()
    start = time.perf_counter()
    result = Result(
        experiment="rigl_gradient_scaling",
        config={name: value for name, value in vars(options).items() if name != "out"},
        rows=[],
        curves={},
        notes=["factors are those of the masks at the end."],
        environment=environment(),
        seconds=0.0,
    )
    for name, lrs in (("SGD", options.sgd_lrs), ("AdamW", options.adamw_lrs)):
        for lr in lrs:
            for scaled in (False, True):
                settings = {"lr": lr, "epochs": options.epochs, "sparsity": options.sparsity, "scaled": scaled}
                rows = [run(name, seed=seed, **settings) for seed in options.seeds]
                result.rows.extend(rows)
                each = ", ".join(f"{100 * row['accuracy']:.2f}" for row in rows)
                mean = 100 * statistics.mean(row["accuracy"] for row in rows)
                print(f"{name:6} lr {lr:g} {'scaled' if scaled else 'plain':6}: {mean:.2f} % ({each})", flush=True)
    if options.out:
        dataclasses.replace(result, seconds=round(time.perf_counter() - start, 1)).save(options.out)


if __name__ == "__main__":
    main()
