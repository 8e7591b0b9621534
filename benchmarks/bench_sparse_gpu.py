"""Sparse layers on a GPU against cuBLAS: single layers, and a Llama that generates text.

    python benchmarks/bench_sparse_gpu.py --layers --model 1b --out benchmarks/results/sparse_gpu.json
    python benchmarks/bench_sparse_gpu.py --layers --tokens 1           # the shortest look at the kernels
    python benchmarks/bench_sparse_gpu.py --model 1b --ways generate    # the host's time counts
    python benchmarks/bench_sparse_gpu.py --launches     # every shape of a launch, to choose defaults from

Every kernel is compared with float64 first; if one is wrong, no time is printed. Layers are timed inside a CUDA graph
that goes through many copies of the weight, more than the cache holds, as a model's decoding does. The floor is the
bytes of the stored weight over the bandwidth of a large copy measured in the same run. ``sparse_gpu_models.py`` beside
this file says how a model is timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sparse_gpu_models import MODELS, WAYS, bench_model
from torch import Tensor

from horst.export.gpu_kernels import LAUNCHES as DEFAULTS
from horst.kernels.sparse_matvec import Launch, SparseRows, expand, pack, sparse_matvec
from horst.kernels.sparse_matvec.staged import can_stage
from horst.kernels.sparse_matvec.timing import copies_beyond_cache, graph_seconds
from horst.lab.experiments.result import Result, environment

# (outputs, inputs): the layers of Llama 3 8B.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336))
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
TOKENS = (1, 2, 4, 8, 16, 32, 64)
MANY_TOKENS = (64, 128, 256, 512)
LAUNCHES = [
    *(
        Launch(rows, block, warps, overlap=True)
        for rows, block, warps in ((4, 128, 4), (8, 128, 4), (16, 32, 4), (8, 64, 4), (4, 256, 4), (1, 512, 1))
    ),
    *(
        Launch(rows, block, warps, overlap=True, staged=True)
        for warps in (4, 8, 16, 32)
        for rows in (warps, 2 * warps, 4 * warps)
        for block in (256, 512)
    ),
    *(Launch(rows, block, 16, overlap=True, staged=True) for rows in (112, 56) for block in (256, 512)),
    *(Launch(rows, 512, 16, staged=True) for rows in (16, 32)),
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
    # by a kernel: in a graph, a plain copy goes to an engine that is slower
    return 2 * source.nbytes / graph_seconds([lambda: torch.neg(source, out=target)], launches=4)


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
    triton, staged = (next(one for one in launches if one.staged == kind) for kind in (False, True))
    cases += [(triton, dtype, n) for dtype in (torch.float16, torch.float32) for n in (1, 2, 8, 19)]
    cases += [(staged, dtype, n) for dtype in (torch.float16, torch.bfloat16) for n in (2, 3, 5, 8, 19)]
    for launch, dtype, tokens in cases:
        matrix, x = pack(weight.to(dtype)), torch.randn(tokens, 1999, device=device).to(dtype)
        bias = None if dtype == torch.bfloat16 else torch.randn(528, device=device).to(dtype)
        if launch.staged and tokens % 2:  # an even width too: its inputs are staged in pairs
            even = pack(weight[:, :1992].to(dtype).contiguous())
            y = sparse_matvec(x[:, :1992].contiguous(), even, bias, launch)
            check(f"{launch} with {tokens} tokens", y, x[:, :1992], weight[:, :1992].to(dtype), bias)
        y = sparse_matvec(x, matrix, bias, launch)
        check(f"{launch} with {tokens} tokens in {dtype}", y, x, weight.to(dtype), bias)
        if not torch.equal(y, sparse_matvec(x, matrix, bias, launch)):
            raise SystemExit(f"{launch} with {tokens} tokens in {dtype} is not deterministic: no time is printed")


def fits(launch: Launch, tokens: int) -> bool:
    """Whether the sums of a step fit into a thread's registers."""
    return launch.staged or launch.rows * launch.block * tokens <= 2048 * launch.warps


