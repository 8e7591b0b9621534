"""Which tensors get weight decay, which get the mirror step: pure functions of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from horst.optimizers.auto_alpha import Alpha
from horst.optimizers.hyperparameters import check_alpha, check_number
from horst.parameters.kinds import Kind, block_prefixes, clean_name, parameter_kinds, refuse_flat_shards

__all__ = ["ParamGroups", "ParamRow", "param_groups"]

DecayOn = Literal["matrices", "all"]
MirrorOn = Literal["matrices", "blocks", "all"]
_KINDS: tuple[str, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True)
class ParamRow:
    """One line of the table: a parameter, its kind and what it gets."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    decay: bool
    mirror: bool
    l1: bool = False


class ParamGroups(list[dict[str, Any]]):
    """Groups for an optimizer, and the table that explains them: ``print(groups.table())``."""

    def __init__(self, groups: list[dict[str, Any]], rows: list[ParamRow]) -> None:
        super().__init__(groups)
        self.rows = rows

    def table(self, every_tensor: bool = False) -> str:
        """What gets decay, the mirror step and (where anything does) ``l1``, by kind or tensor by tensor.

        Example:
            >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
            >>> print(param_groups(model, mirror="matrices").table())
            kind    decay  mirror  tensors  parameters
            matrix  yes    yes           2          48
            norm    -      -             2          16
            bias    -      -             2          10
        """
        gets = ("decay", "mirror", "l1") if any(r.l1 for r in self.rows) else ("decay", "mirror")
        marks = [tuple(_yes(getattr(r, name)) for name in gets) for r in self.rows]
        if every_tensor:
            lines = [
                (r.name, r.kind, *mark, "x".join(map(str, r.shape)) or "scalar")
                for r, mark in zip(self.rows, marks, strict=True)
            ]
            return _align([("name", "kind", *gets, "shape"), *lines])
        counts: dict[tuple[str, ...], list[int]] = {}
        for r, mark in zip(self.rows, marks, strict=True):
            entry = counts.setdefault((r.kind, *mark), [0, 0])
            entry[0] += 1
            entry[1] += math.prod(r.shape)
        order = sorted(counts.items(), key=lambda item: (_KINDS.index(item[0][0]), item[0]))
        body = [(*what, f"{n:,}", f"{total:,}") for what, (n, total) in order]
        return _align([("kind", *gets, "tensors", "parameters"), *body], right=("tensors", "parameters"))


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float = 1e-2,
    alpha: Alpha = 5.0,
    beta: float = 0.0,
    decay: DecayOn = "matrices",
    mirror: MirrorOn = "all",
    no_decay: Collection[str] = (),
    no_mirror: Collection[str] = (),
    l1: float = 0.0,
) -> ParamGroups:
    """Groups for :class:`horst.HORST` (or any optimizer in :func:`horst.with_mirror_step`) by kind of parameter.

    The kinds are those of :func:`horst.parameters.kinds.parameter_kinds`: matrix, embedding, position (class token
    included), head, norm, bias, vector.

    - Weight decay: ``"matrices"`` is matrices and an untied head, without embeddings and positions, as in the paper's
      language code. ``"all"`` is every tensor, as in :class:`horst.HORST` itself and ``torch.optim.AdamW``.
    - Mirror step: ``"all"`` is every tensor, as in Algorithm 2 and :class:`horst.HORST` itself. ``"matrices"`` is every
      tensor of two or more dimensions, embeddings, positions and head included: the rule of HAM's public code.
      ``"blocks"`` is the matrices inside the repeated blocks alone, which are what gets pruned.
    - ``l1`` above 0: the matrices inside the repeated blocks, whatever ``mirror`` is.

    Frozen parameters are left out, tied ones appear once.

    Args:
        weight_decay, alpha, beta: Values for the parameters that get them; the others get 0. ``alpha="auto"`` is
            left to the optimizer, which knows the learning rate.
        decay: Tensors that get weight decay.
        mirror: Tensors that get the mirror step.
        no_decay: Kinds, or patterns of names (``"*.q_proj.*"``), that get no decay after all.
        no_mirror: Kinds or patterns that get no mirror step after all, such as ``("embedding", "head")``.
        l1: Strength of the soft threshold, for optimizers that have it (HORST). Others ignore it unless
            :func:`horst.soft_threshold` is called on them. With 0 the groups do not mention it.

    Example:
        >>> from horst import HORST
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
        >>> optimizer = HORST(param_groups(model), lr=1e-3)
        >>> groups = param_groups(model, weight_decay=0.1, no_mirror=["embedding"])
        >>> [(len(g["params"]), g["weight_decay"], g["alpha"]) for g in groups]
        [(1, 0.1, 5.0), (1, 0.0, 5.0), (1, 0.0, 0.0)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model itself, whose modules tell the kind of each parameter, got "
            f"{type(model).__name__}. Write param_groups(model, ...), not param_groups(model.parameters(), ...)."
        )
    check_number("weight_decay", weight_decay, "use 0 for no decay")
    check_alpha(alpha, "use 0 for no mirror step")
    check_number("beta", beta, "use 0 for none")
    check_number("l1", l1, "use 0 to leave it out")
    for argument, given, allowed in (("decay", decay, get_args(DecayOn)), ("mirror", mirror, get_args(MirrorOn))):
        if given not in allowed:
            raise ValueError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {given!r}.")
    for argument, rules in (("no_decay", no_decay), ("no_mirror", no_mirror)):
        if isinstance(rules, str):
            raise TypeError(f"{argument} is a list of kinds or patterns: write [{rules!r}], not {rules!r}.")
    blocks = block_prefixes(model)
    if not blocks and (mirror == "blocks" or l1):
        argument = "mirror='blocks'" if mirror == "blocks" else f"l1={l1}"
        advice = "Use mirror='matrices', with no_mirror for what to leave out." if mirror == "blocks" else ""
        advice += " Leave l1 out, and set group['l1'] in the groups to shrink." if l1 else ""
        raise ValueError(
            f"{argument} found no repeated blocks in {type(model).__name__} (items of one class in a ModuleList "
            f"or Sequential). {advice.strip()}"
        )
    kinds = parameter_kinds(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: each has requires_grad=False.")
    refuse_flat_shards(params.values(), "param_groups tells matrices from vectors")
    for argument, rules in (("no_decay", no_decay), ("no_mirror", no_mirror)):
        for rule in rules:
            if rule not in _KINDS and not any(fnmatchcase(clean_name(name), rule) for name in params):
                raise ValueError(
                    f"{argument} has {rule!r}, which is neither a kind ({', '.join(_KINDS)}) nor matches a "
                    f"parameter's name. Names look like: {', '.join(list(params)[:4])}."
                )

    rows = []
    groups: dict[tuple[bool, bool, bool], dict[str, Any]] = {}
    for raw_name, p in params.items():
        name, kind = clean_name(raw_name), kinds[raw_name]
        decays = (decay == "all" or kind in ("matrix", "head")) and not _applies(no_decay, name, kind)
        is_block_matrix = kind == "matrix" and any(raw_name.startswith(prefix) for prefix in blocks)
        mirrors = is_block_matrix if mirror == "blocks" else mirror == "all" or p.ndim >= 2
        mirrors = mirrors and not _applies(no_mirror, name, kind)
        shrinks = l1 != 0 and is_block_matrix
        rows.append(ParamRow(name, tuple(p.shape), kind, decays, mirrors, shrinks))
        group = groups.setdefault(
            (shrinks, decays, mirrors),
            {
                "params": [],
                "weight_decay": weight_decay if decays else 0.0,
                "alpha": alpha if mirrors else 0.0,
                "beta": beta if mirrors else 0.0,
                **({"l1": l1 if shrinks else 0.0} if l1 else {}),
            },
        )
        group["params"].append(p)
    ordered = sorted(groups.items(), key=lambda item: item[0], reverse=True)
    return ParamGroups([group for _, group in ordered], rows)


def _applies(rules: Collection[str], name: str, kind: str) -> bool:
    return any(rule == kind or fnmatchcase(name, rule) for rule in rules)


def _yes(value: bool) -> str:
    return "yes" if value else "-"


def _align(rows: list[tuple[str, ...]], right: tuple[str, ...] = ()) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    titles = rows[0]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if title in right else cell.ljust(w)
            for cell, w, title in zip(row, widths, titles, strict=True)
        ).rstrip()
        for row in rows
    )
