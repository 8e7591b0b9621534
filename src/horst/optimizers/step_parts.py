"""What one call of the step takes: this rank's shards, parts that are stepped alike, a learning rate within bounds."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from horst.kernels.horst_step import StepTensors

__all__ = ["Parts", "at_most", "local_shards", "own_parts", "split"]

Parts = dict[tuple[bool, bool], tuple[StepTensors, list[Tensor] | None]]


def at_most(lr: float | Tensor, max_step: float | None) -> float | Tensor:
    """The learning rate, or the bound on it where that is less. A tensor stays on its device, and nobody waits for it.

    Example:
        >>> at_most(0.01, 0.002), at_most(0.001, 0.002), at_most(0.01, None)
        (0.002, 0.001, 0.01)
    """
    if max_step is None:
        return lr
    return lr.clamp(max=max_step) if isinstance(lr, Tensor) else min(lr, max_step)


def split(tensors: StepTensors, mirrored: list[bool], masks: list[Tensor | None]) -> Parts:
    """The tensors and their masks by (gets the mirror step, has a mask): each part is one call."""
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
    """DTensors replaced by this rank's shard. The step is elementwise, so each rank updates what it holds."""
    if not torch.distributed.is_available():
        return tensors
    from torch.distributed.tensor import DTensor

    local = StepTensors([], [], [], [], [])
    for p, g, m, v, step in zip(*tensors, strict=True):
        row = [p, g, m, v, step]
        if isinstance(p, DTensor):
            # a gradient may be partial or sharded otherwise (tensor parallelism); the state follows its parameter
            row[1:4] = [cast(DTensor, t).redistribute(p.device_mesh, p.placements) for t in (g, m, v)]
            row = [t.to_local() if isinstance(t, DTensor) else t for t in row]
        for column, tensor in zip(local, row, strict=True):
            column.append(tensor)
    return local


def own_parts(params: list[Tensor]) -> list[Tensor]:
    """This rank's shards of DTensors, other tensors as they are: for steps that look at the weights alone."""
    if set(map(type, params)) <= {torch.nn.Parameter}:
        return params
    return [p.to_local() if hasattr(type(p), "to_local") else p for p in params]  # type: ignore[attr-defined]
