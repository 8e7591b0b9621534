"""What ``horst sparsify`` trains and judges on: text or images for a model, and a part of them held out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horst.cli.models import LoadedModel
from horst.cli.texts import (
    ModelTokenizer,
    TokenizerName,
    check_reads_text_alone,
    check_text,
    choose_context,
    source,
    token_file,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

HELD_OUT = 0.02  # of the rows, where no other data is given to judge on
MOST_HELD_OUT = 256  # rows: enough for a perplexity, and evaluated after every stage
_BATCH = 16  # rows at a time when judging


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RecoveryData:
    """Data of a run.

    Args:
        train: What :func:`horst.sparsify` takes.
        evaluate: Function from a model to named numbers.
        metric: The number that says how good the model is.
        higher_is_better: Whether more of it is better.
        about: What it is, in words.
        steps_per_epoch: Function from a batch size to the steps of one pass over the data.
        tokens_per_row: Tokens of a row of text.
        train_rows: Rows of text to train on; None for images.
        judged_on: Tokens that a perplexity is measured on; None for another metric.
    """

    train: Any
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    metric: str
    higher_is_better: bool
    about: str
    steps_per_epoch: Callable[[int], int]
    tokens_per_row: int = 1
    train_rows: int | None = None
    judged_on: int | None = None

    def passes(self, steps: int, batch_size: int) -> float:
        """How often so many steps read the training text; 0 for images, where many passes are usual."""
        return 0.0 if self.train_rows is None else steps * batch_size / self.train_rows


def read_data(
    data: str,
    eval_data: str | None,
    loaded: LoadedModel,
    *,
    context: int | None,
    tokenizer: TokenizerName,
    batch_size: int,
    device: torch.device,
    precision: Any,
) -> RecoveryData:
    """Data for the kind of the model: windows of text, sentences for an encoder, images."""
    if loaded.reads == "images":
        return _images(data, eval_data, loaded, batch_size, device, precision)
    check_reads_text_alone(loaded)
    if predicts_next_token(loaded):
        return _windows(data, eval_data, loaded, context, tokenizer, device, precision)
    return _sentences(data, eval_data, loaded, context, device)


def predicts_next_token(loaded: LoadedModel) -> bool:
    """Whether it is a causal language model."""
    return not loaded.is_transformers or type(loaded.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _split(rows: Tensor, data: str) -> tuple[Tensor, Tensor]:
    held = min(max(1, round(HELD_OUT * len(rows))), MOST_HELD_OUT)
    if len(rows) < 2:
        raise ValueError(
            f"{data} is {len(rows)} row of this model's context: too little to train on and to judge by. Give more "
            "text, a smaller --context, or --eval-data."
        )
    return rows[:-held], rows[-held:]


def _windows(
    data: str,
    eval_data: str | None,
    loaded: LoadedModel,
    context: int | None,
    tokenizer: TokenizerName,
    device: torch.device,
    precision: Any,
) -> RecoveryData:
    import torch

    from horst.lab.data.token_files import open_tokens
    from horst.training import perplexity
    from horst.training.evaluate import IGNORED

    length = choose_context(loaded, context)

    def cut(name: str, split: str) -> Tensor:
        with token_file(name, loaded, tokenizer, split) as path:
            tokens = open_tokens(path, vocabulary=loaded.vocabulary).tokens
            if len(tokens) < length:
                most = len(tokens) // (2 if eval_data is None else 1)  # one window to train on, one to judge by
                shorter = f", or --context {most} or less" if most > 1 else ""
                raise ValueError(
                    f"{name} has {len(tokens)} tokens, less than one window of {length}. Give more text{shorter}."
                )
            whole = len(tokens) // length * length
            return torch.from_numpy(tokens[:whole].astype("int32")).view(-1, length)

    rows = cut(data, "train")
    train, held_out = _split(rows, data) if eval_data is None else (rows, cut(eval_data, "val"))

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            for part in held_out.long().split(_BATCH):
                targets = torch.cat([part[:, 1:], torch.full_like(part[:, :1], IGNORED)], 1)
                yield part.to(device), targets.to(device)

        found = perplexity(model, batches(), precision=precision)
        return {"perplexity": found["perplexity"]}

    about = f"{train.numel():,} tokens of {Path(data).name} in windows of {length}, judged on {held_out.numel():,}"
    return RecoveryData(
        train=train,
        evaluate=evaluate,
        metric="perplexity",
        higher_is_better=False,
        about=about,
        steps_per_epoch=lambda size: -(-len(train) // size),
        tokens_per_row=length,
        train_rows=len(train),
        judged_on=held_out.numel(),
    )


def _sentences(
    data: str, eval_data: str | None, loaded: LoadedModel, context: int | None, device: torch.device
) -> RecoveryData:
    """Rows for an encoder, padded; how near its hidden states are to the dense model's, as one cosine for each text."""
    import torch
    import torch.nn.functional as F

    if not loaded.has_tokenizer:
        raise ValueError(
            f"{loaded.path} has no tokenizer files, and an encoder needs its own. Save it beside the model."
        )
    tokenizer = ModelTokenizer(loaded.path).transformers
    length = min(choose_context(loaded, context), 128 if context is None else context)

    def read(name: str) -> dict[str, Tensor]:
        texts = [text for text in _texts(name) if text.strip()]
        if not texts:
            raise ValueError(f"{name} has no text.")
        rows = tokenizer(texts, truncation=True, max_length=length, padding="max_length", return_tensors="pt")
        return {key: rows[key] for key in ("input_ids", "attention_mask")}

    rows = read(data)
    if eval_data is None:
        _, held = _split(rows["input_ids"], data)
        train = {key: value[: -len(held)] for key, value in rows.items()}
        held_out = {key: value[-len(held) :] for key, value in rows.items()}
    else:
        train, held_out = rows, read(eval_data)

    @torch.no_grad()
    def embed(model: nn.Module) -> Tensor:
        found = []
        for i in range(0, len(held_out["input_ids"]), _BATCH):
            part = {key: value[i : i + _BATCH].to(device) for key, value in held_out.items()}
            hidden = model(**part, output_hidden_states=True).hidden_states[-1].float()
            mask = part["attention_mask"][..., None]
            found.append((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        return F.normalize(torch.cat(found), dim=1)

    dense = embed(loaded.model.to(device))

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        return {"cosine": float((embed(model) * dense).sum(1).mean())}

    count, judged = len(train["input_ids"]), len(held_out["input_ids"])
    about = f"{count:,} texts of {Path(data).name}, at most {length} tokens each, judged on {judged:,}"
    return RecoveryData(
        train=train,
        evaluate=evaluate,
        metric="cosine",
        higher_is_better=True,
        about=about,
        steps_per_epoch=lambda size: -(-count // size),
        tokens_per_row=length,
        train_rows=count,
    )


def _texts(name: str) -> Iterator[str]:
    """The documents of a source; of a text file, its lines."""
    from horst.lab.data.documents import Fields, Source

    check_text(name)
    separator = Fields(separator="\n") if str(name).split(".")[-1] == "txt" or ".txt." in str(name) else None
    return (document.text for document in Source(source(name)).documents(separator))


class _Scaled:
    """Training images as the model wants them, with their classes."""

    def __init__(self, images: Any, loaded: LoadedModel) -> None:
        self.images, self.loaded = images, loaded

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        from horst.cli.images import rescaled

        return ((rescaled(pixels, self.images, self.loaded), labels) for pixels, labels in self.images.batches(start))


def _images(
    data: str, eval_data: str | None, loaded: LoadedModel, batch_size: int, device: torch.device, precision: Any
) -> RecoveryData:
    from horst.cli.images import evaluation_images, open_images
    from horst.training import accuracy
    from horst.training.distributed import rank, world_size

    shares = {"rank": rank(), "world_size": world_size()}
    images = open_images(data, loaded, batch_size=256, train_batch_size=batch_size, device=device, **shares)
    judged = images if eval_data is None else open_images(eval_data, loaded, batch_size=256, device=device, **shares)

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        found = accuracy(model, evaluation_images(judged, loaded), precision=precision)
        return {key: value for key, value in found.items() if key != "images"}

    next(itertools.islice(_Scaled(images, loaded).batches(0), 1), None)  # what cannot be read is refused now
    return RecoveryData(
        train=_Scaled(images, loaded),
        evaluate=evaluate,
        metric="top1",
        higher_is_better=True,
        about=f"the training images of {Path(data).name}, judged on its test images",
        steps_per_epoch=lambda size: images.steps_per_epoch,
    )
