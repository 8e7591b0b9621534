"""Evaluation: token-weighted perplexity, top-1 and top-5 accuracy. Exact sums, over all ranks.

Batches are this rank's part of the data, ``(inputs, targets)`` and anything after them. A model sharded by FSDP2 needs
as many batches on every rank. Nothing waits for the device before the last batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horst.parameters.modes import evaluating
from horst.parameters.sharding import sum_over_ranks

Precision = Literal["bf16", "float32"]
IGNORED = -100  # a target that is not scored, as everywhere in torch


def check_precision(precision: str) -> None:
    """Refuse a name that is no :data:`Precision`: it would be taken for ``"float32"``."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision must be one of {', '.join(map(repr, get_args(Precision)))}, got {precision!r}.")


def usual_precision(device: torch.device) -> Precision:
    """The precision to train in where none was chosen: bf16 on a GPU, float32 on a CPU."""
    return "float32" if device.type == "cpu" else "bf16"


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """``torch.autocast`` to bfloat16, or not at all."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def perplexity(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    *,
    precision: Precision = "float32",
    progress: Callable[[int], None] | None = None,
) -> dict[str, float]:
    r"""``loss``, ``perplexity`` and ``tokens`` of a language model over a whole split.

    .. math:: \mathrm{ppl} = \exp\Bigl(\tfrac1N \sum_{i=1}^{N} -\log p(t_i \mid \text{context})\Bigr)

    over the :math:`N` targets that are not -100, whatever the batch size. Windows and stride are the batches':
    :func:`horst.lab.data.token_batches.evaluation_batches` scores every token of a file once.

    Args:
        model: Model with a method ``loss(tokens, targets)``, the mean over scored targets (our GPT-2: no logits in
            memory); or a model that gives logits, or an output with ``.logits`` (Hugging Face).
        batches: Tokens and the targets, those that follow each token; see the module.
        precision: ``"bf16"`` runs the model under autocast. Losses and sums are not rounded.
        progress: Function that is called with the number of batches done.

    Example:
        >>> class Uniform(nn.Module):
        ...     def forward(self, tokens):
        ...         return torch.zeros(*tokens.shape, 7)
        >>> targets = torch.tensor([[1, 2, -100]])
        >>> result = perplexity(Uniform(), [(torch.tensor([[0, 1, 2]]), targets)])
        >>> round(result["perplexity"], 4), result["tokens"]
        (7.0, 2.0)
    """
    own_loss = loss_method(model)

    def measure(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        count = (targets != IGNORED).sum()
        if own_loss is not None:
            # A mean over no targets may be NaN, which 0 times would keep.
            return [torch.where(count > 0, own_loss(inputs, targets).float() * count, 0.0), count]
        logits = _logits(model(inputs)).flatten(0, -2).float()
        return [F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum"), count]

    total, count = _sums(model, batches, measure, precision, progress)
    if count == 0:
        raise ValueError("the batches hold no target to score: all are -100, or there are no batches.")
    loss = total / count
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}


def accuracy(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    *,
    precision: Precision = "float32",
) -> dict[str, float]:
    """``top1`` and ``top5`` as shares, the mean ``loss``, and the number of ``images``.

    ``top5`` counts a class among the five largest logits, ties in favour of the lower class, as a stable sort has it;
    with fewer than five classes it is 1.

    Args:
        model: Model that gives logits, ``(batch, classes)``, or an output with ``.logits``.
        batches: Images and the numbers of their classes; see the module.
        precision: ``"bf16"`` runs the model under autocast.

    Example:
        >>> batch = (torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        >>> result = accuracy(nn.Identity(), [batch])
        >>> result["top1"], result["top5"], result["images"]
        (0.5, 1.0, 2.0)
    """

    def measure(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        logits = _logits(model(inputs)).float()
        mine = logits.gather(1, targets[:, None])
        lower = torch.arange(logits.shape[1], device=logits.device) < targets[:, None]
        # NaN compares false with everything: a broken model would rank its own class first.
        rank = ((logits > mine) | ((logits == mine) & lower)).sum(1).masked_fill(logits.isnan().any(1), 5)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return [(rank < 1).sum(), (rank < 5).sum(), loss, (rank >= 0).sum()]

    top1, top5, loss, images = _sums(model, batches, measure, precision)
    if images == 0:
        raise ValueError("there are no images to evaluate on: the batches are empty.")
    return {"top1": top1 / images, "top5": top5 / images, "loss": loss / images, "images": images}


def _sums(
    model: nn.Module,
    batches: Iterable[Sequence[Tensor]],
    measure: Callable[[Tensor, Tensor], list[Tensor]],
    precision: Precision,
    progress: Callable[[int], None] | None = None,
) -> list[float]:
    """What ``measure`` gives, summed over the batches of all ranks."""
    check_precision(precision)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wide = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums: Tensor | None = None
    with evaluating(model), torch.no_grad(), autocast(device, precision):
        for done, (inputs, targets, *_) in enumerate(batches, 1):
            parts = measure(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
            part = torch.stack([number.to(wide) for number in parts])
            sums = part if sums is None else sums + part
            if progress is not None:
                progress(done)
    if sums is None:
        raise ValueError("there are no batches to evaluate on. An iterator is used up after one pass: make it anew.")
    result: list[float] = sum_over_ranks(sums).tolist()
    return result


def loss_method(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The model's method ``loss(tokens, targets)``; None where it has none, or a criterion is kept under that name."""
    found: Any = getattr(model, "loss", None)
    return found if callable(found) and not isinstance(found, nn.Module) else None


def _logits(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(logits := getattr(output, "logits", None), Tensor):
        return logits
    raise TypeError(f"the model must give logits, or an output with .logits, got {type(output).__name__}.")
