"""The mirror step as one Triton launch over all tensors, in place: 12 bytes a float32 parameter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from horst.kernels.mirror_step import MirrorOptions
from horst.kernels.multi_tensor import LaunchCache, share_one_dense_layout
from horst.kernels.triton_primitives import TRITON_DTYPES, cast_nearest, locate


@triton.jit
def _mirror_block(
    theta_ptr, old_ptr, offsets, n, alpha, decay, shrink,
    ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    mask = offsets < n if MASKED else None
    theta = tl.load(theta_ptr + offsets, mask=mask).to(ACC)
    old = tl.load(old_ptr + offsets, mask=mask).to(ACC)
    u = (1 - decay) * old - theta
    exponent = tl.where(theta < 0, alpha * u, -alpha * u) - shrink
    theta = theta * tl.exp(exponent)
    tl.store(theta_ptr + offsets, cast_nearest(theta, theta_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mirror_kernel(
    table, old_table, chunks, decay_ptr, shrink_ptr,
    alpha: tl.float64, decay: tl.float64, shrink: tl.float64,
    THETA: tl.constexpr, OLD: tl.constexpr, ACC: tl.constexpr,
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
    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _mirror_block(theta_ptr, old_ptr, offsets, n, alpha, decay, shrink, ACC, False)
    else:
        _mirror_block(theta_ptr, old_ptr, offsets, n, alpha, decay, shrink, ACC, True)


def mirror_step_triton(params: list[Tensor], before: list[Tensor], options: MirrorOptions, cache: LaunchCache) -> None:
    """Take the mirror step on ``params``, in place: one launch per device and combination of dtypes."""
    staged: list[tuple[Tensor, Tensor]] = []
    launches = cache.reuse((params,), before)
    if launches is None:
        pairs = list(zip(params, before, strict=True))
        walkable = [(p, o) if share_one_dense_layout(p, o) else (p.contiguous(), o.contiguous()) for p, o in pairs]
        staged = [(p, copy) for (p, _), (copy, _) in zip(pairs, walkable, strict=True) if p is not copy]
        launches = cache.plan(([p for p, _ in walkable],), [old for _, old in walkable], keep=not staged)

    alpha, decay, shrink = options
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
            ),
            (TRITON_DTYPES[theta_dtype], TRITON_DTYPES[old_dtype], TRITON_DTYPES[acc]),
            may_reuse=from_device == [None, None],
        )
    for original, copy in staged:
        original.copy_(copy)
