"""The dense teacher, and the loss that compares a model with it; for models of any library.

Hugging Face's models return objects with ``.logits``, plain modules a tensor of logits. The hidden states are what the
outermost repeated blocks return, in every model: transformers' own ``output_hidden_states`` goes by the names of
classes, which FSDP2 changes, and then gives none.
"""

from __future__ import annotations

import contextlib
import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from horst.parameters.modes import Batch, as_call, evaluating
from horst.pruning.chains import block_sequences, move
from horst.recovery.config import Distillation, SparsifyConfig
from horst.recovery.data import Examples, RowBatches
from horst.recovery.distillation import cross_entropy, mixed_loss, squarehead
from horst.training.evaluate import IGNORED
from horst.training.task import count_targets

__all__ = ["RecoveryLoss", "copy_as_teacher", "narrow_autocast", "prepare_teacher"]


def copy_as_teacher(model: nn.Module) -> nn.Module:
    """A frozen copy of the model as it is now: its weights in bfloat16 on a GPU, in their own dtype on a CPU."""
    teacher = copy.deepcopy(model)
    if next(teacher.parameters()).is_cuda:
        for p in teacher.parameters():  # buffers stay: rotary frequencies need their precision
            if p.is_floating_point():
                p.data = p.data.to(torch.bfloat16)
    return prepare_teacher(teacher, model)


def prepare_teacher(teacher: nn.Module, student: nn.Module) -> nn.Module:
    """The teacher in evaluation mode and without gradients, in place."""
    if not {id(p) for p in teacher.parameters()}.isdisjoint(map(id, student.parameters())):
        raise ValueError(
            "the teacher shares weights with the model, which change while it learns. Leave teacher out: a copy of the "
            "dense model is made. Or give copy.deepcopy(...) of it."
        )
    return teacher.eval().requires_grad_(False)


def narrow_autocast(teacher: nn.Module) -> AbstractContextManager[Any]:
    """Autocast for a teacher in bfloat16 or float16, which may meet float32 images; for others nothing changes."""
    weight = next(teacher.parameters())
    is_narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(weight.device.type, weight.dtype) if is_narrow else contextlib.nullcontext()


