"""Attention over few tokens as Triton kernels: one program per head.

The floor in bfloat16 is 8 bytes per token and channel forwards (queries, keys and values read, the output written), and
14 backwards (the output's gradient and those three read, their three gradients written).
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile(pointer, row, TOKENS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEAD: tl.constexpr):
    """Addresses of a head's rows, and which of them exist."""
    token, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_HEAD)[None, :]
    return pointer + token * row + column, (token < TOKENS) & (column < HEAD)


@triton.jit
def _weights(q, k, scale, TOKENS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """softmax(Q K^T / sqrt(d)), in float32."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if BLOCK > TOKENS:
        scores = tl.where(tl.arange(0, BLOCK)[None, :] < TOKENS, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _forward_kernel(
    qkv_ptr, out_ptr, scale,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program, width = tl.program_id(0), HEADS * HEAD
    image, head = (program // HEADS).to(tl.int64), program % HEADS  # int64: offsets into a large batch overflow int32
    start = qkv_ptr + image * TOKENS * 3 * width + head * HEAD
    at, there = _tile(start, 3 * width, TOKENS, HEAD, BLOCK, BLOCK_HEAD)
    q = tl.load(at, mask=there, other=0.0)
    k = tl.load(at + width, mask=there, other=0.0)
    v = tl.load(at + 2 * width, mask=there, other=0.0)

    p = _weights(q, k, scale, TOKENS, BLOCK, PRECISION)
    out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)

    at, there = _tile(out_ptr + image * TOKENS * width + head * HEAD, width, TOKENS, HEAD, BLOCK, BLOCK_HEAD)
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _backward_kernel(
    grad_ptr, qkv_ptr, out_ptr, scale,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows past the last token have weights, but no gradient: they add nothing to the sums over rows."""
    program, width = tl.program_id(0), HEADS * HEAD
    image, head = (program // HEADS).to(tl.int64), program % HEADS
    packed = image * TOKENS * 3 * width + head * HEAD
    at, there = _tile(qkv_ptr + packed, 3 * width, TOKENS, HEAD, BLOCK, BLOCK_HEAD)
    q = tl.load(at, mask=there, other=0.0)
    k = tl.load(at + width, mask=there, other=0.0)
    v = tl.load(at + 2 * width, mask=there, other=0.0)
    at, there = _tile(grad_ptr + image * TOKENS * width + head * HEAD, width, TOKENS, HEAD, BLOCK, BLOCK_HEAD)
    g = tl.load(at, mask=there, other=0.0)

    p = _weights(q, k, scale, TOKENS, BLOCK, PRECISION)
    at, there = _tile(out_ptr + packed, 3 * width, TOKENS, HEAD, BLOCK, BLOCK_HEAD)
    dv = tl.dot(tl.trans(p.to(g.dtype)), g, input_precision=PRECISION)
    tl.store(at + 2 * width, dv.to(out_ptr.dtype.element_ty), mask=there)
    dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - tl.sum(p * dp, axis=1)[:, None]) * scale
    ds = ds.to(q.dtype)
    dq = tl.dot(ds, k, input_precision=PRECISION)
    tl.store(at, dq.to(out_ptr.dtype.element_ty), mask=there)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
    tl.store(at + width, dk.to(out_ptr.dtype.element_ty), mask=there)


def launch_forward(qkv: Tensor, heads: int) -> Tensor:
    """See :func:`horst.lab.kernels.short_attention.short_attention`; ``qkv`` is contiguous."""
    out = qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)
    _launch(_forward_kernel, (qkv, out), qkv, heads)
    return out


def launch_backward(grad: Tensor, qkv: Tensor, heads: int) -> Tensor:
    """The gradient of ``qkv`` from that of the output, both contiguous."""
    out = torch.empty_like(qkv)
    _launch(_backward_kernel, (grad, qkv, out), qkv, heads)
    return out


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], qkv: Tensor, heads: int) -> None:
    batch, tokens, head = qkv.shape[0], qkv.shape[1], qkv.shape[2] // (3 * heads)
    if not batch:
        return
    block, block_head = (max(16, triton.next_power_of_2(n)) for n in (tokens, head))  # what tensor cores multiply
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"  # of half precision they say nothing
    with torch.cuda.device(qkv.device) if qkv.is_cuda else contextlib.nullcontext():
        kernel[(batch * heads,)](
            *tensors, 1 / math.sqrt(head), heads, tokens, head, block, block_head, precision,
            num_warps=4 if block <= 64 else 8,
        )  # fmt: skip
