"""What a pruning method is: what it must know of a layer's inputs, and what it then does to the layer's matrix."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from horst.sparsity.masks import NM, Block

# What a method keeps of one layer's inputs, by name. Plain tensors, so that it can wait on the host.
Prepared = dict[str, Tensor]


class Statistic(abc.ABC):
    """Something summed up over the inputs of one layer, batch after batch.

    Args:
        inputs: Number of columns, the layer's inputs.
        device: Device of the sums.
    """

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        self.inputs, self.device = inputs, torch.device(device)
        self.rows = 0

    def add(self, X: Tensor) -> None:
        """Count in the rows of ``X`` (rows x inputs)."""
        if len(X):
            self._add(X.to(torch.float32), len(X) / (self.rows + len(X)))
            self.rows += len(X)

    @abc.abstractmethod
    def _add(self, X: Tensor, share: float) -> None:
        """Count in ``X``, which makes up ``share`` of all rows so far."""

    @abc.abstractmethod
    def norms(self) -> Tensor:
        """Root mean square of each column."""

    def check(self, name: str) -> None:
        """Refuse inputs of the layer ``name`` that were not finite."""
        if not bool(self.norms().isfinite().all()):
            raise ValueError(
                f"the calibration inputs of {name} hold NaN or infinity. Look at the data, and whether the model "
                "overflows in its dtype."
            )


class Method(abc.ABC):
    """A way to prune one matrix ``W`` (out x in), given what was seen of its inputs.

    The two halves are apart so that many levels of sparsity share the first: ``prepare`` once, ``prune`` for each.
    """

    name: ClassVar[str]
    #: What to sum up over a layer's inputs; None for a method that looks at the weights alone.
    statistic: ClassVar[type[Statistic] | None] = None
    #: Whether it can remove blocks of several weights.
    removes_blocks: ClassVar[bool] = True

    @abc.abstractmethod
    def prepare(self, W: Tensor, statistic: Statistic | None, name: str) -> Prepared:
        """What ``prune`` needs, at any sparsity; ``name`` is the layer's, for messages."""

    @abc.abstractmethod
    def prune(self, W: Tensor, prepared: Prepared, pattern: Block | NM, count: int) -> float | None:
        """Prune ``W`` in place.

        Args:
            W: The weights, out x in, in any dtype and with any strides.
            prepared: Result of ``prepare``, on the device of ``W``.
            pattern: Pattern of the mask: unstructured, blocks or N:M.
            count: Number of units of the pattern to remove. N:M fixes it and does not read it.

        Returns:
            The share of the output's energy that is lost, where the method knows it.
        """
