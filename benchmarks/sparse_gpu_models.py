"""A Llama with random weights that generates one text, dense and sparse, in several ways.

- ``generate``: transformers' own loop. The host's time counts, and is most of it.
- ``static``: the same with a static cache, for which transformers compiles the step of decoding, with CUDA graphs.
- ``graph``: ``horst.export.Decoder``, whose step is captured in a CUDA graph.
- ``compiled``: the same with a compiled step.

Dense and sparse are alike in all but their layers. A way that fails leaves a note; the others still count.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from horst.export import Decoder, SparseLinear, sparsify
from horst.extras import load_extra

# The shapes of Llama 3.2 1B and Llama 3 8B, with a small vocabulary, whose matrix stays dense.
MODELS = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
VOCABULARY = 32000
NEW_TOKENS = 64
ROUNDS = 7
device = torch.device("cuda")


class Report(Protocol):
    """What rows and notes go to."""

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""

    def note(self, words: str) -> None:
        """Keep a note."""


def llama(size: str, sparsity: float) -> nn.Module:
    """A Llama with random weights in bfloat16, the linear layers of its blocks pruned at random."""
    transformers = load_extra("transformers")
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    no_end = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.LlamaConfig(**MODELS[size], **heads, **no_end, max_position_embeddings=2048)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:
            module.weight.masked_fill_(torch.rand_like(module.weight, dtype=torch.float32) < sparsity, 0)
    return model


def generation(options: dict[str, Any]) -> Callable[[dict[str, nn.Module], Tensor], dict[str, float]]:
    """Seconds per new token by transformers' generate: the median of four, after two that compile and capture."""

    def seconds(model: nn.Module, prompt: Tensor) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        common = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        model.generate(prompt, **common, **options)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / NEW_TOKENS

    def measure(models: dict[str, nn.Module], prompt: Tensor) -> dict[str, float]:
        # one model after the other: torch's compiler keeps the graphs of one run of calls
        times = {name: [seconds(model, prompt) for _ in range(6)][2:] for name, model in models.items()}
        return {name: statistics.median(taken) for name, taken in times.items()}

    return measure


def decoding(compiled: bool) -> Callable[[dict[str, nn.Module], Tensor], dict[str, float]]:
    """Seconds per new token by one step in a graph, the median of several rounds of one text."""

    def seconds(decoder: Decoder) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        decoder.advance(NEW_TOKENS)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / NEW_TOKENS

    def measure(models: dict[str, nn.Module], prompt: Tensor) -> dict[str, float]:
        decoders = {name: Decoder(model, length=1024, compile=compiled) for name, model in models.items()}
        for decoder in decoders.values():
            decoder.start(prompt)
        rounds = [{name: seconds(decoder) for name, decoder in decoders.items()} for _ in range(ROUNDS)]
        return {name: statistics.median(one[name] for one in rounds) for name in models}

    return measure


# By the name of the option: what the way is called in tables, and how it is measured.
WAYS: dict[str, tuple[str, Callable[[dict[str, nn.Module], Tensor], dict[str, float]]]] = {
    "generate": ("generate", generation({})),
    "static": ("generate, static cache", generation({"cache_implementation": "static"})),
    "graph": ("graph", decoding(compiled=False)),
    "compiled": ("compiled graph", decoding(compiled=True)),
}


def free_memory() -> None:
    """Let go of what models that are no longer used have left: compiled code, and memory that torch keeps."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def bench_model(report: Report, size: str, sparsity: float, ways: Sequence[str]) -> None:
    """Tokens per second of one text, and memory, dense and sparse."""
    free_memory()  # of the model before this one
    before = torch.cuda.memory_allocated()
    dense = llama(size, sparsity)
    memory = {"dense": torch.cuda.memory_allocated() - before}
    begin = time.perf_counter()
    sparse = sparsify(copy.deepcopy(dense))
    conversion = time.perf_counter() - begin
    gc.collect()
    memory["sparse"] = torch.cuda.memory_allocated() - before - memory["dense"]
    models, prompt = {"dense": dense, "sparse": sparse}, torch.randint(1, VOCABULARY, (1, 32), device=device)
    layers = sum(isinstance(module, SparseLinear) for module in sparse.modules())
    errors = []
    for ids in (prompt, prompt[:, :1]):  # many tokens, and one: each has a kernel of its own
        logits = {name: model(ids).logits.float() for name, model in models.items()}
        errors.append((logits["sparse"] - logits["dense"]).norm() / logits["dense"].norm())
    error = float(torch.stack(errors).max())  # NaN if one is
    if not error < 0.05:
        raise SystemExit(f"the sparse model's outputs differ by {error:.3f} of their size: no time is printed")
    common = {"what": "model", "model": f"Llama {size}", "sparsity": sparsity, "sparse_layers": layers}
    common |= {"parameters": sum(p.numel() for p in dense.parameters()), "relative_error": error}
    common |= {"conversion_s": conversion}
    kernels = {module.plan.kernel(1) for module in sparse.modules() if isinstance(module, SparseLinear)}
    report.note(f"Llama {size}: {layers} sparse layers by {'; '.join(sorted(kernels))}, in {conversion:.1f} s")
    for way in ways:
        words, measure = WAYS[way]
        begin = time.perf_counter()
        try:
            seconds = measure(models, prompt)
        except Exception as failure:  # a version of transformers that has not this way: the others still count
            first = str(failure).splitlines()[0] if str(failure) else ""
            report.note(f"Llama {size}, {words}: {type(failure).__name__}: {first}")
            continue
        finally:
            gc.collect()  # graphs and caches of this way
        for name, taken in seconds.items():
            found = {"way": words, "form": name, "tokens_per_second": 1 / taken, "milliseconds": 1e3 * taken}
            found |= {"times_faster": seconds["dense"] / taken, "memory_bytes": memory[name]}
            report.add({**common, **found, "memory_ratio": memory[name] / memory["dense"]})
        report.note(f"Llama {size}, {words}: measured in {time.perf_counter() - begin:.0f} s")
