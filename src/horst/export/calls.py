"""Calling a model with example inputs, and timing the calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]


def as_call(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a tensor is the only argument, a mapping gives names.

    Example:
        >>> as_call({"x": 1}), as_call([2, 3])
        (((), {'x': 1}), ((2, 3), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)), {}


def interleaved_times(
    calls: Mapping[str, Callable[[], object]], *, seconds: float, minimum: int = 5, maximum: int = 200
) -> dict[str, list[float]]:
    """Seconds of each call, again and again in turns: what slows the machine down for a while slows all of them.

    Args:
        calls: Functions to time, by name. Each runs once before the clock starts.
        seconds: Duration of all timing together, after ``minimum`` rounds and up to ``maximum``.

    Example:
        >>> sorted(interleaved_times({"a": lambda: 1, "b": lambda: 2}, seconds=0.001))
        ['a', 'b']
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    begin, rounds = time.perf_counter(), 0
    while rounds < minimum or (rounds < maximum and time.perf_counter() - begin < seconds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return times
