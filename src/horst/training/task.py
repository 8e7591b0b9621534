"""What is trained on what, for language and vision alike; and its loss as one function of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from horst.training.config import LoopConfig
from horst.training.distributed import is_sharded, world_size
from horst.training.evaluate import IGNORED, Precision, autocast


class BatchSource(Protocol):
    """Endless training batches that a step number alone restores."""

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of batch ``start``, ``start + 1``, ...: inputs and targets, rows in dimension 0.

        Batch k depends on nothing but k, the source's seed, the rank and the number of ranks.
        """
        ...


def count_targets(inputs: Tensor, targets: Tensor) -> Tensor:
    """The number of targets, of classes and tokens those that are not -100.

    Example:
        >>> count_targets(torch.zeros(2), torch.tensor([[1, 2], [3, -100]]))
        tensor(3)
    """
    if targets.is_floating_point():
        return torch.full((), targets.numel(), device=targets.device)
    return (targets != IGNORED).sum()


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss, its data and how it is judged.

    Args:
        model: Model on its device and, where wanted, sharded (:func:`horst.training.distributed.parallelize`).
        loss: Function ``loss(model, inputs, targets)``: a mean over the rows given, or over their targets;
            or a vector of such means, to be added up.
        train: Training batches.
        evaluate: Function ``evaluate(model)``: named numbers, the same on every rank, as those of
            :mod:`horst.training.evaluate`. Called in evaluation mode, with the plain model (not compiled, not
            wrapped by DDP).
        count: Function ``count(inputs, targets)``: how many terms ``loss`` is the mean of, as a tensor; for a vector of
            means, as many numbers. By it the parts of a batch are weighted, on all ranks. By default targets of
            -100 do not count.
        unit: Unit of the throughput, ``"tokens"`` or ``"images"``.
        units_per_row: Units per row of a batch: the context length of a language model.
        identity: Further settings that make the run the same, as JSON: data, seed, recipe. A checkpoint with another
            identity is refused.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    train: BatchSource
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    count: Callable[[Tensor, Tensor], Tensor] = count_targets
    unit: str = "images"
    units_per_row: int = 1
    identity: Mapping[str, Any] = field(default_factory=dict)


AUTOTUNE = "max-autotune-no-cudagraphs"  # torch.compile's mode for compile="max-autotune"


class _Loss(nn.Module):
    """The task's loss as a module, which DDP and the compiler take as a whole."""

    def __init__(self, task: Task, device: torch.device, precision: Precision) -> None:
        super().__init__()
        self.model, self.task_loss, self.device, self.precision = task.model, task.loss, device, precision

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.device, self.precision):
            return self.task_loss(self.model, inputs, targets)


class Objective:
    """``objective(inputs, targets)``: the task's loss, ready for ``backward``.

    With several ranks and a model that is not sharded, DDP averages the gradients.
    """

    def __init__(self, task: Task, config: LoopConfig, device: torch.device) -> None:
        module: nn.Module = _Loss(task, device, config.precision)
        self._reducer = task.model
        if world_size() > 1 and not is_sharded(task.model):
            devices = [device.index] if device.type == "cuda" else None
            self._reducer = module = nn.parallel.DistributedDataParallel(module, devices, broadcast_buffers=False)
        self._compute: Callable[[Tensor, Tensor], Tensor] = module
        if config.compile != "off" and (config.compile != "auto" or device.type == "cuda"):
            torch.compiler.reset()  # else the ninth run of a process meets the compiler's limit and stays uncompiled
            mode = AUTOTUNE if config.compile == "max-autotune" else None
            self._compute = torch.compile(module, dynamic=False, mode=mode)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over the rows given."""
        return self._compute(inputs, targets)

    @contextlib.contextmanager
    def gradients_reduced(self, reduced: bool) -> Iterator[None]:
        """Around forward and backward pass: whether the ranks' gradients are averaged, or only added up here."""
        with contextlib.ExitStack() as stack:
            if is_sharded(self._reducer):
                self._reducer.set_requires_gradient_sync(reduced)
            elif isinstance(self._reducer, nn.parallel.DistributedDataParallel) and not reduced:
                stack.enter_context(self._reducer.no_sync())
            yield
