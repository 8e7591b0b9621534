"""``horst eval MODEL --data TEXT``: perplexity of a language model, accuracy of an image model."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.output import ALL_ZEROS, Share, table, write, write_json
from horst.cli.progress import bar, spinner

if TYPE_CHECKING:
    import torch

    from horst.cli.models import LoadedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The model and the data."""

    model: Path
    """The model: a directory of Hugging Face or timm, or of a finished run."""
    data: str = ""
    """Needed. Text: .txt, .jsonl, .parquet, .bin, a folder of horst data (its val.bin), wikitext (the test set of
    WikiText-2), hub:owner/name/config:split. Images: digits, .npz, a folder of CIFAR-10 or with train and val."""
    context: int | None = None
    """Tokens per window; by default the model's, at most 2048."""
    stride: int | None = None
    """Tokens from one window to the next; by default the context. A smaller stride gives each token more context."""
    batch_size: int | None = None
    """Windows (8) or images (256) per batch; the result does not depend on it."""
    tokenizer: Literal["auto", "gpt2", "bytes"] = "auto"
    """For text: auto is the model's own."""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16 computes under autocast."""
    workers: int = 0
    """Processes that decode image files."""
    device: str | None = None
    """Device to compute on; by default the GPU if there is one."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: Options) -> None:
    """Evaluate over all of the data."""
    from horst.cli.models import choose_device, load_model

    if not options.data:
        raise ValueError("give the data to evaluate on: --data text.txt, or --data digits for images.")
    if options.batch_size is not None and options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}.")
    device = choose_device(options.device)
    loaded = load_model(options.model)
    measure = _perplexity if loaded.reads == "text" else _accuracy
    row = {"model": str(options.model), "zeros": loaded.zeros, **measure(loaded, options, device)}
    if options.json:
        write_json(row)
    else:
        write(table([{"model": row.pop("model"), ALL_ZEROS: Share(row.pop("zeros")), **row}]))


def _perplexity(loaded: LoadedModel, options: Options, device: torch.device) -> dict[str, Any]:
    from horst.cli.texts import choose_context, token_file
    from horst.lab.data.token_batches import evaluation_batches
    from horst.lab.data.token_files import open_tokens
    from horst.training import perplexity

    check_has_perplexity(loaded)
    context = choose_context(loaded, options.context)
    batch_size = options.batch_size or 8
    if hasattr(loaded.model.config, "use_cache"):  # keys and values of a window are of no use to the next
        loaded.model.config.use_cache = False  # type: ignore[union-attr]
    with contextlib.ExitStack() as stack:
        with spinner("tokenizing"):
            path = stack.enter_context(token_file(options.data, loaded, options.tokenizer, "val"))
        batches = evaluation_batches(
            path, context=context, stride=options.stride, batch_size=batch_size, vocabulary=loaded.vocabulary
        )
        stride = options.stride or context
        targets = len(open_tokens(path).tokens) - 1
        windows = 1 + max(0, -(-(targets - context) // stride))
        loaded.model.to(device)
        progress = stack.enter_context(bar("perplexity", -(-windows // batch_size)))
        found = perplexity(loaded.model, batches, precision=options.precision, progress=progress)
    return {**found, "tokens": int(found["tokens"]), "context": context, "stride": stride}


def check_has_perplexity(loaded: LoadedModel) -> None:
    """Refuse a model of text that predicts no next token."""
    name = type(loaded.model).__name__
    if loaded.is_transformers and not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"{loaded.path} holds a {name}, which predicts no next token: it has no perplexity.")


def _accuracy(loaded: LoadedModel, options: Options, device: torch.device) -> dict[str, Any]:
    from horst.cli.images import evaluation_images, open_images
    from horst.training import accuracy

    images = open_images(
        options.data, loaded, batch_size=options.batch_size or 256, device=device, workers=options.workers
    )
    loaded.model.to(device)
    with spinner("accuracy", line=True):
        found = accuracy(loaded.model, evaluation_images(images, loaded), precision=options.precision)
    return {**found, "images": int(found["images"])}
