"""The mirror step alone, after another optimizer's step: along the displacement that step made.

``reference.py`` holds the formula, this file the eager form, ``triton.py`` the fused one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from horst.kernels.backends import Backend
from horst.kernels.cache_blocking import cache_sized_pieces
from horst.kernels.horst_step.eager import LOG2_E
from horst.kernels.mirror_step.reference import mirror_step_reference
from horst.kernels.multi_tensor import LaunchCache

__all__ = ["MirrorOptions", "mirror_step", "mirror_step_reference"]


class MirrorOptions(NamedTuple):
    """The numbers of a mirror step.

    Attributes:
        alpha: Strength of the mirror step.
        decay: Share of the weight that decoupled decay took in the step before (lr * weight_decay), 0 for none.
        shrink: Part of the exponent that does not depend on the direction (lr * beta).
    """

    alpha: float
    decay: float | Tensor = 0.0
    shrink: float | Tensor = 0.0


def mirror_step(
    params: list[Tensor],
    before: list[Tensor],
    options: MirrorOptions,
    backend: Backend,
    cache: LaunchCache | None = None,
) -> None:
    """Take the mirror step on ``params``, in place.

    Args:
        params: Weights after the optimizer's step.
        before: Weights before it, with the layout and dtype of ``params``.
        cache: Tables of the fused backend; None builds them at each call.

    Example:
        >>> theta = torch.tensor([0.9, -1.1])
        >>> mirror_step([theta], [torch.tensor([1.0, -1.0])], MirrorOptions(alpha=5.0), "for-loop")
        >>> theta  # 0.9 * exp(-0.5) and -1.1 * exp(0.5)
        tensor([ 0.5459, -1.8136])
    """
    if backend == "fused":
        _fused(params, before, options, cache or LaunchCache())
        return
    alpha, decay, shrink = options
    for param, old in zip(params, before, strict=True):
        is_half = param.dtype in (torch.bfloat16, torch.float16)
        for theta, theta_before in [(param.float(), old.float())] if is_half else cache_sized_pieces(param, old):
            exponent = theta_before.mul(1 - decay).sub_(theta).mul_(theta.sign()).mul_(-alpha * LOG2_E)
            if isinstance(shrink, Tensor) or shrink != 0:
                exponent.sub_(shrink * LOG2_E)
            theta.mul_(exponent.exp2_())
            if is_half:
                param.copy_(theta)


# torch.compiler.disable would import the whole compiler here: two seconds
@torch._disable_dynamo  # type: ignore[attr-defined]
def _fused(params: list[Tensor], before: list[Tensor], options: MirrorOptions, cache: LaunchCache) -> None:
    from horst.kernels.mirror_step.triton import mirror_step_triton

    mirror_step_triton(params, before, options, cache)
