"""The optimizers that a table compares, made alike for language and vision."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from horst import fields
from horst.fields import option
from horst.lab.baselines.penalize_l1 import penalize_l1
from horst.lab.baselines.spred import factorize
from horst.lab.baselines.together import Together
from horst.operators import Adam, HyperbolicEntropy, Mirror
from horst.optimizers.ham import HAM
from horst.optimizers.horst import HORST
from horst.optimizers.l1 import soft_threshold
from horst.optimizers.operator_optimizer import OperatorOptimizer
from horst.optimizers.param_groups import MirrorOn, ParamGroups, param_groups
from horst.optimizers.with_mirror_step import with_mirror_step
from horst.sparsity import find_layers

Name = Literal[
    "adamw", "ham", "horst", "hyperbolic", "muon", "horst-muon", "adamw-penalty", "adamw-l1", "horst-l1", "spred",
]  # fmt: skip
Decay = Literal["matrices", "all"]
Alpha = float | Literal["auto"]
Groups = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the weights are updated: settings shared by all optimizers of a table, plus each one's own.

    Args:
        lr: Peak learning rate.
        betas: Decay rates of Adam's two averages.
        eps: Number added to Adam's denominator.
        weight_decay: Decoupled weight decay.
        decay: Tensors that decay: matrices but not embeddings and positions, or all.
        mirror: Tensors that get the mirror step, or the ``penalty`` and ``l1`` of AdamW. The paper does not state it.
        no_mirror: Kinds of tensors, or patterns of names, that get none after all, such as ``embedding``.
        alpha: Strength of HORST's mirror step, and of the hyperbolic map; ``auto`` is HORST's own rule.
        beta: Decay inside HORST's mirror step.
        ham_alpha: Strength of HAM's mirror step; its public default is 200.
        ham_beta: Decay inside HAM's mirror step; its public default is 1e-3.
        muon_lr_ratio: Muon's learning rate for the matrices in the blocks over ``lr``, at which Adam steps the rest.
            Its updates are scaled to the size of AdamW's (``match_rms_adamw``), so 1 compares like with like.
        l1: Soft threshold of adamw-l1 and horst-l1: a weight shrinks by ``lr * l1`` per step, and Adam moves it by up
            to ``lr``. With HORST it is for the matrices in the blocks, whatever gets the mirror step.
        penalty: L1 penalty of adamw-penalty, added to the gradient; a small model's gradients are of the size of 1e-4.
        spred_decay: Decoupled decay of both factors of each matrix in the blocks, for spred.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Decay = "matrices"
    mirror: MirrorOn = "matrices"
    no_mirror: tuple[str, ...] = ()
    alpha: Alpha = option(5.0, read_by=("horst", "horst-muon", "horst-l1", "hyperbolic"))
    beta: float = option(0.0, read_by=("horst", "horst-muon", "horst-l1"))
    ham_alpha: float = option(200.0, read_by=("ham",))
    ham_beta: float = option(0.0, read_by=("ham",))
    muon_lr_ratio: float = option(1.0, read_by=("muon", "horst-muon"))
    l1: float = option(0.1, read_by=("adamw-l1", "horst-l1"))
    penalty: float = option(1e-4, read_by=("adamw-penalty",))
    spred_decay: float = option(0.5, read_by=("spred",))

    def settings(self, name: Name) -> dict[str, Any]:
        """The fields that a contender reads.

        Example:
            >>> Optimization(alpha=20.0).settings("adamw") == Optimization(alpha=5.0).settings("adamw")
            True
        """
        if name not in get_args(Name):
            raise ValueError(f"optimizers must be among {', '.join(get_args(Name))}, got {name!r}.")
        return fields.settings(self, reader=name)

    def strength(self, name: Name) -> tuple[Alpha, float]:
        """Alpha and beta of a contender's mirror step; 0 for contenders without one."""
        read = self.settings(name)
        prefix = "ham_" if name == "ham" else ""
        return read.get(f"{prefix}alpha", 0.0), read.get(f"{prefix}beta", 0.0)

    def about(self, name: Name) -> dict[str, Any]:
        """What a row of a table says of the contender: its name, its mirror step, its ``l1`` if it has one.

        Example:
            >>> Optimization(alpha="auto", l1=0.03).about("horst-l1")
            {'optimizer': 'horst-l1', 'alpha': 'auto', 'beta': 0.0, 'l1': 0.03}
        """
        alpha, beta = self.strength(name)
        l1 = {"l1": self.l1} if "l1" in self.settings(name) else {}
        return {"optimizer": name, "alpha": alpha, "beta": beta, **l1}

    def label(self, name: Name) -> str:
        """The contender's strength for the name of a folder.

        Example:
            >>> Optimization().label("horst"), Optimization(alpha="auto", beta=0.01).label("horst")
            ('alpha5', 'alphaauto-beta0.01')
        """
        alpha, beta = self.strength(name)
        label = f"alpha{alpha}" if isinstance(alpha, str) else f"alpha{alpha:g}"
        return f"{label}-beta{beta:g}" if beta else label

    def groups(self, model: nn.Module, name: Name) -> ParamGroups:
        """The contender's parameter groups."""
        alpha, beta = self.strength(name)
        # those without a mirror step that have something else in its place
        own = {
            "adamw-penalty": ("l1", self.penalty),
            "adamw-l1": ("l1", self.l1),
            "spred": ("weight_decay", self.spred_decay),
        }.get(name)
        factors = name == "spred"  # they lie in the blocks
        groups = param_groups(
            model,
            weight_decay=self.weight_decay,
            alpha=1.0 if own else alpha,
            beta=beta,
            mirror="blocks" if factors else self.mirror,
            no_mirror=() if factors else self.no_mirror,
            l1=self.l1 if name == "horst-l1" else 0.0,
        )
        for group in groups:
            if self.decay == "all":
                group["weight_decay"] = self.weight_decay
            if own and group.pop("alpha"):  # which only said where
                group[own[0]] = own[1]
        return groups

    def make(self, model: nn.Module, name: Name) -> Optimizer:
        """The contender for a model's parameters.

        spred changes the model: its matrices become products of factors until
        :func:`horst.lab.baselines.spred.merge_factors`.

        Example:
            >>> optimizer = Optimization(lr=2e-3).make(nn.Linear(3, 3), "horst")
            >>> type(optimizer).__name__, optimizer.param_groups[0]["alpha"]
            ('HORST', 5.0)
        """
        if name == "spred":
            factorize(model, [layer.param for layer in find_layers(model, "blocks")])
        groups = self.groups(model, name)  # refuses an unknown name
        with warnings.catch_warnings():  # a study tries learning rates that auto clips on purpose
            warnings.filterwarnings("ignore", message="lr=.* is more than")
            return _MAKERS[name](self, model, groups)

    @property
    def adam(self) -> dict[str, Any]:
        """Options of Adam."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def _adamw(
    given: Optimization, model: nn.Module, groups: ParamGroups, hook: Callable[[Optimizer], Any] | None = None
) -> Optimizer:
    adamw = torch.optim.AdamW(groups, **given.adam, fused=next(model.parameters()).is_cuda or None)
    if hook is not None:
        hook(adamw)
    return adamw


def _hyperbolic(given: Optimization, model: nn.Module, groups: ParamGroups) -> Optimizer:
    if isinstance(given.alpha, str):
        raise ValueError(f"the hyperbolic contender needs alpha as a number, got {given.alpha!r}.")
    mirrored, rest = ([group for group in groups if bool(group["alpha"]) is wanted] for wanted in (True, False))
    operator = Mirror(HyperbolicEntropy(1 / given.alpha)) @ (Adam(given.betas, given.eps) * given.alpha)
    mirror = OperatorOptimizer(mirrored, operator, given.lr, exact_mirror=True)
    return Together(mirror, *([torch.optim.AdamW(rest, **given.adam)] if rest else []))


def _muon(given: Optimization, model: nn.Module, groups: ParamGroups, *, mirror: bool = False) -> Optimizer:
    """Muon for the matrices in the blocks and AdamW for the rest, each with the mirror step if wanted."""
    inside = {id(layer.param) for layer in find_layers(model, "blocks")}
    matrices: Groups = []
    rest: Groups = []
    for group in groups:
        for part, wanted in ((matrices, True), (rest, False)):
            if params := [p for p in group["params"] if (id(p) in inside) is wanted]:
                part.append({**group, "params": params})
    muon = torch.optim.Muon(matrices, lr=given.lr * given.muon_lr_ratio, adjust_lr_fn="match_rms_adamw")
    if mirror:
        return Together(with_mirror_step(muon, alpha=given.alpha, beta=given.beta), HORST(rest, **given.adam))
    return Together(muon, torch.optim.AdamW(rest, **given.adam))


_MAKERS: dict[Name, Callable[[Optimization, nn.Module, ParamGroups], Optimizer]] = {
    "adamw": _adamw,
    "adamw-penalty": partial(_adamw, hook=penalize_l1),
    "adamw-l1": partial(_adamw, hook=soft_threshold),
    "spred": _adamw,
    "ham": lambda given, model, groups: HAM(groups, **given.adam),
    "horst": lambda given, model, groups: HORST(groups, **given.adam),
    "horst-l1": lambda given, model, groups: HORST(groups, **given.adam),
    "hyperbolic": _hyperbolic,
    "muon": _muon,
    "horst-muon": partial(_muon, mirror=True),
}
