"""The tensors of one call of the step: local shards, and those that are stepped alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horst.kernels.horst_step import StepTensors
from horst.parameters.sharding import local_shard

__all__ = ["Parts", "local_shards", "split"]

Parts = dict[tuple[bool, bool], tuple[StepTensors, list[Tensor] | None]]


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
