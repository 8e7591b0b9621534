"""Generation on a CPU: what a user would try first, against sparse blocks and an int8 head.

    python benchmarks/bench_generate_cpu.py --out benchmarks/results/generate_cpu.json      # about five minutes

GPT-2 small (random weights, its blocks pruned by magnitude) generates greedily with its cache through transformers'
``generate``. The forms take turns, so that whatever else the machine does slows all of them; ratios of medians are
reported, and the shortest times, which other work disturbs least. Before anything is timed, every form's logits are
compared with those of float64. The head alone is measured too, in all the forms that torch has.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_export import gpt2
from torch import Tensor, nn

from horst.export import Int8Linear, quantize_head, sparsify
from horst.export.cpu_kernels import interleaved_times
from horst.export.forms import byte_size
from horst.export.int8_head import Int8Rows
from horst.lab.experiments.result import Result, environment

Row = dict[str, Any]
DENSE, DYNAMIC = "dense float32", "dense dynamic int8"
VOCABULARY, WIDTH = 50257, 768


class DynamicLinear(nn.Module):
    """torch's dynamic int8: weights per row, inputs per call, multiplied by FBGEMM or oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.detach().abs().amax(dim=1).clamp(min=1e-12).double() / 127
        with warnings.catch_warnings():  # deprecated from torch 2.15 on, and what users know
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            zeros = torch.zeros(len(weight), dtype=torch.long)
            quantized = torch.quantize_per_channel(weight.detach(), scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantized, bias)

    def forward(self, x: Tensor) -> Tensor:
        """The product with the weight as it was packed."""
        return torch.ops.quantized.linear_dynamic(x, self.packed, False)


def dynamic_int8(model: nn.Module) -> nn.Module:
    """Every linear layer in torch's dynamic int8, the head too; the embedding stays float32."""
    for name, layer in list(model.named_modules()):
        is_conv1d = type(layer).__name__ == "Conv1D"
        if not is_conv1d and not isinstance(layer, nn.Linear):
            continue
        weight = layer.weight.t().contiguous() if is_conv1d else layer.weight
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, DynamicLinear(weight, layer.bias))
    return model


def generating(sparsity: float) -> nn.Module:
    model = gpt2(sparsity)
    model.config.use_cache = model.generation_config.use_cache = True
    return model


def forms(model: nn.Module, prompt: int) -> dict[str, nn.Module]:
    counts = (1, prompt)
    made = {
        DENSE: lambda: copy.deepcopy(model),
        "dense bfloat16": lambda: copy.deepcopy(model).bfloat16(),
        DYNAMIC: lambda: dynamic_int8(copy.deepcopy(model)),
        "dense, int8 head": lambda: quantize_head(copy.deepcopy(model)),
        "sparse": lambda: sparsify(copy.deepcopy(model), tokens=counts),
        "sparse, int8 head": lambda: quantize_head(sparsify(copy.deepcopy(model), tokens=counts)),
    }
    return {name: make() for name, make in made.items()}


def logit_errors(models: dict[str, nn.Module], exact: nn.Module, tokens: Tensor) -> dict[str, Row]:
    """Root mean square error of the logits as a share of their deviation; how often the first choice is the same."""
    expected = exact(tokens).logits
    found = {}
    for name, model in models.items():
        logits = model(tokens).logits.double()
        error = float((logits - expected).square().mean().sqrt() / expected.std())
        if not error < 0.1:
            raise AssertionError(f"{name} is wrong: its logits are off by {error:.3f} of their deviation")
        same = float((logits.argmax(-1) == expected.argmax(-1)).double().mean())
        found[name] = {"logit_error": error, "same_choice": same}
    return found


