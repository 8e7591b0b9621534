"""The table of sparse-training methods, a tiny transformer, and a training run whose every step can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from horst import AdamS
from horst.sparsity import (
    ACDC,
    ADMM,
    AST,
    CAST,
    GMP,
    IMP,
    SET,
    SRSTE,
    AtInit,
    Cubic,
    DropGrow,
    Phases,
    RigL,
    Rounds,
    Sparsifier,
    Static,
    lrr,
    sparse_opt,
    sparse_pretraining,
    svite,
)

TOTAL = 26  # steps of a run
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 12)
        self.fc2 = nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class Tiny(nn.Module):
    """Embedding, two blocks, head: 384 weights in the blocks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Linear(6, WIDTH)
            self.blocks = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, size: int = 8) -> Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    x = batch(step)
    return (model(x) - x[:, :4].sin()).square().mean()


PHASES = Phases((4, 8, 13, 17, 21), end=TOTAL)
CUBIC = Cubic(begin=3, end=20, every=5)
DROP_GROW = DropGrow(every=4, end=22, fraction=0.5)
ROUNDS = Rounds(rounds=3, steps_per_round=8, rewind_to=2)
DENSE_STEPS = 22  # of methods that are dense until their end

Factory = Callable[..., Sparsifier]
METHODS: dict[str, Factory] = {
    "acdc": lambda m, o, **k: ACDC(m, o, sparsity=0.9, schedule=PHASES, **k),
    "acdc-values": lambda m, o, **k: ACDC(m, o, sparsity=0.7, schedule=PHASES, restore="values", **k),
    "acdc-2:4": lambda m, o, **k: ACDC(m, o, schedule=PHASES, pattern="2:4", **k),
    "gmp": lambda m, o, **k: GMP(m, o, sparsity=0.8, schedule=CUBIC, **k),
    "sparse_pretraining": lambda m, o, **k: sparse_pretraining(m, o, sparsity=0.8, steps=TOTAL, **k),
    "gmp-erk-block": lambda m, o, **k: GMP(
        m, o, sparsity=0.75, schedule=CUBIC, distribution="erk", pattern=(2, 2), **k
    ),
    "rigl": lambda m, o, **k: RigL(m, o, sparsity=0.8, schedule=DROP_GROW, **k),
    "svite": lambda m, o, **k: svite(
        m, o, sparsity=0.8, steps=TOTAL, **{"schedule": DROP_GROW, "layers": "blocks", **k}
    ),
    "sparse_opt": lambda m, o, **k: sparse_opt(m, o, sparsity=0.8, steps=TOTAL, schedule=DROP_GROW, **k),
    "set": lambda m, o, **k: SET(m, o, sparsity=0.8, schedule=DROP_GROW, distribution="uniform", **k),
    "static": lambda m, o, **k: Static(m, o, sparsity=0.6, scale_gradients=True, **k),
    "imp": lambda m, o, **k: IMP(m, o, sparsity=0.9, schedule=ROUNDS, **k),
    "lrr": lambda m, o, **k: lrr(m, o, sparsity=0.9, steps=TOTAL, schedule=ROUNDS, **k),
    "random": lambda m, o, **k: AtInit(m, o, sparsity=0.7, score="random", seed=3, **k),
    "snip": lambda m, o, **k: AtInit(m, o, sparsity=0.7, score="snip", **{"loss": loss_of, **k}),
    "synflow": lambda m, o, **k: AtInit(
        m, o, sparsity=0.7, score="synflow", rounds=5, loss=lambda model: model(torch.ones(1, 6)).sum(), **k
    ),
    "srste": lambda m, o, **k: SRSTE(m, o, **k),
    "ast": lambda m, o, **k: AST(m, o, decay=0.1, ramp_steps=12, every=4, **k),
    "admm": lambda m, o, **k: ADMM(m, o, sparsity=0.8, steps=DENSE_STEPS, every=4, penalty=0.5, **k),
    "admm-2:4": lambda m, o, **k: ADMM(m, o, steps=DENSE_STEPS, every=3, penalty=0.5, ramp=6, pattern="2:4", **k),
}
# Methods that ask something of the optimizer, and the optimizers that they run with.
WITH_OPTIMIZER: dict[str, tuple[Factory, Callable[[Any], torch.optim.Optimizer]]] = {
    "elsa": (
        lambda m, o, **k: ADMM(
            m, o, sparsity=0.8, steps=DENSE_STEPS, every=4, penalty=0.5, projection="second_moment", **k
        ),
        lambda params: adamw(params),
    ),
    "cast": (lambda m, o, **k: CAST(m, o, sparsity=0.8, every=4, **k), lambda params: adams(params)),
    "cast-2:4": (lambda m, o, **k: CAST(m, o, every=3, **k), lambda params: adams(params)),
}
EVERY_METHOD: dict[str, Factory] = METHODS | {name: factory for name, (factory, _) in WITH_OPTIMIZER.items()}
# One that asks something of the loop: a second backward pass.
SAFE: Factory = lambda m, o, **k: ADMM(m, o, sparsity=0.8, steps=DENSE_STEPS, every=4, penalty=0.5, sam_radius=0.1, **k)  # noqa: E731


