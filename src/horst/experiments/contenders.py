"""The optimizers that a table compares, made alike for language and vision."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from horst.optimizers.ham import HAM
from horst.optimizers.horst import HORST
from horst.optimizers.param_groups import Mirror, ParamGroups, param_groups

Name = Literal["adamw", "ham", "horst"]
Decay = Literal["matrices", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the weights are updated; every contender of a table has the same of these but for the mirror step.

    Args:
        lr: Peak learning rate.
        betas, eps, weight_decay: Adam's.
        decay: What decays: matrices but not embeddings and positions, or all tensors.
        mirror: Which tensors get the mirror step; the paper does not say.
        alpha, beta: HORST's.
        ham_alpha, ham_beta: HAM's; its public defaults are 200 and 1e-3, the paper reports the best of three betas.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Decay = "matrices"
    mirror: Mirror = "matrices"
    alpha: float = 5.0
    beta: float = 0.0
    ham_alpha: float = 200.0
    ham_beta: float = 0.0

    def strength(self, name: Name) -> tuple[float, float]:
        """Alpha and beta of a contender; 0 for AdamW."""
        return {"adamw": (0.0, 0.0), "ham": (self.ham_alpha, self.ham_beta), "horst": (self.alpha, self.beta)}[name]

    def groups(self, model: nn.Module, name: Name) -> ParamGroups:
        """The contender's parameter groups."""
        alpha, beta = self.strength(name)
        groups = param_groups(model, weight_decay=self.weight_decay, alpha=alpha, beta=beta, mirror=self.mirror)
        if self.decay == "all":
            for group in groups:
                group["weight_decay"] = self.weight_decay
        return groups

    def make(self, model: nn.Module, name: Name) -> Optimizer:
        """The contender for a model's parameters.

        Example:
            >>> optimizer = Optimization(lr=2e-3).make(nn.Linear(3, 3), "horst")
            >>> type(optimizer).__name__, optimizer.param_groups[0]["alpha"]
            ('HORST', 5.0)
        """
        if name not in get_args(Name):
            raise ValueError(f"optimizers must be among {', '.join(get_args(Name))}, got {name!r}.")
        groups = self.groups(model, name)
        if name == "horst":
            return HORST(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        if name == "ham":
            return HAM(groups, lr=self.lr, betas=self.betas, eps=self.eps)
        fused = next(model.parameters()).is_cuda or None
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
