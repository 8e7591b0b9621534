"""Tokens and images per second of the training loop, beside a plain loop written for this file.

    python benchmarks/bench_training.py --device cuda --out benchmarks/results/training_h200.json
    python benchmarks/bench_training.py --tiny                                # small models, anywhere

The plain loop is what one would write for nanoGPT: the same model, logits and cross-entropy in one piece, autocast,
``torch.compile``, clipping, fused AdamW. Ours is ``horst.training`` with AdamW and with HORST. Data is random and
lives on the device, so that the loops are compared and not the disks. Rates leave out the first steps, which compile.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.lab.baselines.contenders import Optimization
from horst.lab.experiments.result import Result, environment
from horst.lab.models.deit import DeiTConfig, build_deit
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.training import LoopConfig, Task, train

WARM_UP = 10  # steps whose time is not counted


class Fixed:
    """One random batch, again and again."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of any number."""
        while True:
            yield self.inputs, self.targets


def language(tiny: bool, device: torch.device, fast: bool) -> tuple[Callable[[], nn.Module], Any, Any, Fixed, int]:
    """GPT-2 small at 128 x 512."""
    changes: dict[str, Any] = {"attention": "cudnn", "residual": "autocast", "loss_rows": 32768} if fast else {}
    config = GPT2Config(layers=2, heads=2, width=32, context=16, vocabulary=64) if tiny else GPT2Config(**changes)
    rows = 4 if tiny else 128
    tokens = torch.randint(config.vocabulary, (2, rows, config.context), device=device)
    ours = lambda model, x, y: model.loss(x, y)  # noqa: E731
    plain = lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())  # noqa: E731
    return lambda: GPT2(config), ours, plain, Fixed(tokens[0], tokens[1]), rows * config.context


def vision(tiny: bool, device: torch.device, fast: bool) -> tuple[Callable[[], nn.Module], Any, Any, Fixed, int]:
    """DeiT-small on 32 x 32 images in patches of 4, batch 1024."""
    shape: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2} if tiny else {}
    if fast:
        shape |= {"class_token": False, "residual": "autocast", "attention": "short"}
    config = DeiTConfig(image_size=32, patch_size=4, classes=10, **shape)
    rows = 8 if tiny else 1024
    images = torch.randn(rows, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    loss = lambda model, x, y: F.cross_entropy(model(x).float(), y)  # noqa: E731
    return lambda: build_deit(config), loss, loss, Fixed(images, torch.randint(10, (rows,), device=device)), rows


def plain_loop(model: nn.Module, loss: Any, data: Fixed, steps: int, units: int) -> float:
    """Units a second of a loop without anything around it."""
    device = data.inputs.device
    optimizer = Optimization().make(model, "adamw")

    def objective(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return loss(model, x, y)

    compute = torch.compile(objective, dynamic=False) if device.type == "cuda" else objective
    began = 0.0
    for step, (x, y) in zip(range(WARM_UP + steps), data.batches(0), strict=False):
        if step == WARM_UP:
            wait(device)
            began = time.perf_counter()
        compute(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait(device)
    return units * steps / (time.perf_counter() - began)


def our_loop(model: nn.Module, loss: Any, data: Fixed, steps: int, units: int, optimizer: Any) -> float:
    """Units a second of ``horst.training``."""
    task = Task(model=model, loss=loss, train=data, evaluate=lambda _: {}, units_per_row=units // len(data.inputs))
    config = LoopConfig(clip_norm=1.0, log_every=WARM_UP, checkpoint_every=None)
    with tempfile.TemporaryDirectory() as folder:
        result = train(task, Optimization().make(model, optimizer), config, steps=WARM_UP + steps, directory=folder)
    assert result.units_per_second is not None
    return result.units_per_second


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bench(options: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(options.device)
    rows: list[dict[str, Any]] = []
    for name, make in (("GPT-2 small, tokens", language), ("DeiT-small at 32 x 32, images", vision)):
        for fast in (False, True):
            build, ours, plain, data, units = make(options.tiny, device, fast)
            runs: dict[str, Callable[[nn.Module], float]] = {
                "plain loop, AdamW": lambda model, p=plain, d=data, u=units: plain_loop(model, p, d, options.steps, u),
                **{
                    f"horst.training, {contender}": lambda model, o=ours, d=data, u=units, c=contender: our_loop(
                        model, o, d, options.steps, u, c
                    )
                    for contender in ("adamw", "horst")
                },
            }
            for loop, run in runs.items():
                torch.manual_seed(0)
                torch.compiler.reset()
                rate = run(build().to(device))
                rows.append({"what": name, "settings": "fast" if fast else "default", "loop": loop, "rate": rate})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=40, help="steps that are counted")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/training.json"))
    options = parser.parse_args()
    began = time.perf_counter()
    rows = bench(options)
    Result(
        experiment="bench_training",
        config={"steps": options.steps, "tiny": options.tiny},
        rows=rows,
        curves={},
        notes=[
            "Fast: bfloat16 between the blocks; GPT-2 with cuDNN's attention and 32768 rows a piece in the loss; DeiT "
            "without a class token and with the kernel for short attention."
        ],
        environment=environment(options.device),
        seconds=time.perf_counter() - began,
    ).save(options.out)


if __name__ == "__main__":
    main()