def rotated(call: Callable[..., Tensor], copies: Sequence[Any]) -> float:
    """Seconds of a call with one of the copies, each in its turn."""
    return graph_seconds([functools.partial(call, one) for one in copies])


def copies_of(weight: Tensor | SparseRows) -> list[Any]:
    count = copies_beyond_cache(weight.nbytes, device)
    return [weight.clone() if isinstance(weight, Tensor) else weight.map(torch.clone) for _ in range(count)]


def dense_seconds(x: Tensor, copies: Sequence[Tensor]) -> float:
    return rotated(lambda weight: F.linear(x, weight), copies)


def sparse_seconds(x: Tensor, copies: Sequence[SparseRows], launch: Launch) -> float:
    return rotated(lambda matrix: sparse_matvec(x, matrix, None, launch), copies)


def expanded_seconds(x: Tensor, copies: Sequence[SparseRows]) -> float:
    return rotated(lambda matrix: F.linear(x, expand(matrix)), copies)


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

    def note(self, words: str) -> None:
        """Print a note, and keep it."""
        self.notes.append(words)
        print(words, flush=True)

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


def bench_launches(report: Report, bandwidth: float) -> None:
    """Every launch on each layer, for one token and for several; the best three of each are printed last."""
    best: list[str] = []
    for (rows, columns), sparsity in itertools.product(SHAPES, (0.8, 0.9, 0.95)):
        weight = pruned(rows, columns, sparsity)
        for int8 in (False, True) if sparsity == 0.9 else (False,):
            matrix = pack(weight, int8=int8)
            fitting = [launch for launch in LAUNCHES if not launch.staged or can_stage(matrix)]
            floor = matrix.nbytes / bandwidth
            copies, dense_copies = copies_of(matrix), copies_of(weight)
            for tokens in (1, 4, 16) if sparsity == 0.9 and not int8 else (1,):
                x = torch.randn(tokens, columns, device=device).to(weight.dtype)
                dense = dense_seconds(x, dense_copies)
                found = {}
                for launch in (launch for launch in fitting if fits(launch, tokens)):
                    found[launch] = sparse_seconds(x, copies, launch)
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


def bench_layers(report: Report, bandwidth: float, all_tokens: Sequence[int]) -> None:
    """Layers x sparsities x tokens: dense, the best of the default launches, and the expanded weight."""
    for rows, columns in SHAPES:
        faster: dict[int, dict[float, float]] = {tokens: {} for tokens in all_tokens}
        for sparsity, varied in [*((s, False) for s in SPARSITIES), (0.9, True)]:
            weight = pruned(rows, columns, sparsity)
            if varied:  # rows of all lengths, the same number of weights
                share = 2 * (1 - sparsity) * torch.rand(rows, 1, device=device)
                weight = pruned(rows, columns, 0.0).mul_(torch.rand_like(weight, dtype=torch.float32) < share)
            matrix = pack(weight)
            floor = matrix.nbytes / bandwidth
            copies, dense_copies = copies_of(matrix), copies_of(weight)
            names = [name for name, one in DEFAULTS.items() if not one.staged or can_stage(matrix)]
            for tokens in (1,) if varied else all_tokens:
                x = torch.randn(tokens, columns, device=device).to(weight.dtype)
                taken = {name: sparse_seconds(x, copies, DEFAULTS[name]) for name in names}
                best = min((seconds, name) for name, seconds in taken.items())
                names = [name for name in names if taken[name] < 1.3 * best[0]]  # the others gain nothing with tokens
                times = {"dense": dense_seconds(x, dense_copies), best[1]: best[0]}
                times["expanded"] = expanded_seconds(x, copies)
                check(best[1], sparse_matvec(x, matrix, None, DEFAULTS[best[1]]), x, weight)
                for name, seconds in times.items():
                    report.add(
                        {
                            "what": "layer",
                            "outputs": rows,
                            "inputs": columns,
                            "sparsity": sparsity,
                            "row_lengths": "varied" if varied else "alike",
                            "tokens": tokens,
                            "form": name if name in ("dense", "expanded") else "sparse",
                            "kernel": name,
                            "bytes_of_dense": 1.0 if name == "dense" else matrix.nbytes / weight.nbytes,
                            "microseconds": seconds * 1e6,
                            "floor_microseconds": (weight.nbytes / bandwidth if name == "dense" else floor) * 1e6,
                            "times_faster": times["dense"] / seconds,
                        }
                    )
                if not varied:
                    faster[tokens][sparsity] = times["dense"] / best[0]
        for tokens, by_sparsity in faster.items():
            report.note(f"{rows} x {columns}, {tokens} tokens: {crossing(by_sparsity)}")


