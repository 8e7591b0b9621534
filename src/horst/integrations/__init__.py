"""Adapters to other libraries' trainers. Each module needs its library; nothing of ours imports them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def resolve_schedule(arguments: Mapping[str, Any], total_steps: Callable[[], float]) -> dict[str, Any]:
    """``arguments`` with a ``schedule`` that is a function replaced by its value for ``total_steps()``.

    Example:
        >>> resolve_schedule({"sparsity": 0.9, "schedule": lambda total: total // 2}, lambda: 100)
        {'sparsity': 0.9, 'schedule': 50}
    """
    schedule = arguments.get("schedule")
    if not callable(schedule):
        return dict(arguments)
    total = total_steps()
    if not 0 < total < float("inf"):
        raise ValueError(
            f"schedule is a function of the number of steps, which this run does not fix ({total}). Limit the "
            "trainer's steps or epochs, or give a schedule in steps, such as Phases(...)."
        )
    return {**arguments, "schedule": schedule(int(total))}
