"""HORST: train transformers that survive pruning."""

from horst import operators, sparsity
from horst.optimizers.compose import compose
from horst.optimizers.composed import Composed
from horst.optimizers.ham import HAM
from horst.optimizers.horst import HORST
from horst.optimizers.param_groups import param_groups

__version__ = "0.1.0"

__all__ = ["HAM", "HORST", "Composed", "compose", "operators", "param_groups", "sparsity"]
