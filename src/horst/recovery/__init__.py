"""Recovery: an existing model made sparse, trained with its zeros kept, with its dense self as teacher."""

from horst.recovery.config import SparsifyConfig
from horst.recovery.distillation import cross_entropy, kl_divergence, mixed_loss, squarehead

__all__ = ["SparsifyConfig", "cross_entropy", "kl_divergence", "mixed_loss", "squarehead"]
