"""Small functions that Triton kernels share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}


@triton.jit
def locate(chunks, BLOCK: tl.constexpr, BLOCKS_PER_CHUNK: tl.constexpr):
    """The tensor this program works on, and the first element of its block; see :mod:`horst.kernels.multi_tensor`."""
    program = tl.program_id(0)
    chunk = program // BLOCKS_PER_CHUNK
    tensor = tl.load(chunks + 2 * chunk)
    block = tl.load(chunks + 2 * chunk + 1) + program % BLOCKS_PER_CHUNK
    return tensor, block.to(tl.int64) * BLOCK  # int64: offsets into a large tensor overflow int32


@triton.jit
def mix(x):
    """The hash of :mod:`horst.kernels.rounding`, on 32-bit unsigned integers."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def cast_stochastic(x, noise):
    """Round float32 to a bfloat16 number, still stored as float32; see horst.kernels.rounding.stochastic_round."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def cast_nearest(x, DTYPE: tl.constexpr):
    """Cast with rounding to nearest even. Written out for bfloat16, which Triton's interpreter would truncate."""
    if x.dtype == tl.float32 and DTYPE == tl.bfloat16:
        lowest_kept_bit = (x.to(tl.uint32, bitcast=True) >> 16) & 1
        x = cast_stochastic(x, lowest_kept_bit + 0x7FFF)
    return x.to(DTYPE)
