"""What masks cost: exact selection beside ``torch.kthvalue``, and the engine inside a DeiT-small training step.

    python benchmarks/bench_sparsity.py --device cuda --out runs/sparsity.json     # 1e9 weights, batch 1024
    python benchmarks/bench_sparsity.py --device cpu --sizes 1e6 1e7 --batch 4      # small, anywhere

Selections are checked (count, and every removed magnitude at most every kept one) before any time is printed. Rows go
to a JSON file with device, versions and commit. Times are medians; memory is the peak above what was there before,
with and without the mask that is returned (one byte a weight).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from horst.lab.experiments.result import Result, environment
from horst.sparsity import ACDC, Phases, Static
from horst.sparsity.selection import exact_floor, smallest


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory above the present; None where it cannot be read (CPU)."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    synchronize(device)
    return torch.cuda.max_memory_allocated() - before


def check(weights: Tensor, mask: Tensor, k: int) -> None:
    """The mask removes exactly k, and no removed weight is larger than a kept one."""
    if int(mask.count_nonzero()) != k:
        raise AssertionError(f"{int(mask.count_nonzero())} weights selected instead of {k}")
    largest_removed, smallest_kept = torch.tensor(-1.0), torch.tensor(torch.inf)
    for start in range(0, weights.numel(), 1 << 24):
        w, m = weights[start : start + (1 << 24)].abs().float(), mask[start : start + (1 << 24)]
        largest_removed = torch.maximum(largest_removed, torch.where(m, w, -1.0).amax().cpu())
        smallest_kept = torch.minimum(smallest_kept, torch.where(m, torch.inf, w).amin().cpu())
    if not largest_removed <= smallest_kept:
        raise AssertionError(f"removed {largest_removed}, kept {smallest_kept}")


def bench_selection(
    n: int, dtype: torch.dtype, content: str, sparsity: float, device: torch.device
) -> dict[str, object]:
    weights = torch.empty(n, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for start in range(0, n, 1 << 24):
        weights[start : start + (1 << 24)].normal_(std=0.02, generator=generator)
    k = exact_floor(sparsity, n)
    if content == "nine tenths zero":  # what gradual pruning selects from
        weights.masked_fill_(smallest([weights], exact_floor(0.9, n))[0], 0)
        k = exact_floor(0.95, n)
    elif content == "all equal":
        weights.fill_(0.02)
    mask = smallest([weights], k)[0]
    check(weights, mask, k)
    del mask
    repeats = 3 if n > 10**8 else 5
    seconds = median_seconds(lambda: smallest([weights], k), device, repeats)
    peak = peak_bytes(lambda: smallest([weights], k), device)
    row: dict[str, object] = {
        "what": "selection",
        "weights": n,
        "dtype": str(dtype).removeprefix("torch."),
        "content": content,
        "select_s": seconds,
        "extra_bytes_share": None if peak is None else (peak - n) / weights.nbytes,
        "extra_and_mask_bytes_share": None if peak is None else peak / weights.nbytes,
    }
    try:  # on the same tensor; the magnitudes are made outside the clock
        weights.abs_()
        torch.kthvalue(weights[:1000], 900)
        row["kthvalue_s"] = median_seconds(lambda: torch.kthvalue(weights, k), device, 1 if n > 10**8 else 3)
        row["kthvalue_over_select"] = row["kthvalue_s"] / seconds
    except (RuntimeError, torch.OutOfMemoryError) as error:
        row["kthvalue_error"] = str(error).splitlines()[0]
    return row


def bench_engine(batch: int, device: torch.device, steps: int) -> list[dict[str, object]]:
    """Seconds a training step of DeiT-small (bfloat16 autocast, fused AdamW, clipping), with and without masks."""
    import timm

    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)

    def seconds(sparse: str) -> float:
        torch.manual_seed(0)
        model = timm.create_model("deit_small_patch16_224").to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        sparsifier = None
        if sparse == "sparse phase":
            sparsifier = Static(model, optimizer, sparsity=0.9)
        elif sparse == "dense phase":
            sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=Phases((10**9,), end=10**9 + 1))

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if sparsifier is not None:
                sparsifier.step()

        for _ in range(3 if device.type == "cuda" else 1):
            step()
        return median_seconds(step, device, steps)

    plain = seconds("no masks")
    rows: list[dict[str, object]] = []
    for kind in ("no masks", "dense phase", "sparse phase"):
        s = plain if kind == "no masks" else seconds(kind)
        row = {"what": "deit_small step", "batch": batch, "masks": kind, "step_s": s, "overhead": s / plain - 1.0}
        rows.append(row)
    model = timm.create_model("deit_small_patch16_224").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sparsifier = Static(model, optimizer, sparsity=0.9)
    for layer in sparsifier.layers:
        layer.param.grad = torch.zeros_like(layer.param)

    def masking_alone() -> None:
        sparsifier.mask_gradients()
        sparsifier.step()

    masking_alone()
    rows.append({"what": "masking alone", "masks": "sparse phase", "step_s": median_seconds(masking_alone, device, 50)})
    sparsifier.close()
    acdc = ACDC(model, optimizer, sparsity=0.9, schedule=Phases((0,), end=1))
    prune = median_seconds(lambda: acdc._select(0.9), device, 3)
    rows.append({"what": "one global selection, deit_small", "step_s": prune})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e7, 1e8, 1e9])
    parser.add_argument("--batch", type=int, default=1024, help="of the training step; 0 leaves it out")
    parser.add_argument("--steps", type=int, default=30, help="timed training steps")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_sparsity.json"))
    options = parser.parse_args()
    device = torch.device(options.device)
    start = time.perf_counter()
    rows = []
    for size in map(int, options.sizes):
        for dtype, content in (
            (torch.float32, "normal"),
            (torch.float32, "nine tenths zero"),
            (torch.float32, "all equal"),
            (torch.bfloat16, "normal"),
        ):
            rows.append(bench_selection(size, dtype, content, 0.9, device))
            print(json.dumps(rows[-1]), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.batch:
        for row in bench_engine(options.batch, device, options.steps):
            rows.append(row)
            print(json.dumps(row), flush=True)
    Result(
        experiment="bench_sparsity",
        config={"device": options.device, "sizes": options.sizes, "batch": options.batch, "steps": options.steps},
        rows=rows,
        curves={},
        notes=[],
        environment=environment(options.device),
        seconds=round(time.perf_counter() - start, 1),
    ).save(options.out)


if __name__ == "__main__":
    main()
