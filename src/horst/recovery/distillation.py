r"""The losses that win back what pruning lost: cross-entropy, divergence from a dense teacher, its hidden states.

References: Hinton et al., *Distilling the Knowledge in a Neural Network* (2015). SquareHead: Kurtic et al., *Sparse
Fine-tuning for Inference Acceleration of Large Language Models* (2023).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from horst.training.evaluate import IGNORED

__all__ = ["cross_entropy", "kl_divergence", "mixed_loss", "squarehead"]

_CHUNK = 1 << 24  # logits that are in float32 at once, of each model


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    r"""The divergence of the student's predictions from the teacher's, times the temperature squared.

    .. math:: \frac{T^2}{N} \sum_{i=1}^N \sum_c p_{ic} \log \frac{p_{ic}}{q_{ic}}, \quad
        p_i = \mathrm{softmax}(t_i / T),\; q_i = \mathrm{softmax}(s_i / T)

    where :math:`s, t, T` are ``student``, ``teacher``, ``temperature``. It is computed some rows at a time, in float32
    or better; no copy of all logits in float32 is made. The teacher gets no gradient.

    Args:
        student: Logits, classes in the last dimension.
        teacher: Logits of the same shape.
        temperature: Temperature of both.
        mask: True for the rows that count, shaped as the logits without the last dimension; None counts all.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0]])
        >>> round(kl_divergence(logits, torch.tensor([[100.0, 0.0]])).item(), 4)  # log 2
        0.6931
    """
    targets = None if mask is None else torch.where(mask, 0, IGNORED)
    return mixed_loss(student, targets, teacher, label_weight=0.0, distill_weight=1.0, temperature=temperature)


def cross_entropy(student: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over the targets that are not -100, without a copy of all logits in float32.

    Example:
        >>> round(cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, -100, -100]])).item(), 4)
        1.3863
    """
    return mixed_loss(student, targets, None, label_weight=1.0, distill_weight=0.0)


def mixed_loss(
    student: Tensor,
    targets: Tensor | None,
    teacher: Tensor | None,
    *,
    label_weight: float = 0.33,
    distill_weight: float = 0.67,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    compiled: bool = False,
) -> Tensor:
    """``label_weight`` times :func:`cross_entropy` plus ``distill_weight`` times :func:`kl_divergence`.

    Both in one pass over the logits, with one gradient in the logits' own dtype. Where no row counts, a term is 0.

    Args:
        student: Logits, classes in the last dimension.
        targets: Classes, -100 where there is none; None for no cross-entropy.
        teacher: Logits of the same shape; None for no divergence.
        mask: True for the rows whose divergence counts; None: those with a target, and all without ``targets``.
        compiled: Whether to compile it: on a GPU some rows then take a few kernels instead of twenty.

    Example:
        >>> logits = torch.randn(2, 5)
        >>> mixed_loss(logits, torch.tensor([1, 4]), logits, label_weight=0.0).item()
        0.0
    """
    if teacher is not None and teacher.shape != student.shape:
        raise ValueError(
            f"the teacher's logits have shape {tuple(teacher.shape)}, the student's {tuple(student.shape)}."
        )
    for name, given in (("targets", targets), ("mask", mask)):
        if given is not None and given.shape != student.shape[:-1]:
            raise ValueError(f"{name} must have shape {tuple(student.shape[:-1])}, got {tuple(given.shape)}.")
    rows = student.shape[:-1].numel()
    if targets is None:
        targets = torch.zeros(rows, dtype=torch.int64, device=student.device)
    if mask is None:
        mask = targets != IGNORED
    loss: Tensor = _MixedLoss.apply(
        student.flatten(0, -2) if student.dim() > 2 else student,
        targets.flatten(), mask.flatten(), None if teacher is None else teacher.detach().reshape(rows, -1),
        label_weight, distill_weight if teacher is not None else 0.0, temperature, compiled,
    )  # fmt: skip
    return loss


