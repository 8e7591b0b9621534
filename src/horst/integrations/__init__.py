"""Adapters to other libraries' trainers. Each module needs its library; nothing of ours imports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def resolve_schedule(arguments: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """``arguments`` with a ``schedule`` that is a function replaced by its value for ``total_steps``.

    Example:
        >>> resolve_schedule({"sparsity": 0.9, "schedule": lambda total: total // 2}, 100)
        {'sparsity': 0.9, 'schedule': 50}
    """
    schedule = arguments.get("schedule")
    return {**arguments, "schedule": schedule(total_steps)} if callable(schedule) else dict(arguments)
