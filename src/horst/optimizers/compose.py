"""The mirror step after any torch optimizer (Section 4: composition as a design principle)."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from horst.kernels.backends import choose_backend
from horst.kernels.mirror_step import MirrorOptions, mirror_step
from horst.kernels.multi_tensor import LaunchCache
from horst.optimizers.auto_alpha import AUTO, Alpha, AutoAlpha
from horst.optimizers.group_changes import limited_lr, restored_on_error
from horst.optimizers.hyperparameters import check_alpha, check_bound, check_number
from horst.optimizers.mirrored_adam import MirroredAdam
from horst.optimizers.step_parts import own_parts

__all__ = ["Mirrored", "compose"]

# torch's own optimizers that shrink the weight by lr * weight_decay apart from the gradient, and those that add
# weight_decay * weight to the gradient. Adam, NAdam and RAdam carry a flag in their groups instead.
_DECOUPLED = (optim.AdamW, optim.Muon, optim.Adafactor)
# those whose step is about lr in each weight; Muon's only with the option that makes it so
_STEPS_OF_ABOUT_LR = (optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Muon)
_MIRROR_NAMES = ("alpha", "beta", "max_exponent", "max_scale", "max_step")
_COUPLED = (optim.SGD, optim.ASGD, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.RMSprop)


def compose(
    base: Optimizer,
    *,
    alpha: Alpha = 5.0,
    beta: float = 0.0,
    max_exponent: float | None = None,
    max_scale: float | None = None,
    max_step: float | None = None,
    decoupled_decay: bool | None = None,
) -> Mirrored:
    r"""Follow every step of ``base`` by an entropy-mirror step along the same direction.

    With :math:`\theta_{k+1/2}` the weights after the base optimizer's step and :math:`u_k` that step without its decay,

    .. math::
        u_k &= (1 - \eta \lambda)\, \theta_k - \theta_{k+1/2} \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda` are the group's ``lr`` and (if it is decoupled) ``weight_decay``, and
    :math:`\alpha, \beta` are ``alpha``, ``beta``. ``compose(torch.optim.AdamW(...))`` equals :class:`horst.HORST` up to
    rounding; HORST is faster and needs no copy.

    Costs one copy of the mirrored parameters while the step runs, and one extra pass over them. Because the step is
    recovered from the weights, float32 weights keep it to about four digits and half-precision weights lose most of it:
    keep those in float32.

    Args:
        base: Any torch optimizer, used as it is: its groups, state and options stay its own.
        alpha: Strength of the mirror step, for groups that do not bring their own ``alpha``. In the groups it is called
            ``mirror_alpha`` (RMSprop has another ``alpha``) and can be scheduled there. ``"auto"``: from the group's
            ``lr``, as in HORST, for optimizers that move a weight by about ``lr``: Adam and its kin, and Muon with
            ``adjust_lr_fn="match_rms_adamw"``.
        beta: Decay inside the mirror step, likewise ``mirror_beta``.
        max_exponent: Clamps the mirror step's exponent, likewise ``mirror_max_exponent``. None: no limit.
        max_scale: Weights beyond this size take the mirror step of a weight of this size, likewise
            ``mirror_max_scale``. None: no bound.
        max_step: A larger ``lr`` of the group counts as this in both steps, likewise ``mirror_max_step``. None: no
            bound.
        decoupled_decay: Whether ``base`` applies ``weight_decay`` apart from the gradient. None: known for torch's own
            optimizers, an error for others that decay.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = compose(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), alpha=5.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
    """
    return Mirrored(
        base,
        alpha=alpha,
        beta=beta,
        max_exponent=max_exponent,
        max_scale=max_scale,
        max_step=max_step,
        decoupled_decay=decoupled_decay,
    )


class Mirrored(Optimizer):
    """What :func:`compose` returns: an optimizer whose groups and state are those of ``base``.

    Attributes:
        base: The optimizer that was composed.
    """

    def __init__(
        self,
        base: Optimizer,
        *,
        alpha: Alpha,
        beta: float,
        max_exponent: float | None,
        max_scale: float | None,
        max_step: float | None,
        decoupled_decay: bool | None,
    ) -> None:
        if not isinstance(base, Optimizer):
            hint = "; make it first: compose(AdamW(model.parameters()))" if isinstance(base, type) else ""
            raise TypeError(f"base must be a torch optimizer, got {base!r}{hint}.")
        if isinstance(base, (MirroredAdam, Mirrored)):
            raise TypeError(
                f"{type(base).__name__} takes a mirror step already. Compose torch.optim.AdamW, or use HORST."
            )
        for group in base.param_groups:
            if all(f"mirror_{name}" in group for name in _MIRROR_NAMES):
                raise ValueError(
                    f"this {type(base).__name__} has been composed already: a group has mirror_alpha="
                    f"{group['mirror_alpha']}. Use what compose returned then, and change the strength there "
                    f"(group['mirror_alpha'] = ...); or make a new {type(base).__name__}, compose it, and load the "
                    "state afterwards."
                )
        check_alpha(alpha, "use 0 for no mirror step")
        check_number("beta", beta, "use 0 for none")
        check_bound("max_scale", max_scale)
        check_bound("max_step", max_step)
        if max_exponent is not None:
            check_number("max_exponent", max_exponent, "use None for no limit")
        self.base = base
        self._decoupled_decay = decoupled_decay
        self._launches: dict[int, LaunchCache] = defaultdict(LaunchCache)
        self._auto = AutoAlpha("mirror_")
        state, groups = base.state, base.param_groups
        for group in groups:
            self._decay(group)  # an unknown optimizer that decays is refused here, before anything has changed
        # the base class starts from nothing and adds group by group, to `base` in the end
        values = (alpha, beta, max_exponent, max_scale, max_step)
        mirror = {f"mirror_{name}": value for name, value in zip(_MIRROR_NAMES, values, strict=True)}
        self._is_built = False
        with restored_on_error(base, groups):
            super().__init__(groups, {**base.defaults, **mirror})
            base.state = state
            self._resolve_auto(self.param_groups)
        self._is_built = True

    # What the base optimizer holds is the truth: it may replace either (load_state_dict does).
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of ``base``, each with the mirror step's options as ``mirror_alpha`` and so on."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.base.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of ``base``."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        self.base.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``base``. ``alpha`` and ``beta`` in it are the mirror step's, unless ``base`` has its own.

        Nothing changes on an error.
        """
        mirror = {}
        for name in _MIRROR_NAMES:
            key = f"mirror_{name}"
            own = param_group.get(name) if name not in self.base.defaults else None
            mirror[key] = param_group.get(key, self.defaults[key] if own is None else own)
        check_alpha(mirror["mirror_alpha"], "use 0 for none")
        check_number("mirror_beta", mirror["mirror_beta"], "use 0 for none")
        if mirror["mirror_max_exponent"] is not None:
            check_number("mirror_max_exponent", mirror["mirror_max_exponent"], "use None for no limit")
        check_bound("mirror_max_scale", mirror["mirror_max_scale"])
        check_bound("mirror_max_step", mirror["mirror_max_step"])
        if mirror["mirror_alpha"] == AUTO:
            self._refuse_auto(param_group)
        with restored_on_error(self.base, [param_group]):
            self.base.add_param_group(param_group)
            for name in _MIRROR_NAMES:
                if name not in self.base.defaults:
                    self.base.param_groups[-1].pop(name, None)
            self.base.param_groups[-1].update(mirror)
            if self._is_built:  # else all groups are resolved together
                self._resolve_auto(self.base.param_groups[-1:])

    def _refuse_auto(self, param_group: dict[str, Any]) -> None:
        """An error if the base optimizer's step is not about lr in each weight."""
        if not isinstance(self.base, _STEPS_OF_ABOUT_LR):
            raise ValueError(
                f"alpha='auto' is for optimizers that move a weight by about lr, as Adam does, and "
                f"{type(self.base).__name__} is not known to. Give alpha as a number."
            )
        if isinstance(self.base, optim.Muon):
            adjust = param_group.get("adjust_lr_fn", self.base.defaults["adjust_lr_fn"])
            if adjust != "match_rms_adamw":
                raise ValueError(
                    "alpha='auto' is for optimizers that move a weight by about lr, as Adam does, and Muon with "
                    f"adjust_lr_fn={adjust!r} moves it by about lr over the square root of the matrix's width. Use "
                    "Muon(..., adjust_lr_fn='match_rms_adamw') with a learning rate like AdamW's, or give alpha as a "
                    "number."
                )

    def _resolve_auto(self, groups: list[dict[str, Any]]) -> None:
        everything = (p for group in self.param_groups for p in group["params"])
        self._auto.resolve(groups, operator.itemgetter("params"), everything)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``base`` does it."""
        self.base.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of ``base``'s; what the latter lacks keeps its current value."""
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # else the base class says what is wrong
            groups = [self._auto.without_unresolved(group) for group in groups]
            for old, new in zip(self.param_groups, groups, strict=True):
                self._auto.check_loaded(old, new)
            kept = [{f"mirror_{k}": g[f"mirror_{k}"] for k in _MIRROR_NAMES} for g in self.param_groups]
            groups = [{**k, **g} for k, g in zip(kept, groups, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __getstate__(self) -> dict[str, Any]:
        own = ("base", "defaults", "_decoupled_decay")
        return {name: getattr(self, name) for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_built = True
        if "base" in state:  # unpickled
            self.__dict__.update(state)
            self._auto = AutoAlpha("mirror_")
            super().__setstate__({})
        else:  # load_state_dict: the base optimizer knows which of its options are missing
            self.base.__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            options.setdefault("mirror_max_step", None)  # a pickle or a state from before it existed
        self._launches = defaultdict(LaunchCache)

    def _decay(self, group: dict[str, Any]) -> float | Tensor:
        """The share of each weight that the base optimizer's step takes as decoupled decay."""
        weight_decay = group.get("weight_decay", 0)
        if not weight_decay:
            return 0.0
        decoupled = self._decoupled_decay
        if decoupled is None:
            decoupled = group.get("decoupled_weight_decay")
        if decoupled is None:
            name = type(self.base).__name__
            if not isinstance(self.base, _DECOUPLED + _COUPLED):
                raise ValueError(
                    f"{name} has weight_decay={weight_decay}, and compose cannot tell whether it is applied to the "
                    "weights (decoupled_decay=True, as in AdamW) or added to the gradient (decoupled_decay=False, as "
                    "in SGD). Pass decoupled_decay."
                )
            decoupled = isinstance(self.base, _DECOUPLED)
        return group["lr"] * weight_decay if decoupled else 0.0

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take the base optimizer's step, then the mirror step.

        Args:
            closure: Evaluates the model again and returns the loss; handed to the base optimizer.
        """
        work: list[tuple[int, list[Tensor], list[Tensor], MirrorOptions]] = []
        if not torch.compiler.is_compiling():
            for group in self.param_groups:
                self._auto.check_step(group)
        with limited_lr(self.param_groups, "mirror_max_step") as outside:
            for i, group in enumerate(self.param_groups):
                # with a closure, gradients appear only in the step
                params = [p for p in group["params"] if p.grad is not None or closure is not None]
                if params and (group["mirror_alpha"] != 0 or group["mirror_beta"] != 0):
                    before = list(torch._foreach_mul(own_parts(params), 1.0))  # a copy of each, made by few calls
                    # read before the step, in case the optimizer schedules itself
                    shrink = group["lr"] * group["mirror_beta"] if group["mirror_beta"] != 0 else 0.0
                    options = MirrorOptions(
                        group["mirror_alpha"],
                        self._decay(group),
                        shrink,
                        group["mirror_max_exponent"],
                        group["mirror_max_scale"],
                    )
                    work.append((i, params, before, options))
            loss = self.base.step() if closure is None else self.base.step(lambda: outside(closure))
        for i, params, before, options in work:
            if closure is not None:  # some may have got no gradient after all
                stepped = [(p, old) for p, old in zip(params, before, strict=True) if p.grad is not None]
                params, before = [p for p, _ in stepped], [old for _, old in stepped]
            if params:
                weights = own_parts(params)
                backend = choose_backend(weights, foreach=None, fused=None)
                mirror_step(weights, before, options, backend, self._launches[i])
        return loss