def crossing(faster: dict[float, float]) -> str:
    """Where sparse becomes as fast as dense, between two measured sparsities by a straight line."""
    levels = sorted(faster)
    if faster[levels[0]] >= 1:
        return f"sparse is faster from {levels[0]:.0%} or below"
    for low, high in itertools.pairwise(levels):
        if faster[low] < 1 <= faster[high]:
            at = low + (high - low) * (1 - faster[low]) / (faster[high] - faster[low])
            return f"sparse is faster from about {at:.0%}"
    return f"sparse is not faster up to {levels[-1]:.0%}"


def bench_many_tokens(report: Report) -> None:
    """Batches and prompts: dense, torch's 2:4, and a weight of 90 % zeros expanded for the call."""
    for rows, columns in SHAPES:
        weight = pruned(rows, columns, 0.0)
        two_four = weight.clone()
        two_four.view(-1, 4)[:, ::2] = 0
        matrix = pack(pruned(rows, columns, 0.9))
        copies, dense_copies = copies_of(matrix), copies_of(weight)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*prototype stage", category=UserWarning)
            halves = [torch.sparse.to_sparse_semi_structured(two_four) for _ in range(len(dense_copies))]
        for tokens in MANY_TOKENS:
            x = torch.randn(tokens, columns, device=device).to(weight.dtype)
            times = {
                "dense": dense_seconds(x, dense_copies),
                "2:4": dense_seconds(x, halves),
                "expanded": expanded_seconds(x, copies),
            }
            for name, seconds in times.items():
                common = {"what": "many tokens", "outputs": rows, "inputs": columns, "tokens": tokens, "form": name}
                faster = times["dense"] / seconds
                report.add({**common, "microseconds": seconds * 1e6, "times_faster": faster})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", action="store_true", help="layers x sparsities x tokens, and many tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens of --layers")
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=[], help="models that generate text")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["generate", "graph"], help="how they run")
    parser.add_argument("--launches", action="store_true", help="every shape of a launch, to choose defaults from")
    parser.add_argument("--sparsity", type=float, default=0.9, help="sparsity of the models")
    parser.add_argument("--out", type=Path, default=Path("runs/sparse_gpu.json"))
    options = parser.parse_args()
    with torch.no_grad():
        report = Report(options.out, {"dtype": "bfloat16", "shapes": SHAPES, "models": MODELS})
        check_kernels(LAUNCHES if options.launches else list(DEFAULTS.values()))
        bandwidth = copy_bandwidth()
        report.note(f"copy bandwidth {bandwidth / 1e12:.3f} TB/s, read plus written, measured in this run")
        if options.launches:
            bench_launches(report, bandwidth)
        if options.layers:
            bench_layers(report, bandwidth, sorted(options.tokens))
            if max(options.tokens) == max(TOKENS):
                bench_many_tokens(report)
        for size in options.model:
            bench_model(report, size, options.sparsity, options.ways)
    report.save()


if __name__ == "__main__":
    main()
