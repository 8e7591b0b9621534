"""Time and memory of one optimizer step: HORST against torch.optim.AdamW, and against what the memory allows.

    python benchmarks/bench_optimizer_step.py --device cuda --out results/benchmarks/optimizer_step_h200.json

The step's tests run first; if they fail, no time is printed. Every contender steps the same tensors in the same run, in
rounds that alternate between contenders on a CPU. On a GPU a step is timed twice: many in a row, as when the host runs
ahead of the device in training, and alone on an idle device, where the host's own time shows. The floor is 28 bytes per
float32 parameter (weight, gradient and two moments read, all but the gradient written) over the bandwidth of a large
copy measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from horst import HAM, HORST, with_mirror_step
from horst.lab.experiments.result import Result, environment
from horst.optimizers.l1 import soft_threshold

BYTES_PER_PARAMETER = 28
ROOT = pathlib.Path(__file__).parents[1]


def gpt2_shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """GPT-2's tensors: 12 per block, two embeddings, the final norm."""
    w = width
    block = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    return [(50257, w), (1024, w), *block * layers, (w,), (w,)]


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "gpt2-small": gpt2_shapes(12, 768),
    "gpt2-xl": gpt2_shapes(48, 1600),
    "flat-1.07e9": [(2**30,)],
    "tiny": gpt2_shapes(1, 8)[1:],
    "gpt-34m": [(16000, 512), (256, 512), *[(1536, 512), (512, 512), (2048, 512), (512, 2048), (512,), (512,)] * 8],
}

Make = Callable[[list[nn.Parameter]], Optimizer]
COMMON = {"lr": 1e-3, "weight_decay": 0.1}


def adamw_l1(params: list[nn.Parameter]) -> Optimizer:
    """Fused AdamW with l1 as a pass of its own after the step."""
    optimizer = AdamW([{"params": params, "l1": 0.03}], fused=True, **COMMON)
    soft_threshold(optimizer)
    return optimizer


CONTENDERS: dict[str, dict[str, tuple[Make, bool]]] = {
    "cuda": {
        "AdamW for-loop": (lambda p: AdamW(p, foreach=False, **COMMON), False),
        "AdamW foreach": (lambda p: AdamW(p, foreach=True, **COMMON), False),
        "AdamW fused": (lambda p: AdamW(p, fused=True, **COMMON), False),
        "HORST for-loop": (lambda p: HORST(p, foreach=False, **COMMON), False),
        "HORST foreach": (lambda p: HORST(p, foreach=True, **COMMON), False),
        "HORST fused (default)": (lambda p: HORST(p, **COMMON), False),
        "HORST fused, l1": (lambda p: HORST(p, l1=0.03, **COMMON), False),
        "AdamW fused + l1 hook": (adamw_l1, False),
        "HAM fused": (lambda p: HAM(p, **COMMON), False),
        "AdamW fused + mirror": (lambda p: with_mirror_step(AdamW(p, fused=True, **COMMON)), False),
        # last: a process that has compiled anything runs its Python slower
        "HORST foreach compiled": (lambda p: HORST(p, foreach=True, **COMMON), True),
    },
    "cpu": {
        "AdamW (default)": (lambda p: AdamW(p, **COMMON), False),
        "AdamW foreach": (lambda p: AdamW(p, foreach=True, **COMMON), False),
        "AdamW fused": (lambda p: AdamW(p, fused=True, **COMMON), False),
        "HORST (default)": (lambda p: HORST(p, **COMMON), False),
        "HORST foreach": (lambda p: HORST(p, foreach=True, **COMMON), False),
        "HORST compiled": (lambda p: HORST(p, **COMMON), True),
        "HORST alpha=0 (default)": (lambda p: HORST(p, alpha=0.0, **COMMON), False),
        "HORST (default), l1": (lambda p: HORST(p, l1=0.03, **COMMON), False),
        "HORST foreach, l1": (lambda p: HORST(p, l1=0.03, foreach=True, **COMMON), False),
        "AdamW fused + l1 hook": (adamw_l1, False),
        "HAM (default)": (lambda p: HAM(p, **COMMON), False),
        "AdamW fused + mirror": (lambda p: with_mirror_step(AdamW(p, fused=True, **COMMON)), False),
    },
}
# Slow and long known to be: not worth a GPU's time on the larger shapes.
ONLY_SMALL = ("AdamW for-loop", "HORST for-loop", "HORST foreach compiled")
LAST = "gpt2-small"


def parameters(shapes: list[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, generator=generator).mul_(0.02)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, device=device, generator=generator).mul_(1e-3)
    return params


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, read plus written."""
    source = torch.randn(2**30 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)  # noqa: E731
    seconds = cuda_seconds(copy, 20, 1) if device.type == "cuda" else min(cpu_seconds(copy) for _ in range(10))
    return 2 * source.numel() * source.element_size() / seconds


def cuda_seconds(step: Callable[[], object], repeats: int, steps: int) -> float:
    """Median time of a step between two device events, with ``steps`` of them in a row."""
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(steps):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / steps)
    return statistics.median(times)


def host_seconds(step: Callable[[], object], repeats: int, steps: int = 10) -> float:
    """Median time until ``step`` returns, with ``steps`` of them in a row and the device idle before the first."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        times.append((time.perf_counter() - begin) / steps)
    torch.cuda.synchronize()
    return statistics.median(times)


