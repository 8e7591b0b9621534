"""AdamW and HORST side by side: train a small GPT on real text, prune it in one shot, see what is left.

    python examples/quickstart.py

The text is the source of Python's standard library, which every machine has. Both optimizers get the same seeds, data,
budget and learning rate; the one line that differs is the optimizer's. About a minute on two cores, no GPU needed.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import statistics
import sys
import sysconfig
import time
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst import HORST, param_groups
from horst.experiments.result import Result, environment

CONTEXT, WIDTH, LAYERS, HEADS = 128, 64, 4, 4
LR, WEIGHT_DECAY, BATCH, WARMUP = 2e-3, 0.1, 16, 40
SPARSITIES = (0.0, 0.5, 0.7, 0.8, 0.9)


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text() -> tuple[Tensor, Tensor]:
    """The standard library's bytes; every twentieth file, by a hash of its name, is held out."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not skipped & set(relative.parts):
            parts[zlib.crc32(relative.as_posix().encode()) % 20 == 0].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(p)), dtype=torch.uint8) for p in parts)
    return train, held_out


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    chunk = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return chunk[:, :-1], chunk[:, 1:]


def train(name: str, text: Tensor, seed: int, steps: int) -> GPT:
    torch.manual_seed(seed)
    model = GPT()
    groups = param_groups(model, weight_decay=WEIGHT_DECAY, alpha=5.0)
    if name == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    else:
        optimizer = HORST(groups, lr=LR, betas=(0.9, 0.95))  # the one line
    rate = lambda k: min(1.0, (k + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * k / steps))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    order = torch.Generator().manual_seed(seed)
    for k in range(steps):
        inputs, targets = windows(text, torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=order))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if sys.stderr.isatty() and (k + 1) % 10 == 0:
            sys.stderr.write(f"\r{name:6} seed {seed}  step {k + 1:4d}/{steps}  loss {loss.item():.3f} ")
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 60 + "\r")
    return model


@torch.no_grad()
def prune(model: GPT, sparsity: float) -> None:
    """Zero the floor(s * n) smallest weights of each matrix in the blocks: the paper's one-shot rule."""
    for name, p in model.blocks.named_parameters():
        if p.ndim == 2 and name.endswith("weight"):
            p.view(-1)[p.abs().flatten().argsort()[: math.floor(sparsity * p.numel() + 1e-9)]] = 0.0


@torch.no_grad()
def perplexity(model: GPT, text: Tensor, batches: int = 12) -> float:
    starts = torch.arange(batches * 32) * ((len(text) - CONTEXT - 1) // (batches * 32))
    losses = [
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        for inputs, targets in (windows(text, part) for part in starts.split(32))
    ]
    return torch.stack(losses).mean().exp().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=pathlib.Path, default=None, help="write a result file too")
    args = parser.parse_args()
    start = time.perf_counter()
    text, held_out = read_text()
    size = sum(p.numel() for p in GPT().parameters())
    print(f"A GPT of {size / 1e3:.0f} k parameters, {args.steps} steps on {len(text) / 1e6:.1f} MB of Python source.")
    print("Perplexity a byte on held-out files, after one-shot magnitude pruning of the blocks' matrices:\n")
    print(f"{'optimizer':16}" + "".join(f"{'dense' if s == 0 else f'{s:.0%}':>12}" for s in SPARSITIES))
    means, results = {}, []
    for name in ("AdamW", "HORST"):
        rows = []
        for seed in args.seeds:
            model = train(name, text, seed, args.steps)
            row = []
            for sparsity in SPARSITIES:  # each level removes what the one before did, and more
                prune(model, sparsity)
                row.append(perplexity(model, held_out))
            rows.append(row)
            results.append(
                {"optimizer": name, "seed": seed, "perplexity": dict(zip(map(str, SPARSITIES), row, strict=True))}
            )
            print(f"{f'{name}, seed {seed}':16}" + "".join(f"{value:12.2f}" for value in row), flush=True)
        means[name] = [statistics.mean(column) for column in zip(*rows, strict=True)]
    gains = [h / a - 1 for a, h in zip(means["AdamW"], means["HORST"], strict=True)]
    print(f"{'HORST is':16}" + "".join(f"{gain:+12.1%}" for gain in gains) + "   (mean; less is better)")
    if args.out is not None:
        Result(
            experiment="quickstart",
            config={"steps": args.steps, "seeds": args.seeds, "lr": LR, "alpha": 5.0, "parameters": size},
            rows=results,
            curves={},
            notes=["The text is the standard library of the Python version below."],
            environment=environment(),
            seconds=round(time.perf_counter() - start, 1),
        ).save(args.out)
    print(f"\n{time.perf_counter() - start:.0f} seconds. Next: README.md, or horst.HORST in your own training loop.")


if __name__ == "__main__":
    main()
