"""Inputs times a sparse matrix as one Triton launch: each kept weight is read once, for all tokens.

A program has a few rows, and in every step a block of entries of each. Weights are read in order, 16 bytes per thread;
inputs are gathered through the L1 cache, which holds them all. Several tokens lie side by side, so that one gather of
8 bytes brings the inputs of four of them. Sums are in float32, in an order that does not change.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from horst.kernels.sparse_matvec.layout import SparseRows
from horst.kernels.sparse_matvec.tuning import MOST_TOKENS, Launch
from horst.kernels.triton_primitives import TRITON_DTYPES, cast_nearest


@triton.jit
def _as_float(bits, DTYPE: tl.constexpr):
    """The number whose bits are the lowest of an integer, in float32."""
    if DTYPE == tl.float32:
        number = bits.to(tl.int32).to(tl.float32, bitcast=True)
    elif DTYPE == tl.bfloat16:
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _entries(columns_ptr, values_ptr, begin, end, offset, BLOCK: tl.constexpr):
    """Columns and values of a block of each row; the columns twice where the values are in the same words."""
    place = begin[:, None] + offset + tl.arange(0, BLOCK)[None, :]
    columns = tl.load(columns_ptr + place, mask=place < end[:, None], other=0)
    values = columns
    if values_ptr is not None:
        values = tl.load(values_ptr + place, mask=place < end[:, None], other=0)
    return columns, values


@triton.jit
def _zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tuple of sums, one for each token. Blocks of three dimensions would be moved between threads."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros((ROWS, BLOCK), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking)
    return sums


@triton.jit
def _sparse_matvec_kernel(
    x_ptr, columns_ptr, values_ptr, starts_ptr, order_ptr, scales_ptr, bias_ptr, y_ptr,
    n_rows, tokens,
    DTYPE: tl.constexpr, GATHERS: tl.constexpr, PER_GATHER: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    BITS: tl.constexpr = 32 if DTYPE == tl.float32 else 16
    first = tl.program_id(0) * ROWS
    stored = first + tl.arange(0, ROWS)
    exists = stored < n_rows
    begin = tl.load(starts_ptr + stored, mask=exists, other=0) * ALIGN
    end = tl.load(starts_ptr + stored + 1, mask=exists, other=0) * ALIGN
    longest = (tl.load(starts_ptr + first + 1) - tl.load(starts_ptr + first)) * ALIGN  # the longest rows come first
    sums = _zeros(GATHERS * PER_GATHER, ROWS, BLOCK)
    entry, value = _entries(columns_ptr, values_ptr, begin, end, 0, BLOCK)
    if OVERLAP:
        gdc_wait()  # for what came before, which may have written the inputs; the weights are older than that
    for offset in range(0, longest, BLOCK):
        # The weights of the next step are on their way while those of this one are multiplied.
        next_entry, next_value = _entries(columns_ptr, values_ptr, begin, end, offset + BLOCK, BLOCK)
        column = entry.to(tl.int32) & 0xFFFF
        # A value of zero only fills its row up. It must not meet an infinite input.
        if values_ptr is None:
            kept = (entry >> 16) != 0
            weight = _as_float((entry >> 16) & 0xFFFF, DTYPE)
        else:
            kept = value != 0
            weight = value.to(tl.float32)
        new_sums = ()
        for gather in tl.static_range(GATHERS):
            found = tl.load(x_ptr + GATHERS * column + gather, mask=kept, other=0)
            for k in tl.static_range(PER_GATHER):
                added = sums[gather * PER_GATHER + k] + weight * _as_float(found >> (k * BITS), DTYPE)
                new_sums = new_sums + (added,)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking)
        sums = new_sums
        entry, value = next_entry, next_value
    row = tl.load(order_ptr + stored, mask=exists, other=0)
    for token in tl.static_range(GATHERS * PER_GATHER):
        if token < tokens:
            y = tl.sum(sums[token], 1)
            if scales_ptr is not None:
                y *= tl.load(scales_ptr + row, mask=exists, other=0.0)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + row, mask=exists, other=0.0).to(tl.float32)
            tl.store(y_ptr + token * n_rows + row, cast_nearest(y, DTYPE), mask=exists)


def side_by_side(x: Tensor) -> tuple[Tensor, int, int]:
    """Inputs of shape (tokens, inputs) as integers that each hold one input of several tokens.

    Returns:
        The integers, how many of them one column has, and how many tokens one integer holds.
    """
    tokens, width = x.shape
    bits = 8 * x.element_size()
    as_int = {16: torch.int16, 32: torch.int32}[bits]
    if tokens == 1:
        return x.view(as_int), 1, 1
    slots = max(triton.next_power_of_2(tokens), 2)
    if slots == tokens:
        columns_first = x.t().contiguous()
    else:
        columns_first = x.new_zeros(width, slots)
        columns_first[:, :tokens] = x.t()
    per_gather = min(slots, 64 // bits)
    wide = {32: torch.int32, 64: torch.int64}[bits * per_gather]
    return columns_first.reshape(-1).view(wide), slots // per_gather, per_gather


def sparse_matvec_triton(x: Tensor, matrix: SparseRows, bias: Tensor | None, launch: Launch) -> Tensor:
    """``x @ matrix.T + bias`` for ``x`` of shape (tokens, inputs), at most 16 tokens per pass over the weights."""
    y = torch.empty(len(x), matrix.shape[0], dtype=x.dtype, device=x.device)
    for part, out in zip(x.split(MOST_TOKENS), y.split(MOST_TOKENS), strict=True):
        _launch(part.contiguous(), matrix, bias, launch, out)
    return y


def _launch(x: Tensor, matrix: SparseRows, bias: Tensor | None, launch: Launch, y: Tensor) -> None:
    rows = matrix.shape[0]
    inputs, gathers, per_gather = side_by_side(x)
    # only where asked for: Triton's interpreter and other backends do not know the option
    options = {"launch_pdl": True} if launch.overlap else {}
    _sparse_matvec_kernel[(triton.cdiv(rows, launch.rows),)](
        inputs, matrix.columns, matrix.values, matrix.starts, matrix.order, matrix.scales, bias, y,
        rows, len(x),
        DTYPE=TRITON_DTYPES[x.dtype], GATHERS=gathers, PER_GATHER=per_gather,
        ALIGN=matrix.align, ROWS=launch.rows, BLOCK=launch.block, OVERLAP=launch.overlap,
        num_warps=launch.warps, **options,
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    columns_ptr, values_ptr, starts_ptr, order_ptr, scales_ptr, dense_ptr, n_rows, width,
    DTYPE: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    stored = tl.program_id(0)
    begin = tl.load(starts_ptr + stored) * ALIGN
    end = tl.load(starts_ptr + stored + 1) * ALIGN
    row = tl.load(order_ptr + stored)
    # int64: a large matrix has more places than an int32 can count
    row_ptr = dense_ptr + row.to(tl.int64) * width
    zero = tl.zeros((BLOCK,), DTYPE)
    for offset in range(0, width, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        tl.store(row_ptr + column, zero, mask=column < width)
    tl.debug_barrier()  # the zeros of all threads before the values of any
    for offset in range(begin, end, BLOCK):
        place = offset + tl.arange(0, BLOCK)
        entry = tl.load(columns_ptr + place, mask=place < end, other=0)
        if values_ptr is None:
            kept = (entry >> 16) != 0
            weight = _as_float((entry >> 16) & 0xFFFF, DTYPE)
        else:
            value = tl.load(values_ptr + place, mask=place < end, other=0)
            kept = value != 0
            weight = value.to(tl.float32)
        if scales_ptr is not None:
            weight *= tl.load(scales_ptr + row)
        tl.store(row_ptr + (entry.to(tl.int32) & 0xFFFF), cast_nearest(weight, DTYPE), mask=kept)


def expand_triton(matrix: SparseRows) -> Tensor:
    """The dense matrix, in one launch."""
    rows, width = matrix.shape
    dense = torch.empty(rows, width, dtype=matrix.dtype, device=matrix.columns.device)
    _expand_kernel[(rows,)](
        matrix.columns, matrix.values, matrix.starts, matrix.order, matrix.scales, dense, rows, width,
        DTYPE=TRITON_DTYPES[matrix.dtype], ALIGN=matrix.align, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return dense
