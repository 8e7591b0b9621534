"""Runs of a table, one after the other: each leaves a file, and a table that was interrupted takes it from there."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import time
from collections.abc import Callable
from typing import Any

from horst.files import read_json, write_json
from horst.lab.experiments.result import environment, to_json
from horst.optimizers import auto_alpha
from horst.training import NonFiniteLoss
from horst.training.distributed import on_rank_0

logger = logging.getLogger(__name__)


def load_or_run(
    path: pathlib.Path, config: Any, compute: Callable[[], dict[str, Any]], device: str = "cpu"
) -> dict[str, Any]:
    """What ``compute`` returned, from ``path`` if it was computed before with an equal ``config``.

    Under ``"origin"`` it holds the ``environment`` of the process that computed, and the ``seconds`` it took.

    Args:
        path: JSON file, written whole or not at all.
        config: Dataclass or dictionary.
        compute: Function that runs on all ranks; what rank 0 returns is kept, and returned on all.
        device: Device that it computes on.
    """
    wanted = to_json(dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config)  # type: ignore[arg-type]
    # the numbers of alpha="auto"
    names = ("NOISE_IN_LOG", "MAX_STEP_PER_RMS", "MAX_MIRROR_PER_ADAM")
    rule = [getattr(auto_alpha, name) for name in names]
    key = {"config": wanted, "auto": rule}
    saved = on_rank_0(lambda: _read(path, key))
    if not saved:
        origin: dict[str, Any] = {"environment": environment(device)}
        began = time.perf_counter()
        outcome = to_json(compute())
        origin["seconds"] = round(time.perf_counter() - began, 3)
        # what rank 0 has written is what all ranks return: they must agree on what was found
        saved = on_rank_0(lambda: {"outcome": outcome, "origin": origin})
        on_rank_0(lambda: write_json(path, {**key, **saved}))
    return {**saved["outcome"], "origin": saved["origin"]}


def broken_down(error: NonFiniteLoss) -> dict[str, str]:
    """What a row says of a run whose loss was not finite, in place of its numbers: a table goes on without them.

    Example:
        >>> broken_down(NonFiniteLoss("the loss is nan at step 50; all was finite until step 0."))
        {'broke_down': 'the loss is nan at step 50'}
    """
    logger.warning("a run broke down: %s", error)
    return {"broke_down": str(error).split(";")[0]}


def _read(path: pathlib.Path, key: dict[str, Any]) -> dict[str, Any]:
    """What the file holds; nothing if there is none, if it is another's, or if it is damaged, which a warning tells."""
    if not path.is_file():
        return {}
    try:
        saved = read_json(path)
    except ValueError as error:
        logger.warning("%s is no whole outcome (%s): its run is taken for not done.", path, error)
        return {}
    if not isinstance(saved.get("outcome"), dict) or "origin" not in saved:
        logger.warning("%s holds no outcome of ours: its run is taken for not done.", path)
        return {}
    return saved if {name: saved.get(name) for name in key} == key else {}