def cpu_seconds(step: Callable[[], object]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def bench_cuda(name: str, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    params = parameters(SHAPES[name], device)
    count = sum(p.numel() for p in params)
    floor = BYTES_PER_PARAMETER * count / bandwidth
    for contender, (make, compiled) in CONTENDERS["cuda"].items():
        if name != LAST and contender in ONLY_SMALL:
            continue
        optimizer = make(params)
        optimizer.step()  # makes the state, so that what follows is the step's own memory
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        seconds = cuda_seconds(step, 9, 10 if count < 10**9 else 3)
        alone, host = cuda_seconds(step, 21, 1), host_seconds(step, 21)
        rows.append(row(name, contender, len(params), count, seconds, floor, alone=alone, host=host, extra=extra))
        del optimizer, step
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def bench_cpu(name: str, bandwidth: float, rounds: int) -> list[dict[str, Any]]:
    steps = {}
    for contender, (make, compiled) in CONTENDERS["cpu"].items():
        params = parameters(SHAPES[name], torch.device("cpu"))
        optimizer = make(params)
        steps[contender] = torch.compile(optimizer.step) if compiled else optimizer.step
        steps[contender]()
        steps[contender]()
    times: dict[str, list[float]] = {contender: [] for contender in steps}
    for _ in range(rounds):
        for contender, step in steps.items():
            times[contender].append(cpu_seconds(step))
    count = sum(math.prod(s) for s in SHAPES[name])
    floor = BYTES_PER_PARAMETER * count / bandwidth
    return [row(name, c, len(SHAPES[name]), count, statistics.median(t), floor) for c, t in times.items()]


def row(
    shapes: str, contender: str, tensors: int, parameters: int, seconds: float, floor: float, **more: float
) -> dict[str, Any]:
    return {
        "shapes": shapes,
        "tensors": tensors,
        "parameters": parameters,
        "optimizer": contender,
        "milliseconds": seconds * 1e3,
        "floor_milliseconds": floor * 1e3,
        "times_floor": seconds / floor,
        **({"alone_milliseconds": more["alone"] * 1e3} if more else {}),
        **({"host_milliseconds": more["host"] * 1e3, "extra_mebibytes": more["extra"] / 2**20} if more else {}),
    }


def add_ratios(rows: list[dict[str, Any]], against: str) -> None:
    for kind in ("", "alone_"):
        baseline = {r["shapes"]: r.get(f"{kind}milliseconds") for r in rows if r["optimizer"] == against}
        for r in rows:
            if f"{kind}milliseconds" in r:
                r[f"{kind}times_{against}"] = r[f"{kind}milliseconds"] / baseline[r["shapes"]]


def table(rows: list[dict[str, Any]], against: str) -> str:
    titles = (
        "shapes",
        "optimizer",
        "ms",
        "x floor",
        f"x {against}",
        "alone ms",
        f"x {against}",
        "host ms",
        "extra MiB",
    )
    lines = ["{:12} {:24} {:>9} {:>8} {:>17} {:>9} {:>17} {:>8} {:>10}".format(*titles)]
    for r in rows:
        line = f"{r['shapes']:12} {r['optimizer']:24} {r['milliseconds']:9.3f} {r['times_floor']:8.3f} "
        line += f"{r[f'times_{against}']:17.3f}"
        if "alone_milliseconds" in r:
            line += f" {r['alone_milliseconds']:9.3f} {r[f'alone_times_{against}']:17.3f}"
            line += f" {r['host_milliseconds']:8.3f} {r['extra_mebibytes']:10.1f}"
        lines.append(line)
    return "\n".join(lines)


def tests_pass() -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/kernels/test_horst_step.py"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="default: all for the device")
    parser.add_argument("--rounds", type=int, default=15, help="rounds on a CPU")
    parser.add_argument("--threads", type=int, default=None, help="torch threads on a CPU; default: one per core")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/optimizer_step.json"))
    args = parser.parse_args()
    if not tests_pass():
        sys.exit("the step's tests fail: no time is printed for wrong results")
    device = torch.device(args.device)
    start = time.perf_counter()
    if args.threads:
        torch.set_num_threads(args.threads)
    bandwidth = copy_bandwidth(device)
    rows = []
    on_cuda = device.type == "cuda"
    for name in args.shapes or (["flat-1.07e9", "gpt2-xl", LAST] if on_cuda else ["gpt-34m"]):
        rows += bench_cuda(name, device, bandwidth) if on_cuda else bench_cpu(name, bandwidth, args.rounds)
    against = "AdamW fused" if device.type == "cuda" else "AdamW (default)"
    add_ratios(rows, against)
    if device.type == "cpu":
        add_ratios(rows, "AdamW fused")
    result = Result(
        experiment="bench_optimizer_step",
        config={"device": args.device, "dtype": "float32", "bytes_per_parameter": BYTES_PER_PARAMETER},
        rows=rows,
        curves={},
        notes=[f"copy bandwidth {bandwidth / 1e12:.3f} TB/s, read plus written, measured in this run"],
        environment=environment(args.device),
        seconds=time.perf_counter() - start,
    )
    print(result.notes[0])
    print(table(rows, against))
    print(f"-> {result.save(args.out)}")


if __name__ == "__main__":
    main()
