"""Small runs: a model with blocks and dropout, data that a step number restores, every kind of optimizer and method."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horst import HORST, AdamS, sparsity
from horst.parameters.sharding import sum_over_ranks
from horst.training import LoopConfig, OneCycle, Task, TrainResult, perplexity, train
from horst.training.distributed import parallelize, rank, world_size

WIDTH = 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.dropout(torch.tanh(self.fc1(self.norm(x)))))


class Toy(nn.Module):
    """Embedding, two blocks, a head; 384 weights in the blocks. A buffer counts its training steps."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ToyWithStatistics(Toy):
    """A running mean of the rows that a rank saw, used in evaluation alone, as that of batch normalisation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x - self.mean)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class ToyData:
    """Batch k is drawn by a generator seeded with k; rank r has the r-th part of its rows."""

    def __init__(self, rows: int = 8, rank: int = 0, world: int = 1) -> None:
        self.rows, self.rank, self.world = rows, rank, world

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            x = torch.randn(self.rows, 6, generator=torch.Generator().manual_seed(1000 + start))
            part = x.chunk(self.world)[self.rank]
            yield part, part[:, :4].sin()
            start += 1


class ToyLM(nn.Module):
    """A language model with a tied head whose loss is a method of its own, as our GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(0.0), Block(0.0)])
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)
        self.lm_head.weight = self.wte.weight

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


class ToyText(ToyData):
    """Texts of no to four tokens, padded, some without any in their second half: parts and ranks are unequal."""

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for step in itertools.count(start):
            tokens = torch.randint(16, (self.rows, 5), generator=torch.Generator().manual_seed(step))
            lengths = torch.arange(self.rows) % 5
            if step % 3 == 0:
                lengths[self.rows // 2 :] = 0
            targets = tokens.roll(-1, 1).masked_fill(torch.arange(5) >= lengths[:, None], -100)
            yield tokens.chunk(self.world)[self.rank], targets.chunk(self.world)[self.rank]


def text_task(model: nn.Module, rank: int = 0, world: int = 1) -> Task:
    return Task(
        model=model,
        loss=lambda model, tokens, targets: model.loss(tokens, targets),
        train=ToyText(8, rank, world),
        evaluate=lambda model: perplexity(model, itertools.islice(ToyText(8, rank, world).batches(500), 3)),
        unit="tokens",
        units_per_row=5,
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def toy_task(model: nn.Module, rank: int = 0, world: int = 1, **options: Any) -> Task:
    def evaluate(model: nn.Module) -> dict[str, float]:
        x, y = (t.to(model.seen.device) for t in next(ToyData(16, rank, world).batches(10_000_000)))
        squares = (model(x) - y).square().sum()
        return {"error": float(sum_over_ranks(squares)) / (16 * 4)}

    return Task(model=model, loss=loss_of, train=ToyData(8, rank, world), evaluate=evaluate, **options)


def make_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "horst":
        return HORST(params, lr=0.02, weight_decay=0.1, alpha=5.0)
    if name == "adams":
        return AdamS(params, lr=0.02, weight_decay=0.1, steps=26, pull=0.05)
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def make_sparsifier(name: str | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> sparsity.Sparsifier | None:
    phases = sparsity.Phases((4, 8, 13, 17, 21), end=30)
    if name == "acdc":
        return sparsity.ACDC(model, optimizer, sparsity=0.9, schedule=phases)
    if name == "acdc-values":
        return sparsity.ACDC(model, optimizer, sparsity=0.7, schedule=phases, restore="values")
    if name == "rigl":
        return sparsity.RigL(model, optimizer, sparsity=0.8, schedule=sparsity.DropGrow(every=4, end=26, fraction=0.5))
    if name == "srste":
        return sparsity.SRSTE(model, optimizer)
    if name == "ast":
        return sparsity.AST(model, optimizer, decay=0.1, ramp_steps=12, every=4)
    if name == "admm":
        return sparsity.ADMM(model, optimizer, sparsity=0.8, steps=26, every=4, penalty=0.5, projection="second_moment")
    if name == "safe":
        return sparsity.safe(model, optimizer, sparsity=0.8, steps=26, every=4, penalty=0.5)
    if name == "cast":
        return sparsity.CAST(model, optimizer, every=4)
    if name == "imp":
        return sparsity.IMP(model, optimizer, sparsity=0.9, schedule=sparsity.Rounds(3, 9, rewind_to=2))
    if name == "lrr":
        return sparsity.lrr(model, optimizer, sparsity=0.7, steps=30, schedule=sparsity.Rounds(3, 9))
    assert name is None
    return None


STEPS, SCHEDULE = 30, OneCycle(warmup_steps=5)
CONFIG = LoopConfig(
    precision="float32",
    compile="off",
    clip_norm=0.5,
    ema_decay=0.9,
    eval_every=7,
    log_every=4,
    checkpoint_every=6,
)


def toy_run(
    directory: Path,
    config: LoopConfig = CONFIG,
    *,
    steps: int = STEPS,
    optimizer: str = "horst",
    method: str | None = "acdc",
    dropout: float = 0.1,
    kind: Literal["ddp", "fsdp"] = "ddp",
    text: bool = False,
    statistics: bool = False,
    device: str = "cpu",
) -> tuple[dict[str, Tensor], TrainResult]:
    """Train, alone or with the other processes there are; the final weights, whole, and the result."""
    torch.manual_seed(3)
    toy = ToyWithStatistics if statistics else Toy
    model = parallelize(ToyLM() if text else toy(dropout), kind, device)
    opt = make_optimizer(optimizer, model.parameters())
    sparsifier = make_sparsifier(method, model, opt)
    task = (text_task if text else toy_task)(model, rank(), world_size())
    try:
        result = train(task, opt, config, steps=steps, schedule=SCHEDULE, sparsifier=sparsifier, directory=directory)
    finally:
        if sparsifier is not None:
            sparsifier.close()
    weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    if sparsifier is not None:
        weights["mask hash"] = torch.tensor(sparsifier.mask_hash() % 2**62)
    return weights, result


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def signal_at(steps: set[int], number: int) -> type[ToyData]:
    """Batches that come with a signal to this process; each step's is sent once."""

    class Signalling(ToyData):
        def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
            for step, batch in enumerate(super().batches(start), start + 1):
                if step in steps:
                    steps.remove(step)
                    os.kill(os.getpid(), number)
                yield batch

    return Signalling


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what a clock says."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds" and not k.endswith("_per_second")} for line in lines]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
