"""The kernels inside our models beside torch's and the plain formula, and beside the bytes they must move.

    python benchmarks/bench_model_kernels.py --out benchmarks/results/model_kernels_h200.json
    python benchmarks/bench_model_kernels.py --tiny                         # small shapes, anywhere

Attention over few tokens: forwards three tensors are read and one is written, backwards four and three. Cross-entropy
with its gradient: the logits are read, the gradient is written. The floor is those bytes over the rate at which the
device copies tensors of their size, measured in the same run. Each time is the median over rounds in which all
contenders take turns.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.lab.experiments.result import Result, environment
from horst.lab.kernels.cross_entropy import losses_and_gradient_, losses_and_gradient_reference
from horst.lab.kernels.short_attention import short_attention, short_attention_reference
from horst.lab.kernels.short_attention.reference import split_heads

#: By contender: what to time, and how many bytes it must move.
Calls = dict[str, tuple[Callable[[], Any], int]]


def torchs_attention(qkv: Tensor, heads: int) -> Tensor:
    """PyTorch's own kernel, on the same input and with the same output."""
    return F.scaled_dot_product_attention(*split_heads(qkv, heads)).transpose(1, 2).flatten(2)


def torchs_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def attention(device: torch.device, *shape: int) -> dict[str, Calls]:
    """By direction; the shape is batch, tokens, heads and their width."""
    batch, tokens, heads, head_width = shape
    qkv = random(batch, tokens, 3 * heads * head_width, device=device).requires_grad_()
    upstream = random(batch, tokens, heads * head_width, device=device)
    contenders = {
        "horst": short_attention,
        "scaled_dot_product_attention": torchs_attention,
        "formula, compiled": compiled(short_attention_reference, device),
    }
    backwards = partial(torch.autograd.grad, inputs=qkv, grad_outputs=upstream, retain_graph=True)
    return {
        "forwards": {name: (partial(f, qkv, heads), 4 * upstream.nbytes) for name, f in contenders.items()},
        "backwards": {name: (partial(backwards, f(qkv, heads)), 7 * upstream.nbytes) for name, f in contenders.items()},
    }


def cross_entropy(device: torch.device, *shape: int) -> dict[str, Calls]:
    """The shape is that of the logits."""
    logits, targets = random(*shape, device=device), torch.randint(shape[1], shape[:1], device=device)
    leaf = logits.clone().requires_grad_()
    torchs = compiled(torchs_cross_entropy, device)
    contenders = {
        "horst": partial(losses_and_gradient_, logits.clone(), targets),
        "F.cross_entropy, compiled": lambda: torch.autograd.grad(torchs(leaf, targets), leaf),
        "formula, compiled": partial(compiled(losses_and_gradient_reference, device), logits, targets),
    }
    return {"both": {name: (call, 2 * logits.nbytes) for name, call in contenders.items()}}


CASES = [(attention, (1024, tokens, 6, 64)) for tokens in (32, 64, 65, 128)]
CASES += [(cross_entropy, (rows, 50304)) for rows in (8192, 32768)]
TINY_CASES = [(attention, (2, 5, 2, 16)), (cross_entropy, (4, 100))]


def random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, by the device's own clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # the host runs ahead, so that launches are not part of the time
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def bench(about: dict[str, str], calls: Calls, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    moved = next(iter(calls.values()))[1]
    source = torch.empty(max(1, moved // 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {**calls, "copy": (lambda: target.copy_(source), moved)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for call, _ in calls.values():
            call()
    for _ in range(rounds):
        for name, (call, _) in calls.items():
            times[name].append(seconds(call, device))
    floor = statistics.median(times.pop("copy"))
    rows = []
    for name, found in times.items():
        took = statistics.median(found)
        rows.append(
            {
                **about, "contender": name, "microseconds": 1e6 * took, "floor_microseconds": 1e6 * floor,
                "times_floor": took / floor,
            }
        )  # fmt: skip
        print(f"{', '.join(about.values())}, {name}: {1e6 * took:.0f} us, {took / floor:.2f} x floor", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/model_kernels.json"))
    options = parser.parse_args()
    began = time.perf_counter()
    device = torch.device(options.device)
    rows = []
    for case, shape in TINY_CASES if options.tiny else CASES:
        for direction, calls in case(device, *shape).items():
            about = {"kernel": case.__name__, "shape": " x ".join(map(str, shape)), "direction": direction}
            rows += bench(about, calls, options.rounds, device)
    Result(
        experiment="bench_model_kernels",
        config={"rounds": options.rounds, "tiny": options.tiny},
        rows=rows,
        curves={},
        notes=["The floor is the bytes that must move over the rate of a copy of as many in the same rounds."],
        environment=environment(options.device),
        seconds=time.perf_counter() - began,
    ).save(options.out)


if __name__ == "__main__":
    main()