def bench_generation(sparsity: float, threads: int, new_tokens: int, rounds: int) -> list[Row]:
    model = generating(sparsity)
    tokens = torch.randint(0, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(0))
    models = forms(model, tokens.shape[1])
    errors = logit_errors(models, copy.deepcopy(model).double(), tokens)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(one.generate, tokens, attention_mask=torch.ones_like(tokens), **options)
        for name, one in models.items()
    }
    for name, one in models.items():  # the blocks alone, with nothing but one token of work for Python beside them
        calls[f"{name}: one token"] = functools.partial(one, tokens[:, :1], use_cache=False)
    times = interleaved_times(calls, seconds=0.0, minimum=rounds)
    rows = []
    for name in models:
        taken, once = times[name], times[f"{name}: one token"]
        median, shortest = statistics.median(taken), min(taken)
        rows.append(
            {
                "what": "generation",
                "content": f"GPT-2 small, prompt of {tokens.shape[1]}, {new_tokens} new tokens",
                "sparsity": sparsity,
                "threads": threads,
                "form": name,
                "tokens_per_s": new_tokens / median,
                "times_faster": statistics.median(times[DENSE]) / median,
                "most_tokens_per_s": new_tokens / shortest,
                "times_faster_shortest": min(times[DENSE]) / shortest,
                "one_token_ms": 1e3 * statistics.median(once),
                "one_token_shortest_ms": 1e3 * min(once),
                # torch's dynamic int8 hides its weights from parameters() and buffers()
                "memory_ratio": None if name == DYNAMIC else byte_size(models[name]) / byte_size(models[DENSE]),
                **errors[name],
            }
        )
    return rows


def heads(weight: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """One token through the head, in the forms that torch has."""
    int8 = Int8Linear(Int8Rows(weight))
    rows, scales = int8.rows.codes, int8.rows.scales
    low, half, low_scales = weight.bfloat16(), weight.half(), scales.bfloat16()
    dynamic = DynamicLinear(weight, None)

    def integers() -> Tensor:
        step = x.abs().amax() / 127
        return torch._int_mm(torch.round(x / step).to(torch.int8), rows.t()).float() * (step * scales)

    return {
        DENSE: lambda: F.linear(x, weight),
        "bfloat16": lambda: F.linear(x.bfloat16(), low).float(),
        "float16": lambda: F.linear(x.half(), half).float(),
        "int8, quantize_head": lambda: int8(x),
        "int8, linear_dynamic": lambda: dynamic(x),
        "int8, _int_mm": integers,
        "int8 weight, bfloat16 inputs": lambda: torch._weight_int8pack_mm(x.bfloat16(), rows, low_scales).float(),
        "int8 weight, float32 inputs": lambda: torch._weight_int8pack_mm(x, rows, scales),
        "one pass over int8 bytes": lambda: rows.view(torch.int64).sum(),
    }


def bench_heads(threads: int, rounds: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    x = torch.randn(1, WIDTH, generator=generator)
    x[0, 0] = 30.0  # one input far above the others, as the last hidden states of trained models have
    exact = F.linear(x.double(), weight.double())
    calls = heads(weight, x)
    times = interleaved_times(calls, seconds=0.0, minimum=rounds)
    rows = []
    for name, taken in times.items():
        y = calls[name]()
        error = float((y.double() - exact).square().mean().sqrt() / exact.std()) if y.shape == exact.shape else None
        median = statistics.median(taken)
        row = {"what": "head", "outputs": VOCABULARY, "inputs": WIDTH, "threads": threads, "kernel": name}
        row |= {"milliseconds": 1e3 * median, "times_faster": statistics.median(times[DENSE]) / median}
        rows.append({**row, "shortest_ms": 1e3 * min(taken), "logit_error": error})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to measure with")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=11, help="calls of each form")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_generate_cpu.json"))
    options = parser.parse_args()
    start, rows = time.perf_counter(), []
    with torch.inference_mode():
        for count in options.threads:
            torch.set_num_threads(count)
            rows += bench_heads(count, 3 * options.rounds)
            rows += bench_generation(options.sparsity, count, options.new_tokens, options.rounds)
    for row in rows:
        print(json.dumps(row))
    Result(
        experiment="bench_generate_cpu",
        config={
            "threads": options.threads,
            "rounds": options.rounds,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "quantized_engine": torch.backends.quantized.engine,
        },
        rows=rows,
        curves={},
        notes=["Calls taken in turns, on a machine that other work may have used at the same time: read ratios."],
        environment=environment("cpu"),
        seconds=round(time.perf_counter() - start, 1),
    ).save(options.out)


if __name__ == "__main__":
    main()
