"""HORST: train transformers that survive pruning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horst import export, operators, pruning, sparsity
    from horst.optimizers.adams import AdamS
    from horst.optimizers.ham import HAM
    from horst.optimizers.horst import HORST
    from horst.optimizers.l1 import soft_threshold
    from horst.optimizers.operator_optimizer import OperatorOptimizer
    from horst.optimizers.param_groups import param_groups
    from horst.optimizers.with_mirror_step import with_mirror_step
    from horst.recovery.sparsify import sparsify

__version__ = "0.1.0"

__all__ = [
    "HAM",
    "HORST",
    "AdamS",
    "OperatorOptimizer",
    "export",
    "operators",
    "param_groups",
    "pruning",
    "soft_threshold",
    "sparsify",
    "sparsity",
    "with_mirror_step",
]

# Where each name lives. They are loaded on use, so that `horst --help` does not wait for torch.
_HOMES = {
    "AdamS": "horst.optimizers.adams",
    "HAM": "horst.optimizers.ham",
    "HORST": "horst.optimizers.horst",
    "OperatorOptimizer": "horst.optimizers.operator_optimizer",
    "param_groups": "horst.optimizers.param_groups",
    "soft_threshold": "horst.optimizers.l1",
    "sparsify": "horst.recovery.sparsify",
    "with_mirror_step": "horst.optimizers.with_mirror_step",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'horst' has no attribute {name!r}")
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        value = importlib.import_module(f"horst.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
