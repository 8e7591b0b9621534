"""The optimizers that a table compares, made alike for language and vision."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

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

# adamw-held: AdamW whose learning rate has the bound of HORST's own rule
Name = Literal[
    "adamw", "adamw-held", "ham", "horst", "hyperbolic", "muon", "horst-muon", "adamw-l1", "adamw-proximal",
    "horst-proximal", "spred",
]  # fmt: skip
Decay = Literal["matrices", "all"]
Alpha = float | Literal["auto"]
# The fields of Optimization that make a contender what it is; all other fields are shared.
STRENGTHS: dict[Name, tuple[str, ...]] = {
    "adamw": (),
    "adamw-held": (),
    "ham": ("ham_alpha", "ham_beta"),
    "horst": ("alpha", "beta"),
    "hyperbolic": ("alpha",),
    "muon": ("muon_lr_ratio",),
    "horst-muon": ("alpha", "beta", "muon_lr_ratio"),
    "adamw-l1": ("l1",),
    "adamw-proximal": ("proximal",),
    "horst-proximal": ("alpha", "beta", "proximal"),
    "spred": ("spred_decay",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimization:
    """How the weights are updated; every contender of a table has the same of these but for what makes it one.

    Args:
        lr: Peak learning rate.
        betas, eps, weight_decay: Adam's.
        decay: What decays: matrices but not embeddings and positions, or all tensors.
        mirror: Which tensors get the mirror step (or the L1 penalty); the paper does not say.
        no_mirror: Kinds of tensors, or patterns of names, that get none after all, such as ``embedding``.
        alpha, beta: HORST's, alone and over Muon; alpha is the hyperbolic map's too. ``auto`` is HORST's own rule.
        ham_alpha, ham_beta: HAM's; its public defaults are 200 and 1e-3.
        muon_lr_ratio: Muon's learning rate for the matrices in the blocks, as a multiple of ``lr``, which the rest gets
            from Adam. Its updates are scaled to the size of AdamW's (``match_rms_adamw``), so 1 compares like with
            like.
        l1: Of adamw-l1, added to the gradient; 1e-4 is of the size of a small model's gradients.
        proximal: Of adamw-proximal and horst-proximal: a weight shrinks by ``lr`` times this a step; Adam moves it by
            up to ``lr``. With HORST it is for the matrices in the blocks, whatever gets the mirror step.
        spred_decay: Of spred: the decoupled decay of both factors of each matrix in the blocks.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Decay = "matrices"
    mirror: MirrorOn = "matrices"
    no_mirror: tuple[str, ...] = ()
    alpha: Alpha = 5.0
    beta: float = 0.0
    ham_alpha: float = 200.0
    ham_beta: float = 0.0
    muon_lr_ratio: float = 1.0
    l1: float = 1e-4
    proximal: float = 0.1
    spred_decay: float = 0.5

    def strength(self, name: Name) -> tuple[Alpha, float]:
        """Alpha and beta of a contender's mirror step; 0 for those without one."""
        mirrored: dict[str, tuple[Alpha, float]] = {
            "ham": (self.ham_alpha, self.ham_beta),
            "horst": (self.alpha, self.beta),
            "horst-muon": (self.alpha, self.beta),
            "horst-proximal": (self.alpha, self.beta),
            "hyperbolic": (self.alpha, 0.0),
        }
        return mirrored.get(name, (0.0, 0.0))

    def about(self, name: Name) -> dict[str, Any]:
        """What a row of a table says of the contender: its name, its mirror step, its threshold if it has one.

        Example:
            >>> Optimization(alpha="auto", proximal=0.03).about("horst-proximal")
            {'optimizer': 'horst-proximal', 'alpha': 'auto', 'beta': 0.0, 'threshold': 0.03}
        """
        alpha, beta = self.strength(name)
        threshold = {"threshold": self.proximal} if name.endswith("-proximal") else {}
        return {"optimizer": name, "alpha": alpha, "beta": beta, **threshold}

    def settings(self, name: Name) -> dict[str, Any]:
        """What the contender is made with: the fields without the strengths of others, which do not change it.

        Example:
            >>> Optimization(alpha=20.0).settings("adamw") == Optimization(alpha=5.0).settings("adamw")
            True
        """
        _check_name(name)
        others = {field for fields in STRENGTHS.values() for field in fields} - set(STRENGTHS[name])
        return {field: value for field, value in dataclasses.asdict(self).items() if field not in others}

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
        own = {
            "adamw-l1": ("l1", self.l1),
            "adamw-proximal": ("l1", self.proximal),
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
            l1=self.proximal if name == "horst-proximal" else 0.0,
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
        _check_name(name)
        return _MAKERS[name](self, model, name)

    def adam(self) -> dict[str, Any]:
        """What all kinds of Adam are given."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def _check_name(name: str) -> None:
    if name not in get_args(Name):
        raise ValueError(f"optimizers must be among {', '.join(get_args(Name))}, got {name!r}.")


def _adamw(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    fused = next(model.parameters()).is_cuda or None
    return torch.optim.AdamW(settings.groups(model, name), **settings.adam(), fused=fused)


def _adamw_l1(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    optimizer = _adamw(settings, model, name)
    penalize_l1(optimizer)
    return optimizer


def _adamw_proximal(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    optimizer = _adamw(settings, model, name)
    soft_threshold(optimizer)
    return optimizer


def _spred(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    factorize(model, [layer.param for layer in find_layers(model, "blocks")])
    return _adamw(settings, model, name)


def _horst(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    with _any_lr():
        return HORST(settings.groups(model, name), **settings.adam())


def _hyperbolic(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    """Adam in the geometry of the hyperbolic entropy with gamma 1 / alpha: HORST's smooth relative, in one step.

    A weight moves by about ``lr * sqrt(1 + (alpha * theta)**2)``, in HORST by about ``lr * (1 + alpha * |theta|)``.
    """
    alpha, groups = settings.alpha, settings.groups(model, name)
    if isinstance(alpha, str):
        raise ValueError(f"the hyperbolic contender needs alpha as a number, got {alpha!r}.")
    mirrored = [group for group in groups if group["alpha"]]
    rest = [group for group in groups if not group["alpha"]]
    made: list[Optimizer] = []
    if mirrored:
        operator = Mirror(HyperbolicEntropy(1 / alpha)) @ (alpha * Adam(settings.betas, settings.eps))
        made.append(OperatorOptimizer(mirrored, operator, settings.lr, exact_mirror=True))
    if rest:
        made.append(torch.optim.AdamW(rest, **settings.adam()))
    return Together(*made)


def _adamw_held(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    del name
    optimizer = _horst(dataclasses.replace(settings, alpha="auto", beta=0.0), model, "horst")
    for group in optimizer.param_groups:
        group["alpha"] = 0.0
    return optimizer


@contextlib.contextmanager
def _any_lr() -> Iterator[None]:
    """Without the warning that auto holds a large learning rate: a study tries such ones on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lr=.* is more than")
        yield


def _muon(settings: Optimization, model: nn.Module, name: Name) -> Optimizer:
    matrices, rest = _apart(settings.groups(model, name), model)
    muon: Optimizer = torch.optim.Muon(
        matrices, lr=settings.lr * settings.muon_lr_ratio, adjust_lr_fn="match_rms_adamw"
    )
    if name == "muon":
        return Together(muon, torch.optim.AdamW(rest, **settings.adam()))
    alpha, beta = settings.strength(name)
    with _any_lr():
        return Together(with_mirror_step(muon, alpha=alpha, beta=beta), HORST(rest, **settings.adam()))


def _apart(groups: ParamGroups, model: nn.Module) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups with only the matrices in the blocks, and with only the rest."""
    inside = {id(layer.param) for layer in find_layers(model, "blocks")}
    matrices: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        for found, wanted in ((matrices, True), (rest, False)):
            if params := [p for p in group["params"] if (id(p) in inside) is wanted]:
                found.append({**group, "params": params})
    return matrices, rest


_MAKERS: dict[Name, Callable[[Optimization, nn.Module, Name], Optimizer]] = {
    "adamw": _adamw,
    "adamw-held": _adamw_held,
    "ham": lambda settings, model, name: HAM(settings.groups(model, name), **settings.adam()),
    "horst": _horst,
    "hyperbolic": _hyperbolic,
    "muon": _muon,
    "horst-muon": _muon,
    "adamw-l1": _adamw_l1,
    "adamw-proximal": _adamw_proximal,
    "horst-proximal": _horst,
    "spred": _spred,
}
