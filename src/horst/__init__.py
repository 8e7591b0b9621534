"""HORST: train transformers that survive pruning."""

from horst.optimizers.ham import HAM
from horst.optimizers.horst import HORST

__version__ = "0.1.0"

__all__ = ["HAM", "HORST"]
