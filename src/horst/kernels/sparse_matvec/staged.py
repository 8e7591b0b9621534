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

from horst.kernels.sparse_matvec import driver
from horst.kernels.sparse_matvec.layout import SparseRows
from horst.kernels.sparse_matvec.tuning import Launch

_SOURCE = pathlib.Path(__file__).with_name("staged.cu")


def can_stage(matrix: SparseRows) -> bool:
    """Whether the kernel takes a matrix: words, on an NVIDIA GPU whose shared memory holds the inputs of a token."""
    is_nvidia = matrix.columns.is_cuda and torch.version.cuda is not None and hasattr(torch.cuda, "_compile_kernel")
    if not is_nvidia or matrix.values is not None or not driver.can_launch():
        return False
    return tokens_at_a_time(matrix.shape[1], matrix.columns.device, 1) == 1


@functools.cache
def tokens_at_a_time(width: int, device: torch.device, tokens: int) -> int:
    """The most of 8, 4, 2 and 1 tokens whose inputs fit into shared memory together, not more than are needed; or 0."""
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    needed = next((count for count in (1, 2, 4, 8) if count >= tokens), 8)
    return next((count for count in (8, 4, 2, 1) if count <= needed and _shared_bytes(width, count) <= room), 0)


def _shared_bytes(width: int, tokens: int) -> int:
    return 2 * tokens * (width + 1)


def source(tokens: int, warps: int, batch: int, *, bfloat16: bool, overlap: bool) -> str:
    """The kernel with its settings, for ``tokens`` of 1, 2, 4 or 8.

    Example:
        >>> source(1, 16, 4, bfloat16=True, overlap=False).splitlines()[:2]
        ['#define TOKENS 1', '#define WARPS 16']
    """
    # Few loads in flight leave room for twice the threads, such as those of the next launch.
    per_sm = (64 if batch <= 2 and tokens == 1 else 32) // warps
    settings = {"TOKENS": tokens, "WARPS": warps, "BATCH": batch, "PER_SM": per_sm}
    settings |= {"BF16": int(bfloat16), "OVERLAP": int(overlap)}
    return "".join(f"#define {name} {value}\n" for name, value in settings.items()) + _SOURCE.read_text()


@functools.cache
def _compiled(tokens: int, warps: int, batch: int, bfloat16: bool, overlap: bool, device: torch.device) -> Any:
    with driver.on_device(device):
        text = source(tokens, warps, batch, bfloat16=bfloat16, overlap=overlap)
        return torch.cuda._compile_kernel(text, "sparse_matvec")


@functools.cache
def launcher(
    shape: tuple[int, int], tokens: int, has_bias: bool, launch: Launch, dtype: torch.dtype, device: torch.device
) -> driver.Launcher:
    """The kernel ready for matrices of ``shape`` on ``device``: of a launch, only the addresses are left to give."""
    rows, width = shape
    at_a_time = tokens_at_a_time(width, device, tokens)
    assert tokens <= at_a_time
    overlap = launch.overlap and driver.can_overlap(device)
    kernel = _compiled(at_a_time, launch.warps, launch.block // 128, dtype == torch.bfloat16, overlap, device)
    with driver.on_device(device):
        return driver.Launcher(
            kernel.func.value,
            grid=-(-rows // launch.rows),
            threads=32 * launch.warps,
            shared_bytes=_shared_bytes(width, at_a_time),
            addresses=6,
            numbers=(rows, width, tokens, int(has_bias)),
            overlap=overlap,
        )


def run(ready: driver.Launcher, x: Tensor, matrix: SparseRows, bias: Tensor | None, y: Tensor) -> None:
    """Write ``x @ matrix.T + bias`` to ``y``, on the current stream of their device; both are contiguous."""
    index = x.get_device()
    if index != driver.current_device():
        with driver.on_device(index):
            return run(ready, x, matrix, bias, y)
    target = y.data_ptr()
    return ready(
        driver.current_stream(index),
        x.data_ptr(),
        matrix.columns.data_ptr(),
        matrix.starts.data_ptr(),
        matrix.order.data_ptr(),
        target if bias is None else bias.data_ptr(),
        target,
    )


def sparse_matvec_staged(x: Tensor, matrix: SparseRows, bias: Tensor | None, launch: Launch) -> Tensor:
    """``x @ matrix.T + bias`` for ``x`` of shape (tokens, inputs), at most 8 tokens per pass over the weights."""
    y = torch.empty(len(x), matrix.shape[0], dtype=x.dtype, device=x.device)
    at_a_time = tokens_at_a_time(matrix.shape[1], x.device, len(x))
    for part, out in zip(x.contiguous().split(at_a_time), y.split(at_a_time), strict=True):
        run(launcher(matrix.shape, len(part), bias is not None, launch, x.dtype, x.device), part, matrix, bias, out)
    return y
