"""HORST's and HAM's step in plain PyTorch: one tensor at a time, and many at once through ``torch._foreach_*``.

With the mirror step off (``alpha=0, beta=0``) both make the same calls as ``torch.optim.AdamW`` in the same order, so
that the result is the same to the last bit. ``u`` is Adam's step at rate lr throughout, as in :mod:`.reference`.

Half-precision tensors are updated in float32 and rounded once at the end: in their own arithmetic eps is 0 (float16)
and the exponent of a mirror step has no digits left (bfloat16).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from horst.kernels.cache_blocking import cache_sized_pieces
from horst.kernels.horst_step.operands import HAM_MAX_EXPONENT, StepOptions, StepTensors
from horst.kernels.rounding import rounding_noise, stochastic_round
from horst.kernels.soft_threshold import soft_threshold_

_HALF = (torch.bfloat16, torch.float16)
# exp(x) is computed as 2**(x * LOG2_E): on a CPU torch's exp2 takes a third of the time of its exp.
LOG2_E = math.log2(math.e)


def horst_step_single_tensor(tensors: StepTensors, options: StepOptions) -> None:
    """Update each parameter in turn, in place."""
    lr, beta1, beta2, eps, weight_decay, alpha, beta, along_gradient, maximize, capturable, *_ = options
    lr = _host_scalar(lr, capturable)
    for step in tensors.steps:
        step += 1
    step_sizes, bias_correction2_sqrts = _bias_corrections(tensors, lr, beta1, beta2, capturable)
    for salt, (param, grad, exp_avg, exp_avg_sq, step) in enumerate(zip(*tensors, strict=True)):
        step_size, bias_correction2_sqrt = step_sizes[salt], bias_correction2_sqrts[salt]
        operands = (param, grad, exp_avg, exp_avg_sq)
        is_half = param.dtype in _HALF
        for theta, g, m, v in [tuple(x.float() for x in operands)] if is_half else cache_sized_pieces(*operands):
            if maximize:
                g = -g
            if weight_decay != 0:
                theta.mul_(1 - lr * weight_decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            denominator = v.sqrt()
            if not options.has_mirror_step and not isinstance(step_size, Tensor):
                theta.addcdiv_(m, denominator.div_(bias_correction2_sqrt).add_(eps), value=-step_size)
            else:
                # m / (sqrt(v) / b + eps) is b * m / (sqrt(v) + b * eps): one pass less
                direction = torch.div(m, denominator.add_(eps * bias_correction2_sqrt), out=denominator)
                rate = step_size * bias_correction2_sqrt
                if isinstance(rate, Tensor):
                    theta.sub_(direction * rate)
                else:
                    theta.sub_(direction, alpha=rate)
                exponent = theta.sign().mul_(g if along_gradient else direction)
                exponent.mul_((lr if along_gradient else rate) * (-alpha * LOG2_E))
                if beta != 0:
                    exponent.sub_(lr * (beta * LOG2_E))
                if along_gradient:
                    exponent.clamp_(-HAM_MAX_EXPONENT * LOG2_E, HAM_MAX_EXPONENT * LOG2_E)
                theta.mul_(exponent.exp2_())
            if options.l1:
                soft_threshold_([theta], lr * options.l1)
            if is_half:
                if options.stochastic_rounding and param.dtype is torch.bfloat16:
                    noise = rounding_noise(param.shape, step, salt, param.device)
                    theta = stochastic_round(theta, noise & 0xFFFF)
                    # beta2 near 1 moves the second moment by less than bfloat16 resolves, too
                    v = stochastic_round(v, noise >> 16) if exp_avg_sq.dtype is torch.bfloat16 else v
                for stored, value in ((param, theta), (exp_avg, m), (exp_avg_sq, v)):
                    stored.copy_(value)


def horst_step_multi_tensor(tensors: StepTensors, options: StepOptions) -> None:
    """Update all parameters with one call per term of the formula, in place. Temporaries: two copies of them."""
    lr, beta1, beta2, eps, weight_decay, alpha, beta, along_gradient, maximize, capturable, *_ = options
    lr = _host_scalar(lr, capturable)
    for part in _by_device_and_dtype(tensors):
        params, grads, exp_avgs, exp_avg_sqs, steps = part
        stored = (params, grads, exp_avgs, exp_avg_sqs)
        is_half = params[0].dtype in _HALF
        theta, g, m, v = [[t.float() for t in column] for column in stored] if is_half else stored
        if maximize:
            g = list(torch._foreach_neg(g))
        if steps[0].is_cpu and not torch.compiler.is_compiling():
            torch._foreach_add_(steps, torch.tensor(1.0), alpha=1.0)  # wraps the 1 once, not per tensor
        else:
            torch._foreach_add_(steps, 1)
        step_sizes, bias_correction2_sqrts = _bias_corrections(part, lr, beta1, beta2, capturable)

        if weight_decay != 0:
            torch._foreach_mul_(theta, 1 - lr * weight_decay)
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, bias_correction2_sqrts)
        torch._foreach_add_(denominator, eps)
        if not options.has_mirror_step and not isinstance(step_sizes[0], Tensor):
            torch._foreach_addcdiv_(theta, m, denominator, [-s for s in step_sizes])
        else:
            u = torch._foreach_div(m, denominator)
            del denominator
            torch._foreach_mul_(u, step_sizes)
            torch._foreach_sub_(theta, u)
            exponent = torch._foreach_sign(theta)
            torch._foreach_mul_(exponent, torch._foreach_mul(g, lr) if along_gradient else u)
            torch._foreach_mul_(exponent, -alpha)
            if beta != 0:
                shrink: Any = lr * beta
                # one tensor for all would be read by the host; a list of it is not
                torch._foreach_sub_(exponent, [shrink] * len(exponent) if isinstance(shrink, Tensor) else shrink)
            if along_gradient:
                torch._foreach_clamp_max_(exponent, HAM_MAX_EXPONENT)
                torch._foreach_clamp_min_(exponent, -HAM_MAX_EXPONENT)
            torch._foreach_exp_(exponent)
            torch._foreach_mul_(theta, exponent)
        if options.l1:
            _soft_threshold_multi_tensor(theta, lr * options.l1)
        if is_half:
            for column, values in ((params, theta), (exp_avgs, m), (exp_avg_sqs, v)):
                torch._foreach_copy_(column, values)


def _soft_threshold_multi_tensor(theta: list[Tensor], threshold: float | Tensor) -> None:
    """The soft threshold by three calls where the host knows it; else tensor by tensor."""
    if isinstance(threshold, Tensor) or torch.compiler.is_compiling():
        soft_threshold_(theta, threshold)
        return
    clamped = torch._foreach_clamp_max(theta, threshold)
    torch._foreach_clamp_min_(clamped, -threshold)
    torch._foreach_sub_(theta, clamped)


def _host_scalar(lr: float | Tensor, capturable: bool) -> float | Tensor:
    """A tensor lr stays one only where the host may not read it (CUDA graphs, torch.compile)."""
    if isinstance(lr, Tensor) and not (capturable or torch.compiler.is_compiling()):
        return lr.item()
    return lr.reshape(()) if isinstance(lr, Tensor) else lr  # a shape of (1,) would spread to weights without one


def _bias_corrections(
    tensors: StepTensors, lr: float | Tensor, beta1: float, beta2: float, capturable: bool
) -> tuple[Sequence[Any], Sequence[Any]]:
    """lr / (1 - beta1^step) and sqrt(1 - beta2^step) of each tensor; as tensors if the host may not read a counter."""
    if not (capturable or torch.compiler.is_compiling()):
        steps = [step.item() for step in tensors.steps]
        return [lr / (1 - beta1**t) for t in steps], [(1 - beta2**t) ** 0.5 for t in steps]
    # expm1: in float32, 1 - 0.999**step would keep four digits at the first step
    exact = [
        t.to(torch.promote_types(p.dtype, torch.float32)) for p, t in zip(tensors.params, tensors.steps, strict=True)
    ]
    step_sizes: Sequence[Any] = [lr / _one_minus_power(beta1, t) for t in exact]
    roots: Sequence[Any] = [_one_minus_power(beta2, t).sqrt() for t in exact]
    if torch.compiler.is_compiling() and len({(t.device, t.dtype) for t in exact}) == 1:
        # stacked, they are computed once; else the compiler computes them again for every few weights
        step_sizes, roots = torch.stack(list(step_sizes)).unbind(), torch.stack(list(roots)).unbind()
    return step_sizes, roots


def _one_minus_power(base: float, exponent: Tensor) -> Tensor:
    return -torch.expm1(exponent * math.log(base)) if base > 0 else torch.ones_like(exponent)


def _by_device_and_dtype(tensors: StepTensors) -> Iterator[StepTensors]:
    """The lists split so that each foreach call sees one device and one combination of dtypes: its fast path."""
    parts: dict[object, StepTensors] = defaultdict(lambda: StepTensors([], [], [], [], []))
    for row in zip(*tensors, strict=True):
        key = (row[0].device, *(t.dtype for t in row))
        for column, tensor in zip(parts[key], row, strict=True):
            column.append(tensor)
    yield from parts.values()
