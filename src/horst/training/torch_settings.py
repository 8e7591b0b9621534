"""Settings of torch that hold inside a block and are put back after it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Inside, torch uses deterministic algorithms only, and refuses operations that have none. False changes nothing.

    Example:
        >>> with deterministic_algorithms(True):
        ...     torch.are_deterministic_algorithms_enabled()
        True
        >>> torch.are_deterministic_algorithms_enabled()
        False
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = cudnn.deterministic, cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # without it cuBLAS may sum in another order on another stream
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = cudnn_before
        if workspace is None:
            del os.environ[_WORKSPACE]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch computes on ``count`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
