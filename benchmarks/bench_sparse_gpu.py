"""Sparse layers on a GPU against cuBLAS: single layers, and a Llama of a billion parameters that generates text.

    python benchmarks/bench_sparse_gpu.py --layers --model --out benchmarks/results/sparse_gpu.json
    python benchmarks/bench_sparse_gpu.py --launches     # every shape of a launch, to choose defaults from

Every kernel is compared with float64 first; if one is wrong, no time is printed. Layers are timed inside a CUDA graph
that goes through many copies of the weight, more than the cache holds, as a model's decoding does. The floor is the
bytes of the stored weight over the bandwidth of a large copy measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.kernels.sparse_matvec import Launch, SparseRows, pack, sparse_matvec
from horst.kernels.sparse_matvec.timing import copies_beyond_cache, graph_seconds
from horst.lab.experiments.result import Result, environment

# (outputs, inputs): the layers of Llama 3 8B.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
TOKENS = (1, 2, 4, 8, 16, 32, 64)
LAUNCHES = [
    Launch(rows, block, warps, overlap)
    for overlap in (False, True)
    for rows, block, warps in (
        *((4, 128, 4), (8, 128, 8), (2, 128, 2), (1, 128, 1), (8, 128, 4), (16, 32, 4), (8, 64, 4)),
        *((1, 256, 1), (4, 256, 4), (1, 512, 1), (1, 512, 4), (1, 256, 2), (1, 1024, 4), (2, 512, 4)),
    )
]
Row = dict[str, Any]
device = torch.device("cuda")


def pruned(rows: int, columns: int, sparsity: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(rows, columns, device=device, generator=generator).to(dtype)
    return weight.masked_fill_(torch.rand(rows, columns, device=device, generator=generator) < sparsity, 0)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read plus written."""
    source = torch.randn(2**29, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / graph_seconds([lambda: target.copy_(source)], launches=4)


def check(name: str, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within the rounding of a float32 sum and of the result: no order of n additions is further off."""
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    allowed = (weight.shape[1] + 2) * 2**-24 * size + torch.finfo(y.dtype).eps * exact.abs()
    if not bool(((y.double() - exact).abs() <= allowed).all()):
        raise SystemExit(f"{name} is wrong by {float((y.double() - exact).abs().max())}: no time is printed")


def check_kernels(launches: list[Launch]) -> None:
    """Each launch, each dtype and each number of gathers, on a matrix with rows of all lengths, empty ones too."""
    weight = pruned(528, 1999, 0.8)
    weight *= (torch.rand_like(weight) < torch.linspace(0, 1, 528, device=device).unsqueeze(1)).to(weight.dtype)
    cases = [(launch, torch.bfloat16, tokens) for launch in launches for tokens in (1, 4, 16) if fits(launch, tokens)]
    cases += [(launches[0], dtype, n) for dtype in (torch.float16, torch.float32) for n in (1, 2, 8, 19)]
    for launch, dtype, tokens in cases:
        matrix, x = pack(weight.to(dtype)), torch.randn(tokens, 1999, device=device).to(dtype)
        bias = None if dtype == torch.bfloat16 else torch.randn(528, device=device).to(dtype)
        y = sparse_matvec(x, matrix, bias, launch)
        check(f"{launch} with {tokens} tokens in {dtype}", y, x, weight.to(dtype), bias)
        if not torch.equal(y, sparse_matvec(x, matrix, bias, launch)):
            raise SystemExit(f"{launch} with {tokens} tokens in {dtype} is not deterministic: no time is printed")


def fits(launch: Launch, tokens: int) -> bool:
    """Whether the sums of a step fit into a thread's registers."""
    return launch.rows * launch.block * tokens <= 2048 * launch.warps


def rotated(nbytes: int, make: Callable[[], Callable[[], object]]) -> list[Callable[[], object]]:
    return [make() for _ in range(copies_beyond_cache(nbytes, device))]


def dense_seconds(weight: Tensor, x: Tensor) -> float:
    def one() -> Callable[[], object]:
        copy = weight.clone()
        return lambda: F.linear(x, copy)

    return graph_seconds(rotated(weight.nbytes, one))


def sparse_seconds(matrix: SparseRows, x: Tensor, launch: Launch | None) -> float:
    def one() -> Callable[[], object]:
        copy = matrix.map(torch.clone)
        return lambda: sparse_matvec(x, copy, None, launch)

    return graph_seconds(rotated(matrix.nbytes, one))


class Report:
    """Rows that are printed and saved as they come."""

    def __init__(self, path: Path, config: Row) -> None:
        self.path, self.config, self.rows, self.notes = path, config, list[Row](), list[str]()
        self.begin, self.environment = time.perf_counter(), environment("cuda")

    def add(self, row: Row) -> None:
        """Print a row, and save all so far."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.save()

    def save(self) -> None:
        """Write the result file."""
        seconds = round(time.perf_counter() - self.begin, 1)
        Result(
            experiment="bench_sparse_gpu",
            config=self.config,
            rows=self.rows,
            curves={},
            notes=self.notes,
            environment=self.environment,
            seconds=seconds,
        ).save(self.path)


def bench_launches(report: Report, bandwidth: float, launches: list[Launch]) -> None:
    """Every launch on each layer, for one token and for several; the best three of each are printed last."""
    best: list[str] = []
    for (rows, columns), sparsity in itertools.product(SHAPES, (0.8, 0.9, 0.95)):
        weight = pruned(rows, columns, sparsity)
        for int8 in (False, True) if sparsity == 0.9 else (False,):
            matrix = pack(weight, int8=int8)
            floor = matrix.nbytes / bandwidth
            for tokens in (1, 4, 16) if sparsity == 0.9 and not int8 else (1,):
                x = torch.randn(tokens, columns, device=device).to(weight.dtype)
                dense = dense_seconds(weight, x)
                found = {}
                for launch in (launch for launch in launches if fits(launch, tokens)):
                    found[launch] = sparse_seconds(matrix, x, launch)
                    report.add(
                        {
                            "what": "launch",
                            "outputs": rows,
                            "inputs": columns,
                            "sparsity": sparsity,
                            "values": "int8" if int8 else "bfloat16",
                            "tokens": tokens,
                            "kernel": str(launch),
                            "microseconds": found[launch] * 1e6,
                            "floor_microseconds": floor * 1e6,
                            "times_floor": found[launch] / floor,
                            "dense_microseconds": dense * 1e6,
                            "times_faster": dense / found[launch],
                        }
                    )
                first = sorted(found, key=found.__getitem__)[:3]
                words = "; ".join(f"{launch}: {found[launch] * 1e6:.2f} us" for launch in first)
                best.append(
                    f"{rows} x {columns}, {sparsity:.0%}, {'int8' if int8 else 'bf16'}, {tokens} tokens: dense "
                    f"{dense * 1e6:.2f} us, floor {floor * 1e6:.2f} us; {words}; {dense / found[first[0]]:.2f} x"
                )
    print("\n".join(best))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", action="store_true", help="every shape of a launch, to choose defaults from")
    parser.add_argument("--out", type=Path, default=Path("runs/sparse_gpu.json"))
    options = parser.parse_args()
    with torch.no_grad():
        report = Report(options.out, {"dtype": "bfloat16", "shapes": SHAPES})
        check_kernels(LAUNCHES if options.launches else LAUNCHES[:1])
        bandwidth = copy_bandwidth()
        report.notes.append(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s, read plus written, measured in this run")
        print(report.notes[0], flush=True)
        if options.launches:
            bench_launches(report, bandwidth, LAUNCHES)
    report.save()


if __name__ == "__main__":
    main()