class RecoveryLoss:
    """The loss of the training loop, ``loss(model, inputs, targets)``: cross-entropy and what the teacher says.

    Args:
        student: The model to train.
        teacher: The dense one; None for cross-entropy alone.
        examples: The data, which knows how a model takes it.
        config: Weights and temperature.
        distill: Term that compares the two.
    """

    # Not a module: DDP would take the teacher's weights for its own.
    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module | None,
        examples: Examples,
        config: SparsifyConfig,
        distill: Distillation,
    ) -> None:
        self.examples, self.distill, self.temperature = examples, distill, config.temperature
        self.compiled = False  # whether predictions are compared by compiled code
        self.label_weight, self.distill_weight = config.weights(distill)
        if not examples.has_labels:
            if distill == "none":
                raise ValueError(
                    "the data has no labels and distill='none' uses no teacher: nothing to learn from. Give labels, "
                    "or distill='squarehead' or 'kl'."
                )
            self.label_weight = 0.0
        self.is_per_row = False  # whether a row has one prediction; known after check
        wants_hidden = distill == "squarehead"
        self.student = _Observed(student, wants_hidden)
        self.teacher = None if teacher is None else _Observed(teacher, wants_hidden)

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch; with ``"squarehead"`` a vector of its terms, each a mean over what it counts."""
        batch = self.examples.arguments(inputs)
        logits, hidden = self.student(model, batch)
        teacher_logits, teacher_hidden = self._ask_teacher(batch)
        counts = self.examples.counts(inputs)
        if self.distill == "squarehead":
            terms = [self.distill_weight * squarehead(hidden, teacher_hidden, counts)]
            if self.label_weight:
                terms.append(self.label_weight * cross_entropy(_need(logits), targets))
            return torch.stack(terms)
        logits = _need(logits)
        if self.distill == "none":
            return mixed_loss(
                logits, targets, None, label_weight=self.label_weight, distill_weight=0.0, compiled=self.compiled
            )
        has_labels = self.examples.has_labels
        return mixed_loss(
            logits, targets if has_labels else None, _need(teacher_logits), label_weight=self.label_weight,
            distill_weight=self.distill_weight, temperature=self.temperature,
            mask=None if has_labels or counts is None or logits.dim() < 3 else counts, compiled=self.compiled,
        )  # fmt: skip

    def count(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """How many predictions of a batch the loss is a mean of; with ``"squarehead"``, how many each term is."""
        counts = self.examples.counts(inputs)
        positions = targets.new_full((), len(inputs)) if counts is None else counts.sum()
        if self.distill == "squarehead":
            return torch.stack([positions, count_targets(inputs, targets)] if self.label_weight else [positions])
        if self.examples.has_labels:
            return count_targets(inputs, targets)
        return targets.new_full((), len(inputs)) if self.is_per_row else positions

    def _ask_teacher(self, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        if self.teacher is None:
            return None, []
        with torch.no_grad(), narrow_autocast(self.teacher.model):
            return self.teacher(self.teacher.model, batch)

    @torch.no_grad()
    def check(self, batch: Batch) -> None:
        """Refuse a teacher whose outputs cannot be compared with the student's; ``batch`` is an example."""
        assert self.student.model is not None
        batch = move(batch, next(self.student.model.parameters()).device)
        with evaluating(self.student.model):
            logits, hidden = self.student(self.student.model, batch)
        self.is_per_row = logits is not None and logits.dim() < 3
        if self.label_weight or self.distill != "squarehead":
            _need(logits)
        self._check_classes(logits)
        if self.teacher is None:
            return
        teacher_logits, teacher_hidden = self._ask_teacher(batch)
        if self.distill == "squarehead":
            squarehead(hidden, teacher_hidden)
        elif _need(teacher_logits).shape[-1] != _need(logits).shape[-1]:
            raise ValueError(
                f"the teacher predicts {_need(teacher_logits).shape[-1]} classes or tokens, the model "
                f"{_need(logits).shape[-1]}: their vocabularies differ. Use a teacher of the same vocabulary, or leave "
                "teacher out to use the dense model itself."
            )

    def _check_classes(self, logits: Tensor | None) -> None:
        """Refuse labels that the model does not predict: on a GPU they would end the process."""
        labels = self.examples.source.targets if isinstance(self.examples.source, RowBatches) else None
        highest = IGNORED if labels is None else int(labels.max())
        if self.label_weight and logits is not None and highest >= (classes := logits.shape[-1]):
            raise ValueError(
                f"the data has labels up to {highest}, the model predicts {classes} classes, from 0 to {classes - 1}. "
                "Give a model with as many classes as the data."
            )

    def close(self) -> None:
        """Remove the hooks from the models."""
        self.student.close()
        if self.teacher is not None:
            self.teacher.close()


class _Observed:
    """A model's logits and, if wanted, the hidden states after each block."""

    def __init__(self, model: nn.Module, wants_hidden: bool) -> None:
        self.model, self.handles = model, list[Any]()
        self.states: list[Tensor] = []
        if wants_hidden:
            blocks = [block for sequence in block_sequences(model).values() for block in sequence.values()]
            if not blocks:
                raise ValueError(
                    f"{type(model).__name__} has no repeated blocks whose hidden states could be compared. Use "
                    "distill='kl'."
                )
            self.handles = [block.register_forward_hook(self._keep) for block in blocks]

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        args, kwargs = as_call(batch)
        self.states.clear()
        output = model(*args, **kwargs)
        states = list(self.states)
        self.states.clear()
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        return logits, states

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.states.append(output if isinstance(output, Tensor) else output[0])

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


def _need(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise TypeError(
            "the model gives no logits, neither as a tensor nor as an output with .logits. Without a head, give data "
            "without labels and distill='squarehead'."
        )
    return logits
