"""A number that grows while training: the penalty of ADMM, the decay of AST."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Ramp:
    """A value that rises from 0 to ``to`` over the first ``steps`` optimizer steps, and stays there.

    Args:
        to: The value at the end, at least 0.
        steps: Length of the rise; 0 has the full value from the start.
        shape: Form of the rise: ``"linear"``, or ``"cosine"``, which begins and ends flat.

    Example:
        >>> ramp = Ramp(1e-4, steps=10)
        >>> ramp.at(0), ramp.at(5), ramp.at(10), ramp.at(99)
        (0.0, 5e-05, 0.0001, 0.0001)
    """

    to: float
    steps: int
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if not 0.0 <= self.to < math.inf:  # this form refuses NaN too
            raise ValueError(f"the value that a ramp rises to must be a number of at least 0, got {self.to}.")
        if self.steps < 0:
            raise ValueError(f"the steps of a ramp must be at least 0, got {self.steps}. Use 0 for no rise.")
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape must be 'linear' or 'cosine', got {self.shape!r}.")

    def at(self, step: int) -> float:
        """The value in the update that follows ``step`` others."""
        share = min(step / self.steps, 1.0) if self.steps else 1.0
        return self.to * (share if self.shape == "linear" else (1.0 - math.cos(math.pi * share)) / 2)
