"""Runs of a table, one after the other: each leaves a file, and a table that was interrupted takes it from there."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

from horst.experiments.result import plain
from horst.optimizers import auto_alpha
from horst.training.distributed import on_every_rank, rank

logger = logging.getLogger(__name__)


def once(path: pathlib.Path, config: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``compute`` returned, from ``path`` if it was computed before with an equal ``config``.

    Args:
        path: A JSON file, written whole or not at all.
        config: A dataclass or a dictionary.
        compute: Runs on all ranks; what rank 0 returns is kept.
    """
    wanted = plain(dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config)  # type: ignore[arg-type]
    key = {
        "config": wanted,
        "auto": [auto_alpha.MAX_RATE, auto_alpha.WANDER, auto_alpha.SPREAD],
    }  # the rule's numbers
    saved = _read(path)
    if {name: saved.get(name) for name in key} == key:
        return dict(saved["outcome"])
    outcome = plain(compute())

    def write() -> None:
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({**key, "outcome": outcome}))
            os.replace(temporary, path)

    on_every_rank(write)
    return dict(outcome)


def _read(path: pathlib.Path) -> dict[str, Any]:
    """What the file holds; nothing if there is none, or if it is damaged, which a warning tells."""
    if not path.is_file():
        return {}
    try:
        saved = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        logger.warning("%s is no whole outcome (%s): its run is taken for not done.", path, error)
        return {}
    if not isinstance(saved, dict) or not isinstance(saved.get("outcome"), dict):
        logger.warning("%s holds no outcome of ours: its run is taken for not done.", path)
        return {}
    return saved
