"""The masks that an optimizer is given from outside, by parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from horst.parameters.sharding import local_shard

__all__ = ["with_new_masks"]


def with_new_masks(
    optimizer: Optimizer, masks: Mapping[Tensor, Tensor], new: Mapping[Tensor, Tensor | None]
) -> dict[Tensor, Tensor]:
    """The masks of an optimizer once some are replaced, or taken away by None; refuses those that fit no parameter."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p, mask in new.items():
        if id(p) not in known:
            raise ValueError(f"a mask of shape {tuple(p.shape)} is for a parameter that is not in this optimizer.")
        shape = local_shard(p).shape
        if mask is not None and (mask.dtype is not torch.bool or mask.shape != shape):
            raise ValueError(
                f"a mask must be a boolean tensor shaped like its weight {tuple(shape)}, got {mask.dtype} of shape "
                f"{tuple(mask.shape)}."
            )
    return {p: mask for p, mask in {**masks, **new}.items() if mask is not None}
