"""How a model is called: the arguments that a batch stands for, and evaluation mode and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Batch = Tensor | Sequence[Any] | Mapping[str, Any]


def as_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a tensor is the only argument, a mapping gives names.

    Example:
        >>> as_call({"x": 1}), as_call([2, 3])
        (((), {'x': 1}), ((2, 3), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,) if isinstance(batch, Tensor) else tuple(batch)), {}


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """``eval()`` mode for the block; afterwards each module has the mode it had before.

    Example:
        >>> model = nn.Dropout()
        >>> with evaluating(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
