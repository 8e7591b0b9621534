"""An exponential moving average (EMA) of the weights, evaluated in the model's own place.

The average is kept beside the model and swapped into it for an evaluation: no second model, no second compilation,
and it is sharded as the weights are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from horst.parameters.sharding import local_shard


class ExponentialAverage:
    r"""The average :math:`\bar\theta_{k+1} = \beta\, \bar\theta_k + (1 - \beta)\, \theta_{k+1}`; it begins as a copy.

    Buffers are not averaged: an evaluation sees the model's present ones. Weights that are pruned now have an average
    that fades but is not zero: mask it, with ``sparsifier.evaluate(model)``, while it is swapped in.

    Args:
        weights: The trained parameters by name.
        decay: :math:`\beta`, in [0, 1).

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> average = ExponentialAverage({"weight": weight}, decay=0.75)
        >>> _ = weight.data.fill_(4.0)
        >>> average.update()
        >>> with average.swapped_in():
        ...     print(weight.item())
        1.0
        >>> weight.item()
        4.0
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        if not 0.0 <= decay < 1.0:  # this form refuses NaN too
            raise ValueError(f"ema_decay must lie in [0, 1), got {decay}. DeiT uses 0.99996; None is no average.")
        self.decay = decay
        self.averages = {name: w.detach().clone() for name, w in weights.items() if w.is_floating_point()}
        self._weights = [local_shard(weights[name]) for name in self.averages]
        self._averages = [local_shard(average) for average in self.averages.values()]

    @torch.no_grad()
    def update(self) -> None:
        """Once after every training step."""
        torch._foreach_lerp_(self._averages, self._weights, 1.0 - self.decay)

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model's weights are their averages inside, and themselves again outside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights, self._averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
