"""PAT, the pruning-aware training of torchao, as an optional contender.

It is a prototype of another package: here it is only called. Its threshold grows with the sum of the learning rates and
is kept in the groups, which the checkpoints of :mod:`horst.training` do not hold: let a run go through at once.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.optim import Optimizer


def make_pat(groups: list[dict[str, Any]], *, warmup_steps: int = 0, **adamw: Any) -> Optimizer:
    """AdamW with torchao's proximal map of an L1 norm on the groups that have ``reg_lambda``.

    Args:
        groups: Parameter groups.
        warmup_steps: Number of first steps without the proximal map.
        adamw: Options of AdamW.

    Raises:
        ModuleNotFoundError: torchao, or its prototype, is not installed.
    """
    try:
        pat = importlib.import_module("torchao.prototype.pat.optim")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("torchao"):
            raise  # torchao is there, but something it needs is not
        raise ModuleNotFoundError(
            "the contender 'pat' needs the package torchao with torchao.prototype.pat, which is not installed. Run "
            "pip install torchao, or leave 'pat' out.",
            name=error.name,
        ) from error
    kinds = {"prox_type": "ProxLasso", "group_type": "ElemGrouper"}
    base = torch.optim.AdamW([{**kinds, **group} if "reg_lambda" in group else group for group in groups], **adamw)
    optimizer: Optimizer = pat.PruneOptimizer(base, warmup_steps=warmup_steps)
    return optimizer
