"""How long one-shot pruning takes: GPT-2 small, 128 x 512 calibration tokens.

    python benchmarks/bench_pruning.py --device cuda --out runs/pruning.json    # GPT-2 small, 12 blocks of 768
    python benchmarks/bench_pruning.py --tiny                                   # a small model, anywhere

Weights are random: the time does not depend on what they are. On a GPU, the model lives on the host first, with one
block at a time on the device, then on the device. SparseGPT and Wanda prune once, at 50 %; magnitude goes through all
levels from 10 to 90 % by the paper's rule, without evaluation. Before a time is printed the counts are checked, and
that the first layer's output is nearer to the dense one after SparseGPT than after magnitude. Each time is the second
of two runs, so that no library is being loaded; peaks are of the device's memory. Rows go to a JSON file with device,
versions and commit.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from horst.lab.experiments.result import Result, environment
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.pruning import Report, prune, sweep
from horst.sparsity.selection import exact_floor

LEVELS = [round(0.1 * k, 1) for k in range(1, 10)]
TINY = GPT2Config(layers=4, heads=2, width=32, context=16, vocabulary=64)


def timed(action: Callable[[], Any], device: torch.device) -> tuple[Any, float, int | None]:
    """What ``action`` returns, its seconds, and the peak of the device's memory (None on a CPU)."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = action()
    if is_cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - start, torch.cuda.max_memory_allocated() if is_cuda else None


def check(report: Report, sparsity: float) -> None:
    """Every layer has lost exactly its share."""
    for layer in report.layers:
        if layer.weights - layer.kept != exact_floor(sparsity, layer.weights):
            raise AssertionError(f"{layer.name} keeps {layer.kept} of {layer.weights} weights at {sparsity}")


@torch.no_grad()
def first_layer_error(dense: GPT2, pruned: GPT2, batches: list[torch.Tensor]) -> float:
    """Share of the output of the first block's first layer that is lost on the calibration data."""
    W, V = (model.transformer.h[0].attn.c_attn.weight.double() for model in (dense, pruned))
    lost = energy = 0.0
    for batch in batches[:4]:
        tokens = batch.to(W.device)
        embedded = dense.transformer.wte(tokens) + dense.transformer.wpe.weight[: batch.shape[1]]
        X = dense.transformer.h[0].ln_1(embedded).flatten(0, 1).double()
        lost += float((X @ (V - W).t()).square().sum())
        energy += float((X @ W.t()).square().sum())
    return lost / energy


def bench(model: GPT2, batches: list[torch.Tensor], device: torch.device, home: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    model.to(device if home == "device" else "cpu")
    shape = {"parameters": sum(p.numel() for p in model.parameters()), "model_on": home}
    tokens = sum(batch.numel() for batch in batches)
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        for repeat in range(2):
            pruned = copy.deepcopy(model)
            report, seconds, peak = timed(
                lambda: prune(pruned, 0.5, method=method, data=batches, device=device),  # noqa: B023
                device,
            )
            if repeat == 0:
                check(report, 0.5)
                errors[method] = first_layer_error(model, pruned, batches)
        row = {"what": method, "sparsity": 0.5, "tokens": 0 if method == "magnitude" else tokens, **shape}
        rows.append({**row, "seconds": seconds, "peak_bytes": peak})
    if not errors["sparsegpt"] < errors["magnitude"]:
        raise AssertionError(f"the error of sparsegpt is not below that of magnitude: {errors}")
    for _ in range(2):
        levels, seconds, peak = timed(
            lambda: sweep(model, LEVELS, evaluate=lambda _: {}, layers="paper", device=device), device
        )
    if [round(row["sparsity_of_pruned_layers"], 3) for row in levels[1:]] != LEVELS:
        raise AssertionError(f"the levels are {[row['sparsity_of_pruned_layers'] for row in levels]}")
    row = {"what": "magnitude, the paper's rule at nine levels", "sparsity": LEVELS, "tokens": 0, **shape}
    return [*rows, {**row, "seconds": seconds, "peak_bytes": peak}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model and data so small that a CPU takes seconds")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_pruning.json"))
    options = parser.parse_args()
    device = torch.device(options.device)
    config = TINY if options.tiny else GPT2Config()
    sequences = 16 if options.tiny else 128
    torch.manual_seed(0)
    model = GPT2(config).eval()
    batches = list(torch.randint(config.vocabulary, (sequences, config.context)).split(options.batch))
    start = time.perf_counter()
    rows = []
    for home in ("host",) if device.type == "cpu" else ("host", "device"):
        for row in bench(model, batches, device, home):
            rows.append(row)
            print(json.dumps(row), flush=True)
    Result(
        experiment="bench_pruning",
        config={"device": options.device, "tiny": options.tiny, "sequences": sequences, "context": config.context},
        rows=rows,
        curves={},
        notes=["Random weights and tokens; the second of two runs."],
        environment=environment(options.device),
        seconds=round(time.perf_counter() - start, 1),
    ).save(options.out)


if __name__ == "__main__":
    main()
