"""The optimizers that a table compares, made alike for language and vision."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horst import fields
from horst.fields import option
from horst.lab.baselines.balanced_product import PILoT, SignIn
from horst.lab.baselines.bregman import LinBreg, sparse_start
from horst.lab.baselines.deep_factors import DeepFactors
from horst.lab.baselines.lmd import LMD
from horst.lab.baselines.madam import Madam
from horst.lab.baselines.pat import make_pat
from horst.lab.baselines.penalize_l1 import penalize_l1
from horst.lab.baselines.scion import Scion
from horst.lab.baselines.together import Together
from horst.operators import Adam, HyperbolicEntropy, Mirror
from horst.optimizers.adams import AdamS
from horst.optimizers.ham import HAM
from horst.optimizers.horst import HORST
from horst.optimizers.l1 import soft_threshold
from horst.optimizers.operator_optimizer import OperatorOptimizer
from horst.optimizers.param_groups import MirrorOn, ParamGroups, param_groups
from horst.optimizers.with_mirror_step import with_mirror_step
from horst.parameters.kinds import parameter_kinds
from horst.sparsity import CAST, Sparsifier, find_layers

Name = Literal[
    "adamw", "ham", "horst", "hyperbolic", "muon", "horst-muon", "adamw-penalty", "adamw-l1", "horst-l1",
    "muon-l1", "muon-l1-horst", "horst-muon-l1", "spred", "dwf", "pilot", "sign-in", "madam", "lmd", "linbreg",
    "adabreg", "scion", "cast", "pat",
]  # fmt: skip
Decay = Literal["matrices", "all"]
Alpha = float | Literal["auto"]
Groups = list[dict[str, Any]]
_WITH_HORST: tuple[Name, ...] = ("horst", "horst-l1", "horst-muon", "horst-muon-l1", "muon-l1-horst")
_L1_IN_BLOCKS: tuple[Name, ...] = ("horst-l1", "muon-l1", "muon-l1-horst", "horst-muon-l1")


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
        alpha: Strength of HORST's mirror step, and of the hyperbolic map; ``auto`` is HORST's own rule. With
            muon-l1-horst it is for the tensors outside the blocks.
        beta: Decay inside HORST's mirror step.
        max_step: Bound that HORST's learning rate is clipped to. None leaves it to ``alpha="auto"``. With an
            ``alpha`` of 0 the contender is AdamW with that bound.
        ham_alpha: Strength of HAM's mirror step; its public default is 200.
        ham_beta: Decay inside HAM's mirror step; its public default is 1e-3.
        norm_lr_ratio, embedding_lr_ratio: Learning rate of norm layers, and of embeddings and positions, over ``lr``,
            for AdamW. Their decay per step stays that of the others. The mirror step makes the step of a weight of
            size w about ``1 + alpha * w`` times as large; this makes it larger whatever the weight.
        muon_lr_ratio: Muon's learning rate for the matrices in the blocks over ``lr``, at which Adam steps the rest.
            Its updates are scaled to the size of AdamW's (``match_rms_adamw``), so 1 compares like with like.
        matrix_lr: Learning rate of the matrices, for contenders whose updates have another size than Adam's; ``lr`` is
            then for the rest. None is each one's own default.
        l1: Soft threshold of the contenders with l1 in their names: a weight shrinks by ``lr * l1`` per step, and Adam
            moves it by up to ``lr``. With HORST and Muon it is for the matrices in the blocks, whatever gets the mirror
            step.
            Under Muon it is ``lr * muon_lr_ratio * l1`` for every shape of matrix, as the decay is: the factor that
            scales Muon's updates to the size of AdamW's is left out. So ``l1`` means about the same under both. For
            pat it is the threshold per unit of the learning rates so far.
        penalty: L1 penalty of adamw-penalty, added to the gradient; a small model's gradients are of the size of 1e-4.
        spred_decay: Decoupled decay of the factors of each matrix in the blocks, for spred and dwf.
        dwf_depth: Number of factors of deep weight factorisation.
        pilot_strength: First strength of PILoT's decay of both factors.
        pilot_target: Share of the first L1 norm above which PILoT's decay grows; None lets it fall all the time.
        sign_in_every: Steps from one reset of Sign-In to the next.
        madam_bound: Limit of MADAM's weights, in root mean squares of their start.
        lmd_gamma: Size of the two parts of a zero weight, for LMD.
        target_sparsity: Share of zeros in the blocks at which cast ends, and to which linbreg and adabreg go.
        bregman_density: Share of the block weights with which linbreg and adabreg start.
        bregman_l1: First threshold of the dual variables of linbreg and adabreg.
        scion_radius: Radius of Scion's ball for matrices in the blocks; that of other matrices is 60 times as large.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Decay = "matrices"
    mirror: MirrorOn = "matrices"
    no_mirror: tuple[str, ...] = ()
    alpha: Alpha = option(5.0, read_by=(*_WITH_HORST, "hyperbolic"))
    beta: float = option(0.0, read_by=_WITH_HORST)
    max_step: float | None = option(None, read_by=("horst", "horst-l1"))
    ham_alpha: float = option(200.0, read_by=("ham",))
    ham_beta: float = option(0.0, read_by=("ham",))
    norm_lr_ratio: float = option(1.0, read_by=("adamw", "adamw-l1"))
    embedding_lr_ratio: float = option(1.0, read_by=("adamw", "adamw-l1"))
    muon_lr_ratio: float = option(1.0, read_by=("muon", "muon-l1", "muon-l1-horst", "horst-muon", "horst-muon-l1"))
    matrix_lr: float | None = option(None, read_by=("madam", "lmd", "linbreg", "adabreg", "scion"))
    l1: float = option(0.1, read_by=("adamw-l1", *_L1_IN_BLOCKS, "pat"))
    penalty: float = option(1e-4, read_by=("adamw-penalty",))
    spred_decay: float = option(0.5, read_by=("spred", "dwf"))
    dwf_depth: int = option(3, read_by=("dwf",))
    pilot_strength: float = option(0.1, read_by=("pilot",))
    pilot_target: float | None = option(None, read_by=("pilot",))
    sign_in_every: int = option(50, read_by=("sign-in",))
    madam_bound: float = option(3.0, read_by=("madam",))
    lmd_gamma: float = option(0.01, read_by=("lmd",))
    target_sparsity: float = option(0.7, read_by=("linbreg", "adabreg", "cast"))
    bregman_density: float = option(0.3, read_by=("linbreg", "adabreg"))
    bregman_l1: float = option(0.01, read_by=("linbreg", "adabreg"))
    scion_radius: float = option(50.0, read_by=("scion",))

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
        """What a row of a table says of the contender: its name, its mirror step, and what else it has of its own.

        Example:
            >>> Optimization(alpha="auto", l1=0.03).about("horst-l1")
            {'optimizer': 'horst-l1', 'alpha': 'auto', 'beta': 0.0, 'l1': 0.03}
        """
        alpha, beta = self.strength(name)
        read = self.settings(name)
        own = {"l1": self.l1} if "l1" in read else {}
        for bound, unset in (("norm_lr_ratio", 1.0), ("embedding_lr_ratio", 1.0), ("max_step", None)):
            if read.get(bound, unset) != unset:
                own[bound] = read[bound]
        return {"optimizer": name, "alpha": alpha, "beta": beta, **own}

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
        l1 = {"adamw-penalty": self.penalty, "adamw-l1": self.l1}.get(name)  # in place of a mirror step
        marked = l1 is not None or name in _OWN_STEPS
        in_blocks = name in _IN_BLOCKS
        groups = param_groups(
            model,
            weight_decay=self.weight_decay,
            alpha=1.0 if marked else alpha,
            beta=beta,
            mirror="blocks" if in_blocks else self.mirror,
            no_mirror=() if in_blocks else self.no_mirror,
            l1=self.l1 if name in _L1_IN_BLOCKS else 0.0,
        )
        for group in groups:
            if self.decay == "all":
                group["weight_decay"] = self.weight_decay
            if (max_step := self.settings(name).get("max_step")) is not None:
                group["max_step"] = max_step
            if l1 is not None and group.pop("alpha"):  # which only said where
                group["l1"] = l1
        return groups

    def make(self, model: nn.Module, name: Name, *, steps: int | None = None) -> Optimizer:
        """The contender for a model's parameters.

        Some begin with weights of their own: dwf draws factors, linbreg and adabreg keep a random share of the weights.

        Args:
            model: Model whose parameters are trained.
            name: Contender.
            steps: Number of training steps, which cast needs.

        Example:
            >>> optimizer = Optimization(lr=2e-3).make(nn.Linear(3, 3), "horst")
            >>> type(optimizer).__name__, optimizer.param_groups[0]["alpha"]
            ('HORST', 5.0)
        """
        groups = self.groups(model, name)  # refuses an unknown name
        if name == "cast":
            if steps is None:
                raise ValueError("cast draws weights to zero until the last step: give make(..., steps=...).")
            return AdamS(_with_decay(groups), **self.adam, steps=steps)
        with warnings.catch_warnings():  # a study tries learning rates that auto clips on purpose
            warnings.filterwarnings("ignore", message="lr=.* is more than")
            if name in _OWN_STEPS:
                marked = [group for group in groups if group["alpha"]]
                rest = [group for group in groups if not group["alpha"]]
                return Together(_OWN_STEPS[name](self, marked), _adamw(self, model, _with_decay(rest)))
            return _MAKERS[name](self, model, groups)

    def masks(
        self, model: nn.Module, optimizer: Optimizer, name: Name, *, sparsity: float | None = None, **layers: Any
    ) -> Sparsifier | None:
        """The masks that belong to a contender: CAST's for cast, None for others. Close them after the training.

        Args:
            model: Model that is trained.
            optimizer: Optimizer that :meth:`make` returned.
            name: Contender.
            sparsity: Share of zeros; None is ``target_sparsity``.
            layers: Choice of the masked layers, see :mod:`horst.sparsity.layers`.
        """
        sparsity = self.target_sparsity if sparsity is None else sparsity
        return CAST(model, optimizer, sparsity=sparsity, **layers) if name == "cast" else None

    @property
    def adam(self) -> dict[str, Any]:
        """Options of Adam."""
        return {"lr": self.lr, "betas": self.betas, "eps": self.eps}


def _adamw(
    given: Optimization, model: nn.Module, groups: Groups, hook: Callable[[Optimizer], Any] | None = None
) -> Optimizer:
    adamw = torch.optim.AdamW(groups, **given.adam, fused=next(model.parameters()).is_cuda or None)
    if hook is not None:
        hook(adamw)
    return adamw


def _own_lrs(given: Optimization, model: nn.Module, groups: Groups) -> Groups:
    """The groups with the learning rates of their own that norm layers, embeddings and positions may have."""
    kinds = parameter_kinds(model)
    ratios = {"norm": given.norm_lr_ratio, "embedding": given.embedding_lr_ratio, "position": given.embedding_lr_ratio}
    for kind, ratio in ratios.items():
        if ratio != 1:
            own, rest = _divide(groups, [p for name, p in model.named_parameters() if kinds[name] == kind])
            rates = [{"lr": ratio * given.lr, "weight_decay": g["weight_decay"] / ratio} for g in own]
            groups = [*({**g, **rate} for g, rate in zip(own, rates, strict=True)), *rest]
    return groups


def _hyperbolic(given: Optimization, model: nn.Module, groups: Groups) -> Optimizer:
    if isinstance(given.alpha, str):
        raise ValueError(f"the hyperbolic contender needs alpha as a number, got {given.alpha!r}.")
    mirrored, rest = ([group for group in groups if bool(group["alpha"]) is wanted] for wanted in (True, False))
    operator = Mirror(HyperbolicEntropy(1 / given.alpha)) @ (_adam(given) * given.alpha)
    mirror = OperatorOptimizer(mirrored, operator, given.lr, exact_mirror=True)
    return Together(mirror, *([torch.optim.AdamW(rest, **given.adam)] if rest else []))


def _muon(
    given: Optimization, model: nn.Module, groups: Groups, *, mirror: bool = False, horst: bool = False
) -> Optimizer:
    """Muon for the matrices in the blocks, AdamW or HORST for the rest.

    Groups with an ``l1`` shrink after the mirror step, which would take an earlier shrinking for part of Muon's step.

    Args:
        given: Settings.
        model: Model that is trained.
        groups: The contender's parameter groups.
        mirror: Whether a mirror step follows Muon's step.
        horst: Whether HORST steps the rest.
    """
    matrices, rest = _divide(groups, [layer.param for layer in find_layers(model, "blocks")])
    muon: Optimizer = torch.optim.Muon(matrices, lr=given.lr * given.muon_lr_ratio, adjust_lr_fn="match_rms_adamw")
    if mirror:
        muon = with_mirror_step(muon, alpha=given.alpha, beta=given.beta)
    soft_threshold(muon)
    return Together(muon, (HORST if horst else torch.optim.AdamW)(rest, **given.adam))


def _scion(given: Optimization, model: nn.Module, groups: Groups) -> Optimizer:
    """The spectral norm in the blocks, the largest entry for other matrices, AdamW for what is no matrix."""
    blocks, rest = _divide(groups, [layer.param for layer in find_layers(model, "blocks")])
    others, rest = _divide(rest, [p for group in rest for p in group["params"] if p.dim() == 2])
    own = [{**group, "radius": given.scion_radius} for group in _plain(blocks)]
    own += [{**group, "radius": 60 * given.scion_radius, "sign": True} for group in _plain(others)]
    return Together(Scion(own, _lr(given, 2.0**-10)), _adamw(given, model, _with_decay(rest)))


def _pat(given: Optimization, model: nn.Module, groups: Groups) -> Optimizer:
    blocks, rest = _divide(_with_decay(groups), [layer.param for layer in find_layers(model, "blocks")])
    return make_pat([*({**group, "reg_lambda": given.l1} for group in blocks), *rest], **given.adam)


def _factors(given: Optimization, groups: Groups, *, depth: int = 2, draw: bool = False) -> Optimizer:
    factors = DeepFactors(_plain(groups), given.lr, given.spred_decay, _adam(given), depth=depth)
    if draw:
        factors.draw()
    return factors


def _pilot(given: Optimization, groups: Groups) -> Optimizer:
    strength, target = given.pilot_strength, given.pilot_target
    return PILoT(_plain(groups), given.lr, _adam(given), strength=strength, target=target)


def _bregman(given: Optimization, groups: Groups, *, adam: bool) -> Optimizer:
    sparse_start([p for group in groups for p in group["params"]], given.bregman_density)
    options: dict[str, Any] = {"l1": given.bregman_l1, "sparsity": given.target_sparsity}
    operator, default = (_adam(given), given.lr) if adam else (None, 0.3)
    return LinBreg(_plain(groups), _lr(given, default), operator, **options)


def _adam(given: Optimization) -> Adam:
    return Adam(given.betas, given.eps)


def _lr(given: Optimization, default: float) -> float:
    return default if given.matrix_lr is None else given.matrix_lr


def _plain(groups: Groups) -> Groups:
    """The groups without options: for steps that do not decay the weights."""
    return [{"params": group["params"]} for group in groups]


def _with_decay(groups: Groups) -> Groups:
    return [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]


def _divide(groups: Groups, chosen: Iterable[Tensor]) -> tuple[Groups, Groups]:
    """The groups with the chosen parameters alone, and with all others."""
    ids = {id(p) for p in chosen}
    parts: tuple[Groups, Groups] = ([], [])
    for group in groups:
        for part, wanted in zip(parts, (True, False), strict=True):
            if params := [p for p in group["params"] if (id(p) in ids) is wanted]:
                part.append({**group, "params": params})
    return parts


#: Steps that a contender has for the matrices, or those in the blocks; AdamW steps the rest.
_OWN_STEPS: dict[Name, Callable[[Optimization, Groups], Optimizer]] = {
    "spred": _factors,
    "dwf": lambda given, groups: _factors(given, groups, depth=given.dwf_depth, draw=True),
    "pilot": _pilot,
    "sign-in": lambda given, groups: SignIn(
        _with_decay(groups), given.lr, operator=_adam(given), every=given.sign_in_every
    ),
    "madam": lambda given, groups: Madam(_plain(groups), _lr(given, 0.01), bound=given.madam_bound),
    "lmd": lambda given, groups: LMD(_with_decay(groups), _lr(given, 0.02), gamma=given.lmd_gamma),
    "linbreg": partial(_bregman, adam=False),
    "adabreg": partial(_bregman, adam=True),
}
#: Those of them for the matrices in the blocks, which are what gets pruned, whatever ``mirror`` says.
_IN_BLOCKS = frozenset({"spred", "dwf", "pilot", "sign-in", "linbreg", "adabreg"})

_MAKERS: dict[Name, Callable[[Optimization, nn.Module, Groups], Optimizer]] = {
    "adamw": lambda given, model, groups: _adamw(given, model, _own_lrs(given, model, groups)),
    "adamw-penalty": partial(_adamw, hook=penalize_l1),
    "adamw-l1": lambda given, model, groups: _adamw(given, model, _own_lrs(given, model, groups), soft_threshold),
    "ham": lambda given, model, groups: HAM(groups, **given.adam),
    "horst": lambda given, model, groups: HORST(groups, **given.adam),
    "horst-l1": lambda given, model, groups: HORST(groups, **given.adam),
    "hyperbolic": _hyperbolic,
    "muon": _muon,
    "muon-l1": _muon,
    "muon-l1-horst": partial(_muon, horst=True),
    "horst-muon": partial(_muon, mirror=True, horst=True),
    "horst-muon-l1": partial(_muon, mirror=True, horst=True),
    "scion": _scion,
    "pat": _pat,
}
