"""What the frontier studies share: runs side by side, a folder for each, and what a row says of its optimizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from typing import Any, Literal

import torch

from horst.lab.baselines.contenders import Alpha, Name, Optimization
from horst.lab.experiments.result import to_json

Device = Literal["auto", "cpu"]


def device_name(device: Device) -> str:
    """What a result says of where it was computed."""
    return "cuda" if device == "auto" and torch.cuda.is_available() else "cpu"


def alphas(lr: float, products: Sequence[float]) -> list[Alpha]:
    """HORST's strengths at a learning rate: the paper's 5, those with the given ``alpha * lr``, and its own rule.

    Example:
        >>> alphas(0.01, [0.02, 0.1])
        [5.0, 2.0, 10.0, 'auto']
    """
    return [5.0, *(float(f"{product / lr:.9g}") for product in products), "auto"]


def folder_name(optimizer: Name, optimization: Optimization, details: str, settings: Any) -> str:
    """A name that tells a run to a reader, with eight digits that no other run has.

    Args:
        details: Words to show.
        settings: All that the outcome depends on beside the optimizer's name.

    Example:
        >>> folder_name("horst", Optimization(lr=2e-3), "seed0", {"width": 64})
        'horst-alpha5-lr0.002-seed0-ddfab03c'
    """
    digest = hashlib.sha256(json.dumps(to_json(settings), sort_keys=True).encode()).hexdigest()[:8]
    return f"{optimizer}-{optimization.label(optimizer)}-lr{optimization.lr:g}-{details}-{digest}"


def about_optimizer(optimizer: Name, optimization: Optimization) -> dict[str, Any]:
    """What a row says of its optimizer.

    ``strength`` is what the contender is tuned by: ``alpha * lr`` of a mirror step, Muon's learning rate over ``lr``,
    the penalty or the decay of the others. With ``alpha="auto"``, ``alpha_lr`` and ``strength`` are left open.
    """
    alpha, _ = optimization.strength(optimizer)
    alpha_lr = None if isinstance(alpha, str) else alpha * optimization.lr
    own = {
        "muon": optimization.muon_lr_ratio,
        "adamw-penalty": optimization.penalty,
        "adamw-l1": optimization.l1,
        "horst-l1": optimization.l1,
        "spred": optimization.spred_decay,
    }
    return {
        "optimizer": optimizer,
        "alpha": alpha,
        "alpha_lr": alpha_lr,
        "strength": own.get(optimizer, alpha_lr),
        "lr": optimization.lr,
        "weight_decay": optimization.weight_decay,
        "mirror": optimization.mirror + "".join(f", not {kind}" for kind in optimization.no_mirror),
    }


def side_by_side(
    function: Callable[..., dict[str, Any]], calls: Mapping[str, tuple[Any, ...]], workers: int
) -> list[dict[str, Any]]:
    """What ``function`` returns for each call, in their order, from so many processes at a time.

    Every call computes on one thread, so that what it finds does not depend on ``workers``. A line on standard error
    tells of each that ends. An error ends the study: what was finished must have left files for the next time.

    Args:
        function: Of a module, so that another process can import it.
        calls: The arguments by a name to print.
        workers: Processes; 1 is this one.
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
        with _one_thread():
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


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
