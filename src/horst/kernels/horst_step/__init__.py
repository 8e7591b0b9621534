"""One step of HORST (Algorithm 2) or HAM (Algorithm 1) over a list of tensors, in place; three backends.

``reference.py`` holds the formulas, ``eager.py`` the for-loop and foreach backends, ``triton.py`` the fused one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from horst.kernels.backends import Backend
from horst.kernels.horst_step.eager import horst_step_multi_tensor, horst_step_single_tensor
from horst.kernels.horst_step.operands import StepOptions, StepTensors
from horst.kernels.horst_step.reference import ham_step_reference, horst_step_reference
from horst.kernels.multi_tensor import LaunchCache

__all__ = [
    "StepOptions",
    "StepTensors",
    "ham_step_reference",
    "horst_step",
    "horst_step_reference",
]


def horst_step(
    tensors: StepTensors,
    options: StepOptions,
    backend: Backend,
    *,
    masks: list[Tensor] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    cache: LaunchCache | None = None,
) -> None:
    """AdamW's step, the mirror step along the same direction, the soft threshold: each tensor in place.

    Args:
        masks: Boolean tensors like the parameters; a weight is zero after the step where its mask is False.
        grad_scale, found_inf: Tensors that ``torch.amp.GradScaler`` hands to an optimizer; fused backend only.
        cache: Tables of the fused backend, one cache per list of tensors; None builds them at each call.

    Example:
        >>> theta, g = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0])
        >>> tensors = StepTensors([theta], [g], [torch.zeros(2)], [torch.zeros(2)], [torch.zeros(())])
        >>> horst_step(tensors, StepOptions(0.1, 0.9, 0.999, 1e-8, 0.5, alpha=5.0, beta=0.0), "for-loop")
        >>> theta  # 0.85 * exp(-0.5) and -1.05 * exp(0.5)
        tensor([ 0.5156, -1.7312])
    """
    if options.l1 and not isinstance(options.lr, Tensor) and not 0 <= options.lr * options.l1 < math.inf:
        raise ValueError(f"lr * l1 must be a number of at least 0, got {options.lr} * {options.l1}. Check lr and l1.")
    if backend == "fused":
        _fused(tensors, options, masks, grad_scale, found_inf, cache or LaunchCache())
        return
    if grad_scale is not None or found_inf is not None:
        raise RuntimeError(f"grad_scale and found_inf are for the fused backend, got backend {backend!r}.")
    rounds_stochastically = options.stochastic_rounding and any(p.dtype is torch.bfloat16 for p in tensors.params)
    if backend == "foreach" and not rounds_stochastically:
        horst_step_multi_tensor(tensors, options)
    else:
        horst_step_single_tensor(tensors, options)
    for p, mask in zip(tensors.params, masks or (), strict=False):
        p.masked_fill_(~mask, 0)


# torch.compiler.disable would import the whole compiler here: two seconds
@torch._disable_dynamo  # type: ignore[attr-defined]
def _fused(
    tensors: StepTensors,
    options: StepOptions,
    masks: list[Tensor] | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    cache: LaunchCache,
) -> None:
    from horst.kernels.horst_step.triton import horst_step_triton

    horst_step_triton(tensors, options, masks=masks, grad_scale=grad_scale, found_inf=found_inf, cache=cache)