class _MixedLoss(torch.autograd.Function):
    """The loss and, in the same pass, its gradient: rows x classes, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        targets: Tensor,
        mask: Tensor,
        teacher: Tensor | None,
        label_weight: float,
        distill_weight: float,
        temperature: float,
        compiled: bool,
    ) -> Tensor:
        wide = torch.promote_types(student.dtype, torch.float32)
        has_target = targets != IGNORED
        classes = targets.masked_fill(~has_target, 0)
        # A mean over no rows is 0, not NaN: the sum is 0 then.
        labels = (label_weight / has_target.sum().clamp(min=1)).to(wide) * has_target if label_weight else None
        distill = (distill_weight / mask.sum().clamp(min=1)).to(wide) * mask if distill_weight else None
        gradient = torch.empty_like(student)
        # Never changed in place: compiled by torch 2.11, what is returned would get no gradient then (pytorch#180642).
        loss = torch.zeros((), dtype=wide, device=student.device)
        count = max(1, _CHUNK // max(student.shape[-1], 1))
        compute = _compiled() if compiled else _some_rows
        for start in range(0, len(student), count):
            rows = slice(start, start + count)
            part, gradient[rows] = compute(
                student[rows], classes[rows], None if teacher is None else teacher[rows],
                None if labels is None else labels[rows], None if distill is None else distill[rows], temperature,
            )  # fmt: skip
            loss = loss + part
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), *[None] * 7


def _some_rows(
    student: Tensor,
    classes: Tensor,
    teacher: Tensor | None,
    labels: Tensor | None,
    distill: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The loss of some rows, each with its weights, and its gradient."""
    wide = torch.promote_types(student.dtype, torch.float32)
    s = student.to(wide)
    loss, gradient = torch.zeros((), dtype=wide, device=s.device), torch.zeros_like(s)
    if labels is not None:
        log_q, weight = s.log_softmax(-1), labels[:, None]
        is_class = torch.arange(s.shape[-1], device=s.device) == classes[:, None]
        loss = loss - (weight * log_q.gather(1, classes[:, None])).sum()
        gradient = gradient + weight * (log_q.exp() - is_class.to(wide))
    if distill is not None and teacher is not None:
        log_q = (s / temperature).log_softmax(-1)
        log_p = (teacher.to(wide) / temperature).log_softmax(-1)
        weight = distill[:, None]
        # kl_div leaves out classes of probability 0, whose log is minus infinity.
        divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True)
        loss = loss + temperature**2 * (weight * divergence).sum()
        gradient = gradient + temperature * weight * (log_q.exp() - log_p.exp())
    return loss, gradient.to(student.dtype)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_some_rows, dynamic=True)


def squarehead(
    student_hidden: Sequence[Tensor],
    teacher_hidden: Sequence[Tensor],
    mask: Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    r"""SquareHead: the squared distance of the hidden states, relative to the size of the teacher's, layer by layer.

    .. math:: \sum_{l} \frac{\mathrm{mean}\bigl((h^s_l - h^t_l)^2\bigr)}{\mathrm{mean}\bigl((h^t_l)^2\bigr) + \epsilon}

    over the positions that count, where :math:`h^s, h^t, \epsilon` are ``student_hidden``, ``teacher_hidden``, ``eps``.
    The means are over what is given: under accumulation and on several ranks, over each part of a batch by itself.

    Args:
        student_hidden: Output of each block, without the embedding's.
        teacher_hidden: Tensors of the same shapes.
        mask: True (or 1) at the positions that count, (batch, length); None counts all.

    Example:
        >>> h = torch.ones(1, 2, 3)
        >>> round(squarehead([2 * h, h], [h, h]).item(), 4)
        1.0
    """
    shapes = [[tuple(h.shape) for h in hidden] for hidden in (student_hidden, teacher_hidden)]
    if not shapes[0] or shapes[0] != shapes[1]:
        raise ValueError(
            f"SquareHead compares hidden states of equal shapes; the student has {len(shapes[0])} "
            f"({shapes[0][:1]} ...), the teacher {len(shapes[1])} ({shapes[1][:1]} ...). Use distill='kl'."
        )
    total = torch.zeros((), device=student_hidden[0].device)
    for s, t in zip(student_hidden, teacher_hidden, strict=True):
        wide = torch.promote_types(s.dtype, torch.float32)
        s, t = s.to(wide), t.detach().to(wide)
        if mask is None:
            distance, size = (s - t).square().mean(), t.square().mean()
        else:
            counts = mask.bool().view(*mask.shape, *[1] * (s.dim() - mask.dim()))
            # The number of entries is the same in both means, and so is a mean's denominator of 1 for none.
            entries = counts.sum().clamp(min=1) * (s.numel() // mask.numel())
            distance = torch.where(counts, (s - t).square(), 0).sum() / entries
            size = torch.where(counts, t.square(), 0).sum() / entries
        total = total + distance / (size + eps)
    return total
