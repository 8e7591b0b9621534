"""The report of ``horst export MODEL --report``: every form of the model measured beside dense, best first."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horst.cli.output import table

if TYPE_CHECKING:
    import torch
    from torch import nn

    from horst.cli.export import Options
    from horst.cli.models import LoadedModel
    from horst.lab.experiments.result import Result

RECORD, PAGE = "report.json", "report.html"
# Forms whose numbers depend on the device; the others are files, or run on a CPU wherever the model is.
_ON_DEVICE = ("dense", "dense-bfloat16", "sparse-linear", "sparse-linear-int8-head", "2:4")

Evaluate = Callable[["nn.Module"], Mapping[str, float]]


def measure(loaded: LoadedModel, options: Options, devices: list[torch.device]) -> Result:
    """Every form on each of the devices; those that cannot be made are named in the notes, with the reason."""
    from horst.cli.export import example_inputs
    from horst.export import compare
    from horst.export.forms import FORMS
    from horst.lab.experiments.result import run_and_record

    if hasattr(
        getattr(loaded.model, "config", None), "use_cache"
    ):  # generation asks for it; elsewhere keys and values are of no use
        loaded.model.config.use_cache = False  # type: ignore[union-attr]
    generates = loaded.is_transformers and loaded.reads == "text" and loaded.model.can_generate()  # type: ignore[operator]
    unit = "tokens" if loaded.reads == "text" else "images"

    def body() -> Any:
        rows: list[dict[str, Any]] = []
        notes: list[str] = []
        for device in devices:
            loaded.model.to(device)
            inputs = example_inputs(loaded, batch_size=options.batch_size, tokens=options.tokens, device=device)
            with evaluation(loaded, options, device) as (evaluate, judged):
                found = compare(
                    loaded.model, inputs, forms=_ON_DEVICE if rows else list(FORMS), seconds=options.seconds,
                    new_tokens=options.new_tokens if generates else 0, evaluate=evaluate,
                )  # fmt: skip
            count = options.batch_size * (_length(inputs) if unit == "tokens" else 1)
            on = f" on {device.type}" if len(devices) > 1 else ""
            for row in found.rows:
                per_s = row["milliseconds"] and 1e3 * count / row["milliseconds"]
                rows.append({**row, "form": row["form"] + on, "title": FORMS[row["form"]].title + on})
                rows[-1]["inputs_per_s"] = per_s
            notes += [note for note in (*judged, *found.notes) if note not in notes]
        metrics = [name for name in ("perplexity", "top1") if name in rows[0]]
        return best_first(rows), {"unit": unit, "metrics": metrics}, notes

    about = f"{type(loaded.model).__name__} from {loaded.path.name}, {loaded.zeros:.1%} of its weights zero"
    return run_and_record("export", options, body, str(devices[0]), setting=about)


def best_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by speed, that of generation where it was measured; a file is as fast as dense, and then size decides.

    Example:
        >>> rows = [{"form": "dense", "inputs_per_s": 5.0, "file_bytes": 9}]
        >>> rows += [{"form": "file", "inputs_per_s": None, "file_bytes": 3}]
        >>> rows += [{"form": "fast", "inputs_per_s": 8.0, "file_bytes": None}]
        >>> [row["form"] for row in best_first(rows)]
        ['fast', 'file', 'dense']
    """
    key = "tokens_per_s" if "tokens_per_s" in rows[0] else "inputs_per_s"

    def order(row: Mapping[str, Any]) -> tuple[float, float]:
        runs_otherwise = row[key] is None and row["inputs_per_s"] is not None  # ONNX, which was not seen to generate
        speed = 0.0 if runs_otherwise else row[key] or rows[0][key]
        return -speed, row["file_bytes"] or rows[0]["file_bytes"]

    return sorted(rows, key=order)


@contextlib.contextmanager
def evaluation(
    loaded: LoadedModel, options: Options, device: torch.device
) -> Iterator[tuple[Evaluate | None, list[str]]]:
    """A function that gives a model's perplexity or accuracy on ``--data``, and on how much; None without data."""
    if not options.data:
        yield None, []
        return
    from horst.training import accuracy, perplexity

    if loaded.reads == "images":
        from horst.cli.images import evaluation_images, open_images

        images = open_images(options.data, loaded, batch_size=64, device=device, workers=0)
        yield lambda model: {"top1": accuracy(model, evaluation_images(images, loaded))["top1"]}, []
        return
    from horst.cli.evaluate import check_has_perplexity
    from horst.cli.texts import choose_context, token_file
    from horst.lab.data.token_batches import evaluation_batches
    from horst.training.evaluate import IGNORED

    check_has_perplexity(loaded)
    context = choose_context(loaded, None)
    with token_file(options.data, loaded, "auto", "val") as path:
        batches = evaluation_batches(path, context=context, batch_size=1, vocabulary=loaded.vocabulary, device=device)
        kept = list(itertools.islice(batches, -(-options.eval_tokens // context)))
    tokens = sum(int((targets != IGNORED).sum()) for _, targets in kept)
    judged = [
        f"Perplexity is that of {tokens:,} tokens of {Path(options.data).name}; --eval-tokens takes more or fewer."
    ]
    yield lambda model: {"perplexity": perplexity(model, kept)["perplexity"]}, judged


def terminal_table(result: Result) -> str:
    """The rows with the numbers that matter most, and the notes."""
    unit = result.curves["unit"]
    records = []
    for row in result.rows:
        record = {"form": row["form"], "file MB": _megabytes(row["file_bytes"])}
        record["memory MB"] = _megabytes(row["memory_bytes"])
        if "tokens_per_s" in row:
            record["new tokens per s"] = _short(row["tokens_per_s"])
            record["times dense"] = _short(row["generation_speedup"])
        name = "prompt tokens per s" if unit == "tokens" else "images per s"
        record |= {name: _short(row["inputs_per_s"]), f"times dense, {name.split()[0]}": _short(row["speedup"])}
        records.append(record | {name: row[name] for name in result.curves["metrics"]})
    return "\n".join([table(records), *(f"- {note}" for note in result.notes)])


def write_page(result: Result, directory: Path) -> None:
    """The record and the page, beside the exported model."""
    from horst.lab.report import html

    html.build([result.save(directory / RECORD)], directory / PAGE)


def _length(inputs: Any) -> int:
    tokens = inputs["input_ids"] if isinstance(inputs, dict) else inputs
    return int(tokens.shape[-1])


def _megabytes(size: int | None) -> float | None:
    return None if size is None else float(f"{size / 1e6:.3g}")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")
