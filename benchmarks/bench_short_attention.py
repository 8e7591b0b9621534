"""Attention over few tokens: our kernel, torch's, and the formula as matrix products, beside the bytes they must move.

    python benchmarks/bench_short_attention.py --out benchmarks/results/short_attention_h200.json
    python benchmarks/bench_short_attention.py --tiny                       # small shapes, anywhere

Forwards three tensors are read and one is written, backwards four and three, each ``batch * tokens * width`` numbers.
The floor is those bytes over the rate at which the device copies a tensor of their size, measured in the same run. Each
time is the median over rounds in which all contenders take turns.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.experiments.result import Result, environment
from horst.kernels.short_attention import short_attention, short_attention_reference
from horst.kernels.short_attention.reference import split_heads


def torchs(qkv: Tensor, heads: int) -> Tensor:
    """PyTorch's own kernel, on the same input and with the same output."""
    return F.scaled_dot_product_attention(*split_heads(qkv, heads)).transpose(1, 2).flatten(2)


CONTENDERS = {
    "horst": short_attention,
    "scaled_dot_product_attention": torchs,
    "matrix products, compiled": short_attention_reference,
}


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


def bench(batch: int, tokens: int, heads: int, head_width: int, rounds: int, device: torch.device) -> list[dict]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    qkv = torch.randn(batch, tokens, 3 * heads * head_width, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn(batch, tokens, heads * head_width, device=device, dtype=dtype)
    tensor_bytes = upstream.numel() * upstream.element_size()
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, function in CONTENDERS.items():
        if "compiled" in name and device.type == "cuda":
            function = torch.compile(function, dynamic=False)
        out = function(qkv, heads)
        calls[name, "forwards"] = lambda f=function: f(qkv, heads)
        calls[name, "backwards"] = lambda o=out: torch.autograd.grad(o, qkv, upstream, retain_graph=True)
    source = torch.empty(max(1, 2 * tensor_bytes), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls["copy", "forwards"] = lambda: target.copy_(source)  # as many bytes as a forward pass moves
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(3):
        for call in calls.values():
            call()
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(seconds(call, device))
    rate = 4 * tensor_bytes / statistics.median(times["copy", "forwards"])
    rows = []
    for (name, direction), found in times.items():
        if name != "copy":
            took, floor = statistics.median(found), (4 if direction == "forwards" else 7) * tensor_bytes / rate
            rows.append(
                {
                    "batch": batch, "tokens": tokens, "heads": heads, "head_width": head_width, "contender": name,
                    "direction": direction, "microseconds": 1e6 * took, "floor_microseconds": 1e6 * floor,
                    "times_floor": took / floor,
                }
            )  # fmt: skip
            print(f"{tokens} tokens, {name}, {direction}: {1e6 * took:.0f} us, {took / floor:.2f} x floor", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/short_attention.json"))
    options = parser.parse_args()
    began = time.perf_counter()
    batch, heads, head_width = (2, 2, 16) if options.tiny else (1024, 6, 64)
    rows = [
        row
        for tokens in (32, 64, 65, 128)
        for row in bench(batch, tokens, heads, head_width, options.rounds, torch.device(options.device))
    ]
    Result(
        experiment="bench_short_attention",
        config={"rounds": options.rounds, "tiny": options.tiny},
        rows=rows,
        curves={},
        notes=["The floor is the bytes that must move over the rate of a copy in the same run."],
        environment=environment(options.device),
        seconds=time.perf_counter() - began,
    ).save(options.out)


if __name__ == "__main__":
    main()
