"""A pruned model in each form against dense: bytes in a file and in memory, measured time, and quality.

Plain statements go with the numbers: a form that stores zeros, or multiplies them, is as large or as slow as before.
"""

from __future__ import annotations

import functools
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horst.export.cpu_kernels import interleaved_times
from horst.export.forms import FORMS, Built, Use, float_tensors, tokens_seen
from horst.kernels.trial import first_line
from horst.parameters.modes import Batch, as_call, evaluating

_FORMATS = {"form": "{}", "file_bytes": "{:,.2f} MB", "memory_bytes": "{:,.2f} MB", "speedup": "{:.2f}"}
_FORMATS |= dict.fromkeys(("file_ratio", "memory_ratio", "milliseconds"), "{:.3f}") | {"max_error": "{:.1e}"}
_FORMATS |= {"tokens_per_s": "{:.1f}", "generation_speedup": "{:.2f}"}
_HEADINGS = {
    "file_bytes": "file",
    "file_ratio": "of dense",
    "memory_bytes": "memory",
    "memory_ratio": "of dense",
    "milliseconds": "ms per call",
    "speedup": "times faster",
    "max_error": "largest error",
    "tokens_per_s": "tokens per s",
    "generation_speedup": "times faster",
}
DEFAULT_FORMS = ("dense", "sparse-safetensors", "sparse-linear")
PROMPT = 8  # tokens before those that are generated: few, so that the time is that of generation
# What making a form raises where it cannot be made: of ours, of torch, or a missing package.
_CANNOT = (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Comparison:
    """One row per form, and notes on reading them.

    Each row has ``form``, ``file_bytes``, ``memory_bytes`` (parameters and buffers), ``milliseconds`` (median of a
    call), their ratios to the dense row (``file_ratio``, ``memory_ratio``, ``speedup``) and ``max_error``, the largest
    difference of an output from the dense model's. If asked for, it also has ``tokens_per_s`` of generation with its
    ratio ``generation_speedup``, and what ``evaluate`` returned. None: the form has no such number.
    """

    rows: list[dict[str, Any]]
    notes: list[str]

    def markdown(self) -> str:
        """The rows as a Markdown table, and the notes as a list."""
        columns = list(self.rows[0])
        heads = [_HEADINGS.get(column, column) for column in columns]
        lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(columns)]
        for row in self.rows:
            megabytes = {key: row[key] and row[key] / 1e6 for key in ("file_bytes", "memory_bytes")}
            cells = ["" if v is None else _FORMATS.get(key, "{:.4g}").format(v) for key, v in (row | megabytes).items()]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes)]) + "\n"


