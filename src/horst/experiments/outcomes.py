"""Runs of a table, one after the other: each leaves a file, and a table that was interrupted takes it from there."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from horst.experiments.result import plain
from horst.optimizers import auto_alpha
from horst.training.distributed import on_every_rank, rank


def once(path: pathlib.Path, config: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What ``compute`` returned, from ``path`` if it was computed before with an equal ``config``.

    Args:
        path: A JSON file, written whole or not at all.
        config: A dataclass or a dictionary.
        compute: Runs on all ranks; what rank 0 returns is kept.
    """
    given = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config  # type: ignore[arg-type]
    rule = [auto_alpha.RATE, auto_alpha.SPREAD, auto_alpha.LARGE_STEP]  # what alpha="auto" stands for
    wanted = plain({"given": given, "auto": rule})
    if path.is_file():
        saved = json.loads(path.read_text())
        if saved["config"] == wanted:
            return dict(saved["outcome"])
    outcome = plain(compute())

    def write() -> None:
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"config": wanted, "outcome": outcome}))
            os.replace(temporary, path)

    on_every_rank(write)
    return dict(outcome)
