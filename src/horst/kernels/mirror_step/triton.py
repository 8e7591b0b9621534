"""The mirror step as one Triton launch over all tensors, in place: 12 bytes a float32 parameter."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from horst.kernels.mirror_step import MirrorOptions
from horst.kernels.multi_tensor import LaunchCache, share_one_dense_layout
from horst.kernels.triton_primitives import TRITON_DTYPES, cast_nearest, locate, mirrored


@triton.jit
def _mirror_block(
    theta_ptr, old_ptr, offsets, n, alpha, decay, shrink, max_exponent, max_scale,
    ACC: tl.constexpr, MASKED: tl.constexpr, CLAMP: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    mask = offsets < n if MASKED else None
    theta = tl.load(theta_ptr + offsets, mask=mask).to(ACC)
    old = tl.load(old_ptr + offsets, mask=mask).to(ACC)
    u = (1 - decay) * old - theta
    exponent = tl.where(theta < 0, alpha * u, -alpha * u) - shrink
    if CLAMP:
        exponent = tl.minimum(tl.maximum(exponent, -max_exponent), max_exponent)
    theta = mirrored(theta, exponent, max_scale, BOUNDED)
    tl.store(theta_ptr + offsets, cast_nearest(theta, theta_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mirror_kernel(
    table, old_table, chunks, decay_ptr, shrink_ptr,
    alpha: tl.float64, decay: tl.float64, shrink: tl.float64, max_exponent: tl.float64, max_scale: tl.float64,
    THETA: tl.constexpr, OLD: tl.constexpr, ACC: tl.constexpr, CLAMP: tl.constexpr, BOUNDED: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    tensor, start = locate(chunks, BLOCK, BLOCKS_PER_CHUNK)
    row = table + 3 * tensor  # theta, number of elements, position
    n = tl.load(row + 1)
    if start >= n:
        return
    theta_ptr = tl.load(row).to(tl.pointer_type(THETA))
    old_ptr = tl.load(old_table + tensor).to(tl.pointer_type(OLD))
    if ALIGNED:
        theta_ptr = tl.multiple_of(theta_ptr, 16)
        old_ptr = tl.multiple_of(old_ptr, 16)
    if decay_ptr is not None:
        decay = tl.load(decay_ptr).to(ACC)
    else:
        decay = tl.full((), decay, ACC)
    if shrink_ptr is not None:
        shrink = tl.load(shrink_ptr).to(ACC)
    else:
        shrink = tl.full((), shrink, ACC)
    alpha = tl.full((), alpha, ACC)
    max_exponent = tl.full((), max_exponent, ACC)
    max_scale = tl.full((), max_scale, ACC)
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _mirror_block(
            theta_ptr, old_ptr, offsets, n, alpha, decay, shrink, max_exponent, max_scale, ACC, False, CLAMP, BOUNDED
        )  # fmt: skip
    else:
        _mirror_block(
            theta_ptr, old_ptr, offsets, n, alpha, decay, shrink, max_exponent, max_scale, ACC, True, CLAMP, BOUNDED
        )  # fmt: skip


def mirror_step_triton(params: list[Tensor], before: list[Tensor], options: MirrorOptions, cache: LaunchCache) -> None:
    """Take the mirror step on ``params``, in place: one launch per device and combination of dtypes."""
    staged: list[tuple[Tensor, Tensor]] = []
    launches = cache.reuse((params,), before)
    if launches is None:
        pairs = list(zip(params, before, strict=True))
        walkable = [(p, o) if share_one_dense_layout(p, o) else (p.contiguous(), o.contiguous()) for p, o in pairs]
        staged = [(p, copy) for (p, _), (copy, _) in zip(pairs, walkable, strict=True) if p is not copy]
        launches = cache.plan(([p for p, _ in walkable],), [old for _, old in walkable], keep=not staged)

    alpha, decay, shrink, max_exponent, max_scale = options
    for launch in launches:
        device = launch.table.device
        theta_dtype, old_dtype = launch.dtypes
        acc = torch.float64 if theta_dtype is torch.float64 else torch.float32
        from_device = [x.to(device, acc) if isinstance(x, Tensor) else None for x in (decay, shrink)]
        launch.run(
            _mirror_kernel,
            (
                launch.table,
                launch.moving_table,
                launch.chunks,
                *from_device,
                alpha,
                0.0 if isinstance(decay, Tensor) else decay,
                0.0 if isinstance(shrink, Tensor) else shrink,
                math.inf if max_exponent is None else max_exponent,
                math.inf if max_scale is None else max_scale,
            ),
            (
                TRITON_DTYPES[theta_dtype],
                TRITON_DTYPES[old_dtype],
                TRITON_DTYPES[acc],
                max_exponent is not None,
                max_scale is not None,
            ),
            may_reuse=from_device == [None, None],
        )
    for original, copy in staged:
        original.copy_(copy)
