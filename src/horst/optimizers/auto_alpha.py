"""``alpha="auto"``: the strength of the mirror step from the learning rate, the second beta and the weights themselves.

``alpha * lr`` is the learning rate of the logarithms of the weights, and what matters is that product: the rule makes
it a rate that does not depend on the learning rate, at the one the optimizer is built with, which is the peak of
the usual schedules. A schedule then scales both steps alike. The rate is the least of

- ``MAX_RATE``;
- ``1 / sqrt(width)``: steps that agree over a row of a matrix add up, and wide models break down at rates that narrow
  ones stand;
- ``WANDER * sqrt(1 - beta2)``. Adam divides by a mean of squared gradients over the last ``1 / (1 - beta2)`` steps, in
  which noise alone moves a logarithm by the rate times the root of that number; the weights must still be those whose
  gradients were averaged. That is the idea; what was seen is that DeiT-small failed at 0.05 with 0.999. So 0.1 takes a
  ``beta2`` of 0.96 or less, and AdamW's default of 0.999 gets 0.016.

Where Adam's own step is large beside the weights, more than ``LARGE_STEP`` times their root mean square, the rate falls
in proportion: such a step moves the logarithms enough.

A rate this large makes a few weights grow exponentially in the paper's geometry; so the metric ``|theta|`` is bounded
(:mod:`horst.kernels.bounded_mirror`) at ``SPREAD`` times the root mean square of the weights, or times ``1 / alpha`` if
that is more: at that size the two halves of a step are equal, and with a large learning rate weights soon outgrow what
they started with.
Adam's step is about ``lr``, but up to seven times that for weights whose gradients were zero for long, such as those
that sparse training brings back; so the exponent is clamped at the rate. Together: whatever the learning rate and the
gradients, the mirror step scales no weight by more than ``exp(rate)``, and moves none by more than the rate times that
bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Alpha = float | Literal["auto"]
AUTO = "auto"
MAX_RATE = 0.1
WANDER = 0.5
SPREAD = 16.0
LARGE_STEP = 0.25


def resolve_auto(
    groups: Sequence[dict[str, Any]],
    everything: Iterable[Tensor],
    *,
    prefix: str = "",
) -> None:
    """Replace ``alpha="auto"`` in groups by the rule's number, and bounds that are None by the rule's.

    Args:
        groups: Of an optimizer.
        everything: The tensors whose size and width count; those of two or more dimensions, if there are any.
        prefix: Of the names ``alpha``, ``max_exponent`` and ``max_scale`` in the groups.
    """
    alpha, max_exponent, max_scale = (prefix + name for name in ("alpha", "max_exponent", "max_scale"))
    waiting = [group for group in groups if group[alpha] == AUTO]
    for group in waiting:
        lr = float(group["lr"])
        if not lr > 0:
            raise ValueError(
                f"alpha='auto' is a rate over the learning rate, and lr is {lr:g}. Build the optimizer with the peak "
                "of the schedule as lr, or give alpha as a number."
            )
    if not waiting:
        return
    everything = list(everything)
    size, width = root_mean_square(everything), typical_width(everything)
    for group in waiting:
        lr = float(group["lr"])
        _, beta2 = group.get("betas", (0.0, 0.0))  # an optimizer without them divides by no mean
        rate = min(MAX_RATE, 1 / math.sqrt(width), WANDER * math.sqrt(1 - float(beta2)))
        group[alpha] = rate / lr * min(1.0, LARGE_STEP * size / lr)
        if group[max_exponent] is None:
            group[max_exponent] = rate
        if group[max_scale] is None:
            group[max_scale] = SPREAD * max(size, 1 / group[alpha])


def typical_width(tensors: Iterable[Tensor]) -> float:
    """The shorter side of the matrices, as a mean over their entries; a convolution counts as a matrix of its filters.

    Without matrices, the root of the largest tensor's entries: some ways to shard a model leave only flat pieces.

    Example:
        >>> typical_width([torch.zeros(12, 4), torch.zeros(4, 16), torch.zeros(100)])
        4.0
    """
    tensors = [t for t in tensors if t.numel()]
    sides = [(t.numel(), min(len(t), t.numel() // len(t))) for t in tensors if t.dim() >= 2]
    if sides:
        return sum(count * side for count, side in sides) / sum(count for count, _ in sides)
    return math.sqrt(max((t.numel() for t in tensors), default=1))


@torch.no_grad()
def root_mean_square(tensors: Iterable[Tensor]) -> float:
    """Over all entries of the tensors of two or more dimensions, or of all tensors if there are none.

    Example:
        >>> root_mean_square([torch.full((2, 2), 3.0), torch.ones(100)])
        3.0
    """
    tensors = [t for t in tensors if t.numel()]
    chosen = [t for t in tensors if t.dim() >= 2] or tensors
    if any(t.is_meta for t in chosen):
        raise ValueError(
            "alpha='auto' looks at the size of the weights, and some are on the meta device. Give them values before "
            "the optimizer is built, or give alpha and max_scale as numbers."
        )
    total, count = 0.0, 0
    for t in chosen:
        square = t.detach().to(torch.promote_types(t.dtype, torch.float32)).square().sum()
        total += float(square.full_tensor() if hasattr(square, "full_tensor") else square)  # a DTensor: over all ranks
        count += t.numel()
    size = math.sqrt(total / count) if count else 0.0
    if not 0 < size < math.inf:
        raise ValueError(
            f"alpha='auto' looks at the size of the weights, whose root mean square is {size}. Give them their "
            "starting values before the optimizer is built, or give alpha and max_scale as numbers."
        )
    return size
