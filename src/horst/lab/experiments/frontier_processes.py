"""Runs side by side in several processes, each on one thread."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from typing import Any

import torch

from horst.training.torch_settings import threads


def side_by_side(
    function: Callable[..., dict[str, Any]], calls: Mapping[str, tuple[Any, ...]], workers: int
) -> list[dict[str, Any]]:
    """What ``function`` returns for each call, in their order.

    Every call computes on one thread, so that its result does not depend on ``workers``. Each call that ends prints a
    line on standard error. An error ends the study; finished calls should leave files for the next time.

    Args:
        function: Function of a module, so that another process can import it.
        calls: Arguments of each call, by a name to print.
        workers: Number of processes; 1 is this one.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    began = time.perf_counter()
    found: dict[str, dict[str, Any]] = {}

    def note(name: str, outcome: dict[str, Any]) -> None:
        found[name] = outcome
        minutes = (time.perf_counter() - began) / 60
        sys.stderr.write(f"{len(found)} of {len(calls)} after {minutes:.1f} min: {name}\n")

    if workers == 1:
        with threads(1):
            for name, arguments in calls.items():
                note(name, function(*arguments))
        return list(found.values())
    # a fork of a process with threads, as torch's are, may hang
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker) as pool:
        futures = {pool.submit(function, *arguments): name for name, arguments in calls.items()}
        try:
            for future in as_completed(futures):
                note(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [found[name] for name in calls]


def _begin_worker() -> None:
    """Compute on one thread, and end when the study does, even one that was killed."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
