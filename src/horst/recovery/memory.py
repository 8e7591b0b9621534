"""How much memory a GPU needs for recovery: plain arithmetic, from the number of parameters.

What is counted is what stays in memory from step to step, and what FSDP2 gathers for a moment. Activations depend on
the batch: with ``gradient_checkpointing`` they are the inputs of each block and one block's own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from horst.recovery.config import OptimizerName, Parallel

__all__ = ["Memory", "memory_per_gpu"]

TeacherDtype = Literal["bfloat16", "float32"]
_BYTES = {"bfloat16": 2, "float32": 4}
_MASK_COPIES = {"horst": 2, "adamw": 1, "adams": 2}  # HORST and AdamS hold masks of their own beside the sparsifier's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each GPU.

    Args:
        weights: Weights that are trained, in float32; with adapters, the frozen ones and the adapters.
        gradients: Gradients, in float32.
        optimizer: Adam's two averages, in float32; HORST keeps the same.
        masks: Masks, one byte per weight: one copy, with HORST two.
        teacher: The dense teacher.
        gathered: Weights of the largest parts that FSDP2 puts together at once, of model and teacher, with the
            gradients before they are divided again.
    """

    weights: int
    gradients: int
    optimizer: int
    masks: int
    teacher: int
    gathered: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        parts = {**dataclasses.asdict(self), "total": self.total}
        return ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in parts.items())


def memory_per_gpu(
    parameters: int,
    *,
    gpus: int = 1,
    masked: int | None = None,
    parallel: Parallel = "fsdp",
    optimizer: OptimizerName = "horst",
    teacher: int | None = None,
    teacher_dtype: TeacherDtype = "bfloat16",
    largest_part: int = 0,
    adapters: int = 0,
) -> Memory:
    """Bytes that each GPU needs for weights, gradients, optimizer, masks and teacher, without activations.

    Under FSDP2 every tensor is cut into ``gpus`` parts; under DDP every GPU holds all. Weights are trained in float32;
    ``bf16`` computes in bfloat16 and does not change what is kept. The step counters, four bytes per tensor, are left
    out.

    Args:
        parameters: Number of parameters of the model, tied ones once.
        gpus: Number of GPUs.
        masked: Number of weights in the pruned layers; None is all parameters, an upper bound.
        parallel: ``"fsdp"`` or ``"ddp"``.
        optimizer: Optimizer.
        teacher: Number of parameters of the teacher; None is as many as the model's, 0 is no teacher.
        teacher_dtype: Dtype of the teacher: bfloat16 on a GPU.
        largest_part: Parameters of the largest part that FSDP2 gathers at once: a block, or all that is in none
            (embeddings and head).
        adapters: Parameters of LoRA adapters that are trained in place of the weights; 0 trains the weights.

    Example:
        >>> print(memory_per_gpu(7_000_000_000, gpus=8))
        weights 3.5 GB, gradients 3.5 GB, optimizer 7.0 GB, masks 1.8 GB, teacher 1.8 GB, gathered 0.0 GB, total 17.5 GB
    """
    sizes = {"parameters": parameters, "gpus": gpus}
    extra = {"masked": masked, "teacher": teacher, "largest_part": largest_part, "adapters": adapters}
    for name, value in (*sizes.items(), *((n, v) for n, v in extra.items() if v is not None)):
        if value < (1 if name in sizes else 0):
            raise ValueError(f"{name} must be at least {1 if name in sizes else 0}, got {value}.")
    choices = (("parallel", parallel, Parallel), ("optimizer", optimizer, OptimizerName))
    for name, given, kind in (*choices, ("teacher_dtype", teacher_dtype, TeacherDtype)):
        if given not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(kind)))}, got {given!r}.")
    if adapters and parallel == "fsdp" and gpus > 1:
        raise ValueError("adapters are trained with parallel='ddp': see lora in SparsifyConfig.")
    masked = parameters if masked is None else masked
    teacher = parameters if teacher is None else teacher
    parts = gpus if parallel == "fsdp" else 1
    trained = adapters or parameters
    wide, narrow = 4, _BYTES[teacher_dtype]
    copies = 1 if adapters else _MASK_COPIES[optimizer]  # an adapter holds its mask, and the optimizer none
    return Memory(
        weights=_share(wide * (parameters + adapters), parts),
        gradients=_share(wide * trained, parts),
        optimizer=_share(2 * wide * trained, parts),
        masks=_share(copies * masked, parts),
        teacher=_share(narrow * teacher, parts),
        gathered=(2 * wide + (narrow if teacher else 0)) * largest_part if parts > 1 else 0,
    )


def _share(size: int, parts: int) -> int:
    return math.ceil(size / parts)