@torch.no_grad()
def compare(
    model: nn.Module,
    example_inputs: Batch,
    *,
    forms: Sequence[str] = DEFAULT_FORMS,
    seconds: float = 5.0,
    new_tokens: int = 0,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
) -> Comparison:
    """Measure a pruned model, dense and in other forms, on this machine.

    Times are medians of calls taken in turns. The model itself is not changed: a form that runs is made from a
    copy. A form that cannot be made here is left out, and a note says why.

    Args:
        model: The pruned model, on the device to measure on.
        example_inputs: A tensor, a sequence of arguments, or a mapping from names to arguments. The number of tokens
            in it decides much: measure with what you will run.
        forms: Names among ``"dense"`` (always there), ``"dense-bfloat16"``; ``"sparse-safetensors"`` (a file, dense
            again when loaded), the same with ``-bfloat16``, ``-int8`` or ``-int4`` at its end for its values, or with
            ``-int8-int8-head`` or ``-int4-int8-head`` for a head in int8 too; ``"sparse-linear"`` (:func:`sparsify` for
            the number of tokens in ``example_inputs``),
            ``"sparse-linear-int8-head"`` (with :func:`quantize_head`), ``"onnx"`` (extra ``onnx``) and ``"2:4"``
            (:func:`to_semi_structured`, on a GPU).
        seconds: Duration of all timing of calls together.
        new_tokens: Number of tokens to generate greedily, with a cache, after the first 8 of ``example_inputs``, a
            mapping with ``input_ids``; 0 measures no generation. For models of transformers.
        evaluate: Function of a model that returns numbers by name, such as its perplexity; each becomes a column.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> comparison = compare(model, torch.randn(2, 64), seconds=0.01)
        >>> [row["form"] for row in comparison.rows]
        ['dense', 'sparse-safetensors', 'sparse-linear']
    """
    unknown = [form for form in forms if form not in FORMS]
    if unknown:
        raise ValueError(f"forms must be among {', '.join(FORMS)}, got {unknown}.")
    call = as_call(example_inputs)
    if new_tokens and not (hasattr(model, "generate") and "input_ids" in call[1]):
        raise ValueError("new_tokens is for models with a method generate, called with a mapping that has input_ids.")
    with evaluating(model), tempfile.TemporaryDirectory() as folder:
        tokens = tokens_seen(model, call) | ({1} if new_tokens else set())
        built, notes = _build(model, forms, Use(call, tuple(sorted(tokens)) or (1,), pathlib.Path(folder)))
        timed = {form: one.call for form, one in built.items() if one.call is not None and one.timed}
        times = interleaved_times(timed, seconds=seconds)
        milliseconds = {form: 1e3 * statistics.median(taken) for form, taken in times.items()}
        speed = _generation(built, call[1]["input_ids"], new_tokens) if new_tokens else {}
        outputs = {form: list(float_tensors(one.call())) for form, one in built.items() if one.call is not None}
        quality = _evaluate(built, evaluate) if evaluate is not None else {}
    rows: list[dict[str, Any]] = [
        {
            "form": form,
            "file_bytes": one.file_bytes,
            "file_ratio": _ratio(one.file_bytes, built["dense"].file_bytes),
            "memory_bytes": one.memory_bytes,
            "memory_ratio": _ratio(one.memory_bytes, built["dense"].memory_bytes),
            "milliseconds": milliseconds.get(form),
            "speedup": _ratio(milliseconds["dense"], milliseconds.get(form)),
            "max_error": _largest_difference(outputs[form], outputs["dense"]) if form in outputs else None,
        }
        for form, one in built.items()
    ]
    for row in rows:
        form = row["form"]
        if new_tokens:
            row["tokens_per_s"] = speed.get(form)
            row["generation_speedup"] = _ratio(speed.get(form), speed["dense"])
        row |= quality.get(form, dict.fromkeys(quality.get("dense", ())))
    where = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    first = f"Measured on {where.type} with {torch.get_num_threads()} threads, torch {torch.__version__}."
    slow = [
        f"{row['form']} is not faster than dense for these inputs in one call: {row['speedup']:.2f} times."
        for row in rows
        if row["form"] != "dense" and row["speedup"] is not None and row["speedup"] < 1.05
    ]
    return Comparison(rows, [first, *notes, *slow])


def _build(model: nn.Module, forms: Sequence[str], use: Use) -> tuple[dict[str, Built], list[str]]:
    """The forms that can be made, dense first, and what to say of them and of the others."""
    built = {"dense": FORMS["dense"].make(model, use)}
    notes = list(built["dense"].notes)
    for name in dict.fromkeys(form for form in forms if form != "dense"):
        try:
            built[name] = FORMS[name].make(model, use)
        except _CANNOT as error:
            notes.append(f"{name} is left out: {first_line(error).rstrip('.')}.")
        else:
            notes += built[name].notes
    return built, notes


def _generation(built: Mapping[str, Built], prompt: Tensor, new_tokens: int) -> dict[str, float]:
    """Tokens per second of generation, by form."""
    prompt = prompt[:1, :PROMPT]
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "use_cache": True}
    options |= {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    calls: dict[str, Callable[[], object]] = {}
    for form, one in built.items():
        if one.timed and one.model is not None:
            generate: Any = one.model.generate
            calls[form] = functools.partial(generate, prompt, **options)
    times = interleaved_times(calls, seconds=0.0, minimum=3)
    return {form: new_tokens / statistics.median(taken) for form, taken in times.items()}


def _evaluate(
    built: Mapping[str, Built], evaluate: Callable[[nn.Module], Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """What ``evaluate`` returns, once for each module: a file that changes no weight has the dense model's."""
    found: dict[int, dict[str, float]] = {}
    quality = {}
    for form, one in built.items():
        if one.model is not None:
            if id(one.model) not in found:
                found[id(one.model)] = dict(evaluate(one.model))
            quality[form] = found[id(one.model)]
    return quality


def _largest_difference(outputs: list[Tensor], dense: list[Tensor]) -> float | None:
    pairs = [(a, b) for a, b in zip(outputs, dense, strict=False) if a.shape == b.shape and a.numel()]
    return max((float((a.float().cpu() - b.float().cpu()).abs().max()) for a, b in pairs), default=None)


def _ratio(value: float | None, dense: float | None) -> float | None:
    return None if value is None or not dense else value / dense
