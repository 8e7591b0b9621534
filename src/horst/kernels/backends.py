"""Which backend a step runs on: a for-loop over tensors, foreach calls, or a fused Triton kernel."""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Backend = Literal["for-loop", "foreach", "fused"]

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IS_CUDA = operator.attrgetter("is_cuda")
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # found, not imported: that takes half a second


def runs_kernels(tensor: Tensor) -> bool:
    """Whether a Triton kernel runs where this tensor is. Dynamo sees through it."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    return _HAS_TRITON and (tensor.is_cuda or (interpreting and tensor.is_cpu))


def why_not_fused(params: Sequence[Tensor]) -> str | None:
    """The reason why a fused kernel cannot run on these parameters, or None when it can."""
    if not _HAS_TRITON:
        return "Triton is not installed (it comes with torch for CUDA)"
    if not all(map(_IS_CUDA, params)) and not all(map(runs_kernels, params)):
        elsewhere = next((p.device for p in params if not p.is_cuda), None)
        return f"a parameter is on {elsewhere}, and the kernel runs on CUDA devices"
    if other := {p.dtype for p in params}.difference(_FUSED_DTYPES):
        return f"a parameter is {other.pop()}, and the kernel knows {', '.join(map(str, _FUSED_DTYPES))}"
    return None


def choose_backend(params: Sequence[Tensor], foreach: bool | None, fused: bool | None) -> Backend:
    """The fastest backend that the flags allow: fused on CUDA, for-loop on a CPU.

    ``True`` insists: a fused backend that cannot run raises. ``None`` for both picks the fastest available. Inside
    ``torch.compile`` the plain formulas are left to the compiler, which fuses them itself.
    """
    if fused:
        if (reason := why_not_fused(params)) is not None:
            raise RuntimeError(
                f"fused=True was asked for, but {reason}. Use fused=None to let the optimizer choose, "
                "or foreach=True for the fastest backend without a kernel."
            )
        return "fused"
    if foreach is not None:
        return "foreach" if foreach else "for-loop"
    compiling = torch.compiler.is_compiling()
    if fused is None and not compiling and params and params[0].is_cuda and why_not_fused(params) is None:
        return "fused"
    return "foreach" if all(p.is_cuda for p in params) else "for-loop"
