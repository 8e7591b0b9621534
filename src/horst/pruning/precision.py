"""Matrix products in full float32, whatever the global setting is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 and no bfloat16 inside float32 products; the global setting is put back afterwards.

    torch has two ways to say it, and refuses to read the older one where the newer one was used. Setting through the
    older sets both, so that is what happens inside; afterwards both are put back.

    Example:
        >>> with full_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    backends: Any = torch.backends
    newer = (backends.cuda.matmul, backends.mkldnn.matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of the older way
        try:
            older: str | None = torch.get_float32_matmul_precision()
        except RuntimeError:
            older = None
        before = [backend.fp32_precision for backend in newer]
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if older is not None:
                torch.set_float32_matmul_precision(older)
            for backend, precision in zip(newer, before, strict=True):
                backend.fp32_precision = precision
