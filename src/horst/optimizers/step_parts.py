"""What one call of the step takes: local shards, tensors that are stepped alike, a learning rate within bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from horst.kernels.horst_step import StepTensors
from horst.parameters.sharding import local_shard

__all__ = ["Parts", "at_most", "local_shards", "split", "with_new_masks"]

Parts = dict[tuple[bool, bool], tuple[StepTensors, list[Tensor] | None]]


def at_most(lr: float | Tensor, max_step: float | None) -> float | Tensor:
    """The learning rate, or the bound if that is less. A tensor stays on its device, and the host does not wait.

    Example:
        >>> at_most(0.01, 0.002), at_most(0.001, 0.002), at_most(0.01, None)
        (0.002, 0.001, 0.01)
    """
    if max_step is None:
        return lr
    return lr.clamp(max=max_step) if isinstance(lr, Tensor) else min(lr, max_step)


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


def split(tensors: StepTensors, mirrored: list[bool], masks: list[Tensor | None]) -> Parts:
    """The tensors and their masks by (gets the mirror step, has a mask): one call per part."""
    parts: Parts = {}
    for row, on, mask in zip(zip(*tensors, strict=True), mirrored, masks, strict=True):
        if (on, mask is not None) not in parts:
            parts[on, mask is not None] = (StepTensors([], [], [], [], []), None if mask is None else [])
        part, part_masks = parts[on, mask is not None]
        for column, tensor in zip(part, row, strict=True):
            column.append(tensor)
        if mask is not None and part_masks is not None:
            part_masks.append(mask)
    return parts


def local_shards(tensors: StepTensors) -> StepTensors:
    """DTensors replaced by this rank's shards. The step is elementwise, so each rank updates what it holds."""
    if set(map(type, tensors.params)) <= {torch.nn.Parameter}:
        return tensors
    params, *others, steps = tensors
    placed = [[_placed_like(p, t) for p, t in zip(params, column, strict=True)] for column in others]
    return StepTensors(*([local_shard(t) for t in column] for column in (params, *placed, steps)))


def _placed_like(param: Any, tensor: Any) -> Tensor:
    """``tensor`` with the placement of its parameter: tensor parallelism may leave a gradient partial."""
    if not hasattr(param, "device_mesh"):
        return tensor
    return tensor.redistribute(param.device_mesh, param.placements)