def expected_zeros(method: str, step: int) -> int:
    """How many weights must be masked after ``step`` steps, worked out here and not by the library."""
    layers, total = 4, 384
    sparse = 4 <= step < 8 or 13 <= step < 17 or step >= 21
    if method in ("acdc", "acdc-values", "acdc-2:4"):
        share = {"acdc": Fraction(9, 10), "acdc-values": Fraction(7, 10), "acdc-2:4": Fraction(1, 2)}[method]
        return int(share * total) if sparse else 0
    if method == "sparse_pretraining":  # from a quarter of the 26 steps to three quarters, at every step
        left = (1 - Fraction(min(max(step - 6, 0), 14), 14)) ** 3
        return layers * int(Fraction(4, 5) * (1 - left) * 96)
    if method.startswith("gmp"):
        due = [s for s in (3, 8, 13, 18, 20) if s <= step]
        if not due:
            return 0
        left = (1 - Fraction(due[-1] - 3, 17)) ** 3
        if method == "gmp":
            return layers * int(Fraction(4, 5) * (1 - left) * 96)
        return 4 * int(Fraction(3, 4) * (1 - left) * 96)  # 96 blocks of four weights, one budget
    if method.startswith(("admm", "elsa", "safe", "cast")):
        return 0 if step < DENSE_STEPS else layers * (48 if method.endswith("2:4") else 76)
    if method in ("imp", "lrr"):
        done = sum(step >= s for s in (8, 14, 20))
        return {0: 0, 1: 205, 2: 301, 3: 345}[done]  # floor(384 * (1 - 0.1 ** (r / 3)))
    share = {
        "rigl": Fraction(8, 10),
        "svite": Fraction(8, 10),
        "sparse_opt": Fraction(8, 10),
        "static": Fraction(6, 10),
        "random": Fraction(7, 10),
        "snip": Fraction(7, 10),
        "synflow": Fraction(7, 10),
        "srste": Fraction(1, 2),
        "ast": Fraction(1, 2),
        "set": Fraction(8, 10),
    }[method]
    return layers * int(share * 96) if method in ("set", "static", "random", "srste", "ast") else int(share * total)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def adams(params: Any) -> torch.optim.Optimizer:
    return AdamS(params, lr=0.02, weight_decay=0.1, steps=DENSE_STEPS, pull=0.05)


def optimizer_for(
    method: str, params: Any, default: Callable[[Any], torch.optim.Optimizer] = adamw
) -> torch.optim.Optimizer:
    """The optimizer that ``method`` asks for, else the default."""
    return (WITH_OPTIMIZER[method][1] if method in WITH_OPTIMIZER else default)(params)


def backward(sparsifier: Sparsifier, loss: Callable[[], Tensor]) -> None:
    """A backward pass, or with SAM two of them."""
    loss().backward()
    if getattr(sparsifier, "sam_radius", 0.0):
        with sparsifier.ascended():
            loss().backward()


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], sparsifier: Sparsifier, step: int) -> Any:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, step).backward()
    for optimizer in optimizers:
        optimizer.step()
    return sparsifier.step()


def zeros_in_blocks(model: nn.Module) -> int:
    return sum(int((p == 0).sum()) for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, sparsifier: Sparsifier) -> dict[str, Any]:
    """All state of a run, for comparison bit for bit."""
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
        "sparsifier": sparsifier.state_dict(),
    }


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested structures of tensors differ, in any bit (two NaN of the same bits agree)."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a))} and {sorted(map(str, b))}"]
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: lengths {len(a)} and {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}/{i}")]
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        return [] if same else [f"{path}: {a} and {b}"]
    return [] if a == b else [f"{path}: {a!r} and {b!r}"]


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.dtype != torch.bool else x


def train_with_scaler(method, *, enabled):
    """The weights after six steps of an optimizer that unscales inside its step, with or without a GradScaler."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    sparsifier = method(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=enabled)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
    return model.state_dict()
