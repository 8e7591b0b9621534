"""Recovery: an existing model made sparse, trained with its zeros kept, with its dense self as teacher."""

from horst.recovery.check import NotSparse, check_sparse
from horst.recovery.config import SparsifyConfig
from horst.recovery.distillation import cross_entropy, kl_divergence, mixed_loss, squarehead
from horst.recovery.memory import Memory, memory_per_gpu
from horst.recovery.report import SparsifyReport, Stage
from horst.recovery.sparsify import sparsify
from horst.recovery.whole import gathered

__all__ = [
    "Memory",
    "NotSparse",
    "SparsifyConfig",
    "SparsifyReport",
    "Stage",
    "check_sparse",
    "cross_entropy",
    "gathered",
    "kl_divergence",
    "memory_per_gpu",
    "mixed_loss",
    "sparsify",
    "squarehead",
]
