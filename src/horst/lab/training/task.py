"""What is trained on what: the unit that the loop works on, for language and vision alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["BatchSource", "Task"]


class BatchSource(Protocol):
    """Endless training batches that a step number alone restores."""

    def batches(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's part of batch ``start``, ``start + 1``, ...: inputs and targets, rows in dimension 0.

        Batch k depends on nothing but k, the source's seed, the rank and the number of ranks.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its loss, its data and how it is judged.

    Args:
        model: Model on its device and, where wanted, sharded (:func:`horst.lab.training.distributed.parallelize`).
        loss: Function ``loss(model, inputs, targets)``: the mean over the rows given.
        train: Training batches.
        evaluate: Function ``evaluate(model)``: named numbers, the same on every rank, as those of
            :mod:`horst.lab.training.evaluate`. Called in evaluation mode, with the plain model (not compiled, not
            wrapped by DDP).
        unit: Unit of the throughput, ``"tokens"`` or ``"images"``.
        units_per_row: Units per row of a batch: the context length of a language model.
        identity: Further settings that make the run the same, as JSON: data, seed, recipe. A checkpoint with another
            identity is refused.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    train: BatchSource
    evaluate: Callable[[nn.Module], Mapping[str, float]]
    unit: str = "images"
    units_per_row: int = 1
    identity: Mapping[str, Any] = field(default_factory=dict)
