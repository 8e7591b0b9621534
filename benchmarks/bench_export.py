"""What a pruned model's forms are worth: sizes of files, time of linear layers, time of a whole GPT-2.

    python benchmarks/bench_export.py --device cpu --out benchmarks/results/export_cpu.json      # about ten minutes
    python benchmarks/bench_export.py --device cuda --out benchmarks/results/export_h200.json    # 2:4 on a GPU

Every kernel is compared with float64 before it is timed. Calls are taken in turns, so that whatever else the machine
does slows all of them; medians are reported, and the shortest times, which other work disturbs least. Weights are
random and pruned by magnitude: sizes and times do not depend on what the values are.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.export import compare, load_sparse, save_sparse, sparsify, to_semi_structured
from horst.export.cpu_kernels import KERNELS, TOKENS, available_kernels, csr_tensor, interleaved_times, to_csr
from horst.extras import load_extra
from horst.lab.experiments.result import Result, environment
from horst.sparsity import find_layers, magnitude_mask

# (outputs, inputs): the layers of GPT-2 small, and one that no cache of a core or two holds.
SHAPES = ((768, 768), (3072, 768), (768, 3072), (4096, 4096))
Row = dict[str, Any]


def pruned(rows: int, columns: int, sparsity: float, pattern: Any = None) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return weight.masked_fill_(~magnitude_mask(weight, sparsity, pattern=pattern), 0)


def summary(times: dict[str, list[float]], name: str) -> Row:
    """Median and shortest time of one call, and how many times faster than dense that is."""
    median, shortest = statistics.median(times[name]), min(times[name])
    return {
        "microseconds": 1e6 * median,
        "times_faster": statistics.median(times["dense"]) / median,
        "shortest_microseconds": 1e6 * shortest,
        "times_faster_shortest": min(times["dense"]) / shortest,
    }


def check(name: str, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Within rounding of float64: no order of n float32 additions is further off than n eps times the magnitudes."""
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    if not bool(((y.double() - exact).abs() <= weight.shape[1] * 2**-24 * size).all()):
        raise AssertionError(f"{name} is wrong by {float((y.double() - exact).abs().max())}")


