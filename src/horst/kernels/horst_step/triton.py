"""HORST's and HAM's step as one Triton launch over all tensors of a group, in place and without temporaries.

The floor is 28 bytes per float32 parameter: weight, gradient and two moments read, all but the gradient written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from horst.kernels.horst_step.operands import HAM_MAX_EXPONENT, StepOptions, StepTensors
from horst.kernels.multi_tensor import LaunchCache, share_one_dense_layout
from horst.kernels.triton_primitives import TRITON_DTYPES, cast_nearest, cast_stochastic, locate, mix

HAM_LIMIT = tl.constexpr(HAM_MAX_EXPONENT)  # a kernel sees no other globals


@triton.jit
def _one_minus_exp(x, ACC: tl.constexpr):
    """1 - exp(x) for x <= 0; in float32 the plain form would keep four digits of 1 - 0.999."""
    if ACC == tl.float64:
        return 1 - tl.exp(x)
    series = -x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.2, series, 1 - tl.exp(x))


@triton.jit
def _update_block(
    theta_ptr, g_ptr, m_ptr, v_ptr, step_ptr, keep_ptr, offsets, n, salt, lr_ptr, grad_scale_ptr,
    lr, log_beta1, log_beta2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, alpha, beta, l1,
    ACC: tl.constexpr, MASKED: tl.constexpr, MIRROR: tl.constexpr, ALONG_GRADIENT: tl.constexpr,
    L1: tl.constexpr, MAXIMIZE: tl.constexpr, STOCHASTIC: tl.constexpr, SPARSE: tl.constexpr,
):  # fmt: skip
    """The lines of reference.py, in their order, on one block. Loads in the storage dtypes, computes in ACC."""
    mask = offsets < n if MASKED else None  # a mask the compiler cannot see through forbids 16-byte accesses
    theta = tl.load(theta_ptr + offsets, mask=mask).to(ACC)
    g = tl.load(g_ptr + offsets, mask=mask).to(ACC)
    m = tl.load(m_ptr + offsets, mask=mask).to(ACC)
    v = tl.load(v_ptr + offsets, mask=mask).to(ACC)

    # The scalars come after the block's loads have been issued, so that their latency hides behind them. Those that a
    # schedule or a scaler changes are read from device memory where they live there: CUDA graphs see them.
    step = tl.load(step_ptr) + 1
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(ACC)
    else:
        lr = tl.full((), lr, ACC)
    step_size = lr / _one_minus_exp(step.to(ACC) * tl.full((), log_beta1, ACC), ACC)
    bias_correction2_sqrt = tl.sqrt(_one_minus_exp(step.to(ACC) * tl.full((), log_beta2, ACC), ACC))

    if grad_scale_ptr is not None:
        g = g / tl.load(grad_scale_ptr).to(ACC)
    if MAXIMIZE:
        g = -g
    m += tl.full((), one_minus_beta1, ACC) * (g - m)
    v = tl.full((), beta2, ACC) * v + tl.full((), one_minus_beta2, ACC) * g * g
    if ACC == tl.float64:
        u = step_size * (m / (tl.sqrt(v) / bias_correction2_sqrt + tl.full((), eps, ACC)))
    else:
        u = step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + tl.full((), eps, ACC))
    theta = theta - u - lr * tl.full((), weight_decay, ACC) * theta
    if MIRROR:
        direction = tl.full((), alpha, ACC) * (lr * g if ALONG_GRADIENT else u)
        exponent = tl.where(theta < 0, direction, -direction) - lr * tl.full((), beta, ACC)
        if ALONG_GRADIENT:
            exponent = tl.minimum(tl.maximum(exponent, -HAM_LIMIT), HAM_LIMIT)
        theta = theta * tl.exp(exponent)
    if L1:
        threshold = lr * tl.full((), l1, ACC)
        shrunk = tl.where(theta < 0, theta + threshold, theta - threshold)
        theta = tl.where(tl.abs(theta) <= threshold, 0.0, shrunk)  # <=, so that NaN stays NaN
    if SPARSE:
        theta = tl.where(tl.load(keep_ptr + offsets, mask=mask) != 0, theta, 0.0)
    if STOCHASTIC:
        key = mix((step.to(tl.int64) + salt * 0x9E3779B9).to(tl.uint32))
        noise = mix((offsets + (offsets >> 32)).to(tl.uint32) ^ key)
        theta = cast_stochastic(theta, noise & 0xFFFF)
        if v_ptr.dtype.element_ty == tl.bfloat16:
            v = cast_stochastic(v, noise >> 16)
    tl.store(theta_ptr + offsets, cast_nearest(theta, theta_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + offsets, cast_nearest(m, m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + offsets, cast_nearest(v, v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _horst_kernel(
    table, grad_table, chunks, tickets, lr_ptr, grad_scale_ptr, found_inf_ptr,
    lr: tl.float64, log_beta1: tl.float64, log_beta2: tl.float64,
    one_minus_beta1: tl.float64, beta2: tl.float64, one_minus_beta2: tl.float64,
    eps: tl.float64, weight_decay: tl.float64, alpha: tl.float64, beta: tl.float64, l1: tl.float64,
    THETA: tl.constexpr, M: tl.constexpr, V: tl.constexpr, GRAD: tl.constexpr, ACC: tl.constexpr,
    MIRROR: tl.constexpr, ALONG_GRADIENT: tl.constexpr, L1: tl.constexpr, MAXIMIZE: tl.constexpr,
    STOCHASTIC: tl.constexpr, SPARSE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS_PER_CHUNK: tl.constexpr,
):  # fmt: skip
    tensor, start = locate(chunks, BLOCK, BLOCKS_PER_CHUNK)
    COLUMNS: tl.constexpr = 7 if SPARSE else 6  # theta, m, v, step, (mask,) number of elements, position
    row = table + COLUMNS * tensor
    n = tl.load(row + COLUMNS - 2)
    if start >= n:
        return
    if found_inf_ptr is not None:  # noqa: SIM102  (the outer test is made when compiling)
        if tl.load(found_inf_ptr) != 0:
            return

    theta_ptr = tl.load(row).to(tl.pointer_type(THETA))
    m_ptr = tl.load(row + 1).to(tl.pointer_type(M))
    v_ptr = tl.load(row + 2).to(tl.pointer_type(V))
    step_ptr = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    g_ptr = tl.load(grad_table + tensor).to(tl.pointer_type(GRAD))
    keep_ptr = tl.load(row + 4).to(tl.pointer_type(tl.int8)) if SPARSE else theta_ptr
    if ALIGNED:
        theta_ptr = tl.multiple_of(theta_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        v_ptr = tl.multiple_of(v_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
        keep_ptr = tl.multiple_of(keep_ptr, 16)
    salt = tl.load(row + COLUMNS - 1) if STOCHASTIC else 0

    offsets = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        _update_block(
            theta_ptr, g_ptr, m_ptr, v_ptr, step_ptr, keep_ptr, offsets, n, salt, lr_ptr, grad_scale_ptr,
            lr, log_beta1, log_beta2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, alpha, beta, l1,
            ACC, False, MIRROR, ALONG_GRADIENT, L1, MAXIMIZE, STOCHASTIC, SPARSE,
        )  # fmt: skip
    else:
        _update_block(
            theta_ptr, g_ptr, m_ptr, v_ptr, step_ptr, keep_ptr, offsets, n, salt, lr_ptr, grad_scale_ptr,
            lr, log_beta1, log_beta2, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, alpha, beta, l1,
            ACC, True, MIRROR, ALONG_GRADIENT, L1, MAXIMIZE, STOCHASTIC, SPARSE,
        )  # fmt: skip

    # The program that draws a tensor's last ticket advances its step counter: no second launch. After the barrier every
    # thread of this program has used the counter (its stores needed it), so the last drawer writes when all have read.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + tensor, 1, sem="relaxed")
    if ticket == ((n + BLOCK - 1) // BLOCK).to(tl.int32) - 1:
        tl.store(tickets + tensor, 0)
        tl.store(step_ptr, tl.load(step_ptr) + 1)


def horst_step_triton(
    tensors: StepTensors,
    options: StepOptions,
    *,
    masks: list[Tensor] | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    cache: LaunchCache,
) -> None:
    """Update all parameters, in place: one launch per device and combination of dtypes.

    Gradients and moments laid out unlike their parameter, and parameters with gaps, go through contiguous copies.
    ``grad_scale`` and ``found_inf`` are read on the device. Arguments: those of :func:`horst.kernels.horst_step`.
    """
    params, grads, exp_avgs, exp_avg_sqs, steps = tensors
    staged: list[tuple[Tensor, Tensor]] = []
    more = [] if masks is None else [masks]
    launches = cache.reuse((params, exp_avgs, exp_avg_sqs, steps, *more), grads)
    if launches is None:
        if any(step.device != p.device for p, step in zip(params, steps, strict=True)):
            raise RuntimeError(
                "a step counter lies on another device than its parameter. Load states with load_state_dict, which "
                "moves them, not by writing to optimizer.state."
            )
        columns, staged = _walkable(params, grads, exp_avgs, exp_avg_sqs, *more)
        params, grads, exp_avgs, exp_avg_sqs, *more = columns
        launches = cache.plan((params, exp_avgs, exp_avg_sqs, steps, *more), grads, keep=not staged)
    for i in cache.empty:
        # no program visits it, but ranks must agree on the counter of a parameter with empty shards
        steps[i].add_(1 if found_inf is None else (found_inf == 0).to(steps[i]).view(()))

    lr, beta1, beta2, eps, weight_decay, alpha, beta, *_ = options
    for launch in launches:
        device = launch.table.device
        theta_dtype, m_dtype, v_dtype, *_, grad_dtype = launch.dtypes
        acc = torch.float64 if theta_dtype is torch.float64 else torch.float32
        lr_on_device = None
        if isinstance(lr, Tensor) and not lr.is_cpu:
            lr_on_device = lr.to(device, acc)
        from_device = [
            lr_on_device,
            None if grad_scale is None else grad_scale.to(device, non_blocking=True),
            None if found_inf is None else found_inf.to(device, non_blocking=True),
        ]
        launch.run(
            _horst_kernel,
            (
                launch.table,
                launch.moving_table,
                launch.chunks,
                launch.tickets,
                *from_device,
                0.0 if lr_on_device is not None else float(lr),
                math.log(beta1) if beta1 > 0 else -math.inf,
                math.log(beta2) if beta2 > 0 else -math.inf,
                1.0 - beta1,
                beta2,
                1.0 - beta2,
                eps,
                weight_decay,
                alpha,
                beta,
                options.l1,
            ),
            (
                TRITON_DTYPES[theta_dtype],
                TRITON_DTYPES[m_dtype],
                TRITON_DTYPES[v_dtype],
                TRITON_DTYPES[grad_dtype],
                TRITON_DTYPES[acc],
                options.has_mirror_step,
                options.along_gradient,
                options.l1 != 0,
                options.maximize,
                options.stochastic_rounding and theta_dtype is torch.bfloat16,
                masks is not None,
            ),
            may_reuse=from_device == [None, None, None],
        )
    for original, copy in staged:
        original.copy_(copy)


def _walkable(*lists: list[Tensor]) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Parameters, gradients, moments (and masks) with contiguous stand-ins where they are laid out unlike each other.

    Returns:
        The lists, and the pairs (tensor, stand-in) of what the step writes, to be copied back.
    """
    columns = [list(column) for column in lists]
    staged: list[tuple[Tensor, Tensor]] = []
    for i, row in enumerate(zip(*lists, strict=True)):
        if not share_one_dense_layout(*row):
            for c, tensor in enumerate(row):
                columns[c][i] = tensor.contiguous()
                if c in (0, 2, 3) and columns[c][i] is not tensor:
                    staged.append((tensor, columns[c][i]))
    return columns, staged
