"""Every random number generator of this process, as JSON: Python's, torch's on CPU and GPU, NumPy's if loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, Any]:
    """The states of all generators.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(3)
        >>> set_random_state(state)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().tolist()  # of this process's device
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = numpy.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on where :func:`random_state` was taken. What this process does not have, a GPU for one, is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    if "numpy" in state and (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, torch.tensor(keys, dtype=torch.int64).numpy(), *rest))