def alternatives(weight: Tensor, bias: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Our kernels, and what else there is: torch's own 64-bit indices, blocks, SciPy."""
    csr = to_csr(weight)
    calls = {
        name: functools.partial(KERNELS[name], x, weight if name == "dense" else csr, bias)
        for name in available_kernels()
    }
    if "csr" in calls:
        wide = csr_tensor(csr.crow_indices().long(), csr.col_indices().long(), csr.values(), csr.shape)
        blocks = weight.to_sparse_bsr((8, 8))
        calls["csr, 64-bit indices"] = functools.partial(KERNELS["csr"], x, wide, bias)
        calls["bsr 8 x 8"] = lambda: (blocks @ x.t().contiguous()).t().contiguous().add_(bias)
    scipy = load_extra("scipy.sparse")
    parts = (csr.values().numpy(), csr.col_indices().numpy(), csr.crow_indices().numpy())
    matrix = scipy.csr_matrix(parts, shape=tuple(csr.shape))
    calls["scipy csr"] = lambda: torch.from_numpy((matrix @ x.numpy().T).T) + bias
    return calls


def bench_layer(rows: int, columns: int, sparsity: float, tokens: int, threads: int, blocks: bool = False) -> list[Row]:
    weight = pruned(rows, columns, sparsity, (8, 8) if blocks else None)
    bias, x = torch.randn(rows), torch.randn(tokens, columns)
    calls = alternatives(weight, bias, x)
    for name, call in calls.items():
        check(name, call(), x, weight, bias)
    times = interleaved_times(calls, seconds=0.15 * len(calls), maximum=500)
    return [
        {
            "what": "layer",
            "outputs": rows,
            "inputs": columns,
            "sparsity": sparsity,
            "pattern": "8 x 8 blocks" if blocks else "unstructured",
            "tokens": tokens,
            "threads": threads,
            "kernel": name,
            **summary(times, name),
        }
        for name in times
    ]


def gpt2(sparsity: float, pattern: Any = None) -> nn.Module:
    """GPT-2 small, the linear layers of its blocks pruned: 68 % of its weights."""
    transformers = load_extra("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).eval()
    for layer in find_layers(model):
        weight = layer.param.data.movedim(layer.input_dim, -1)
        mask = magnitude_mask(weight.contiguous(), None if pattern == "2:4" else sparsity, pattern=pattern)
        weight.masked_fill_(~mask, 0)
    return model


def bench_files(sparsity: float) -> list[Row]:
    """Sizes and seconds of the sparse file, for the pruned weights alone and for the whole model."""
    model = gpt2(sparsity)
    pruned_alone = {layer.name: layer.param.data for layer in find_layers(model)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for content, state in (("pruned weights", pruned_alone), ("whole model", dict(model.state_dict()))):
            dense = save_sparse(state, Path(folder) / "dense", min_sparsity=1.0).stat().st_size
            start = time.perf_counter()
            size = save_sparse(state, Path(folder) / "sparse").stat().st_size
            saved = time.perf_counter()
            loaded = load_sparse(Path(folder) / "sparse")
            seconds = {"save_s": saved - start, "load_s": time.perf_counter() - saved}
            if not all(torch.equal(loaded[name], tensor) for name, tensor in state.items()):
                raise AssertionError("the round trip is not exact")
            sizes = {"dense_bytes": dense, "sparse_bytes": size, "ratio": size / dense}
            rows.append(
                {"what": "file", "content": f"GPT-2 small, {content}", "sparsity": sparsity, **sizes, **seconds}
            )
    return rows


def bench_model(sparsity: float, tokens: int, threads: int, forms: tuple[str, ...]) -> list[Row]:
    """One call of the whole model, and of its blocks without the head."""
    model = gpt2(sparsity)
    ids = torch.randint(0, 50257, (1, tokens))
    rows = []
    for content, part in (("GPT-2 small", model), ("GPT-2 small without its head", model.transformer)):
        for row in compare(part, {"input_ids": ids}, forms=forms, seconds=6.0).rows:
            rows.append(
                {"what": "model", "content": content, "sparsity": sparsity, "tokens": tokens, "threads": threads, **row}
            )
    return rows


def bench_generation(sparsity: float, threads: int, new_tokens: int = 24) -> list[Row]:
    """Greedy generation with a cache from a prompt of 32 tokens: milliseconds a new token."""
    model = gpt2(sparsity)
    model.config.use_cache = model.generation_config.use_cache = True
    models = {"dense": model, "sparse-linear": sparsify(copy.deepcopy(model))}
    prompt = torch.randint(0, 50257, (1, 32))
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    calls = {
        name: functools.partial(one.generate, prompt, attention_mask=torch.ones_like(prompt), **options)
        for name, one in models.items()
    }
    times = interleaved_times(calls, seconds=0.0, minimum=5)
    a_token = {name: [seconds / new_tokens for seconds in taken] for name, taken in times.items()}
    common = {"what": "generation", "content": "GPT-2 small, prompt of 32", "sparsity": sparsity, "threads": threads}
    return [{**common, "form": name, **summary(a_token, name)} for name in a_token]


def bench_semi_structured(rows: int, columns: int, tokens: int) -> list[Row]:
    """bfloat16 on a GPU: F.linear with the dense 2:4 weight, and with torch's semi-structured form of it."""
    dense = nn.Linear(columns, rows).requires_grad_(False)
    dense.weight.data.masked_fill_(~magnitude_mask(dense.weight.data, pattern="2:4"), 0)
    dense.to("cuda", torch.bfloat16)
    sparse = copy.deepcopy(dense)
    to_semi_structured(sparse)
    x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(sparse(x), dense(x), rtol=2e-2, atol=2e-2)
    times: dict[str, list[float]] = {"dense": [], "2:4": []}
    for _ in range(30):
        for name, layer in (("dense", dense), ("2:4", sparse)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                layer(x)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 10 / 1e3)
    common = {"what": "2:4 layer", "outputs": rows, "inputs": columns, "tokens": tokens}
    return [{**common, "kernel": name, **summary(times, name)} for name in times]


def cpu_rows(threads: list[int]) -> list[Row]:
    rows: list[Row] = []

    def add(found: list[Row]) -> None:
        for row in found:
            print(json.dumps(row), flush=True)
        rows.extend(found)

    for sparsity in (0.5, 0.9):
        add(bench_files(sparsity))
    for count in threads:
        torch.set_num_threads(count)
        for shape in SHAPES:
            for tokens in TOKENS:
                add(bench_layer(*shape, 0.9, tokens, count))
        for sparsity in (0.5, 0.6, 0.7, 0.8, 0.95):
            for tokens in (1, 32, 512):
                add(bench_layer(3072, 768, sparsity, tokens, count))
        for tokens in TOKENS:
            add(bench_layer(3072, 768, 0.9, tokens, count, blocks=True))
        for tokens in (1, 128, 512):
            forms = ("sparse-linear", "onnx") if tokens == 128 else ("sparse-linear",)
            add(bench_model(0.9, tokens, count, forms))
        add(bench_generation(0.9, count))
    return rows


def gpu_rows() -> list[Row]:
    rows: list[Row] = []
    for shape in SHAPES:
        for tokens in (32, 512, 4096, 32768):
            rows += bench_semi_structured(*shape, tokens)
    model = gpt2(0.5, "2:4").to("cuda", torch.bfloat16)
    for batch in (1, 16, 64):
        ids = torch.randint(0, 50257, (batch, 512), device="cuda")
        found = compare(model, {"input_ids": ids}, forms=("2:4",), seconds=5.0).rows
        rows += [{"what": "model", "content": "GPT-2 small, 2:4", "tokens": batch * 512, **row} for row in found]
    for row in rows:
        print(json.dumps(row))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to measure with")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_export.json"))
    options = parser.parse_args()
    start = time.perf_counter()
    on_cpu = options.device == "cpu"
    with torch.no_grad():
        rows = cpu_rows(options.threads) if on_cpu else gpu_rows()
    Result(
        experiment="bench_export",
        config={
            "device": options.device,
            "threads": options.threads if on_cpu else None,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        rows=rows,
        curves={},
        notes=[
            "Calls taken in turns, on a machine that other work used at the same time: read the shortest times, too."
        ]
        if on_cpu
        else [],
        environment=environment(options.device),
        seconds=round(time.perf_counter() - start, 1),
    ).save(options.out)


if __name__ == "__main__":
    main()
