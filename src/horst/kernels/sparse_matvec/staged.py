"""Inputs times a sparse matrix with the inputs in shared memory: ``staged.cu``, compiled by torch on first use.

Triton gathers through the L1 cache and has no way to say where the inputs lie; this kernel is the faster one where it
runs: 16-bit values, on an NVIDIA GPU, with a torch that compiles CUDA source (2.9 and later).
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import torch
from torch import Tensor

from horst.kernels.sparse_matvec.layout import SparseRows
from horst.kernels.sparse_matvec.tuning import Launch

_SOURCE = pathlib.Path(__file__).with_name("staged.cu")
_DTYPES = (torch.bfloat16, torch.float16)


def can_stage(matrix: SparseRows) -> bool:
    """Whether the kernel takes a matrix: words, on an NVIDIA GPU whose shared memory holds the inputs of a token."""
    is_nvidia = matrix.columns.is_cuda and torch.version.cuda is not None and hasattr(torch.cuda, "_compile_kernel")
    return is_nvidia and matrix.values is None and tokens_at_a_time(matrix.shape[1], matrix.columns.device, 1) == 1


def tokens_at_a_time(width: int, device: torch.device, tokens: int) -> int:
    """The most of 8, 4, 2 and 1 tokens whose inputs fit into shared memory together, not more than are needed; or 0."""
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    needed = next((count for count in (1, 2, 4, 8) if count >= tokens), 8)
    return next((count for count in (8, 4, 2, 1) if count <= needed and _shared_bytes(width, count) <= room), 0)


def _shared_bytes(width: int, tokens: int) -> int:
    return 2 * tokens * (width + 1)


@functools.cache
def _compiled(tokens: int, warps: int, batch: int, is_bfloat16: bool, device: torch.device) -> Any:
    settings = {"TOKENS": tokens, "WARPS": warps, "BATCH": batch, "BF16": int(is_bfloat16)}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    with torch.cuda.device(device):
        return torch.cuda._compile_kernel(defines + _SOURCE.read_text(), "sparse_matvec")


def sparse_matvec_staged(x: Tensor, matrix: SparseRows, bias: Tensor | None, launch: Launch) -> Tensor:
    """``x @ matrix.T + bias`` for ``x`` of shape (tokens, inputs), at most 8 tokens per pass over the weights."""
    rows, width = matrix.shape
    y = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    at_a_time = tokens_at_a_time(width, x.device, len(x))
    shared = _shared_bytes(width, at_a_time)
    kernel = _compiled(at_a_time, launch.warps, launch.block // 128, x.dtype == torch.bfloat16, x.device)
    if shared >= 48 * 1024 and shared > getattr(kernel, "_max_shared_mem_bytes", 0):
        kernel.set_shared_memory_config(shared)
    grid = (-(-rows // launch.rows), 1, 1)
    for part, out in zip(x.contiguous().split(at_a_time), y.split(at_a_time), strict=True):
        pointers = [part, matrix.columns, matrix.starts, matrix.order, y if bias is None else bias, out]
        counts = [rows, width, len(part), int(bias is not None)]
        kernel(grid, (32 * launch.warps, 1, 1), pointers + counts, shared)
    return y
