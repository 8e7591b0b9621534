"""The mirror step after any torch optimizer (Section 4: composition as a design principle)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from horst.kernels.backends import choose_backend
from horst.kernels.mirror_step import MirrorOptions, mirror_step
from horst.kernels.multi_tensor import LaunchCache
from horst.optimizers.auto_alpha import AUTO, Alpha, AutoAlpha, at_most
from horst.optimizers.hyperparameters import check_alpha, check_max_step, check_number
from horst.optimizers.known_optimizers import decays_apart, refuse_auto
from horst.optimizers.mirrored_adam import MirroredAdam
from horst.parameters.sharding import local_shard

__all__ = ["WithMirrorStep", "with_mirror_step"]

_OPTIONS = ("alpha", "beta", "max_step")


def with_mirror_step(
    optimizer: Optimizer, *, alpha: Alpha = 5.0, beta: float = 0.0, decoupled_decay: bool | None = None
) -> WithMirrorStep:
    r"""Follow every step of ``optimizer`` by an entropy-mirror step along the same direction.

    With :math:`\theta_{k+1/2}` the weights after the optimizer's step and :math:`u_k` that step without its decay,

    .. math::
        u_k &= (1 - \eta \lambda)\, \theta_k - \theta_{k+1/2} \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda` are the group's ``lr`` and (if it is decoupled) ``weight_decay``, and
    :math:`\alpha, \beta` are ``alpha``, ``beta``. ``with_mirror_step(torch.optim.AdamW(...))`` equals
    :class:`horst.HORST` up to rounding; HORST is faster and needs no copy.

    Costs one copy of the mirrored parameters while the step runs, and two more passes over them. Because the step is
    recovered from the weights, float32 weights keep it to about four digits and half-precision weights lose most of it:
    keep those in float32.

    Args:
        optimizer: Any torch optimizer. Its groups, state and options stay its own.
        alpha: Strength of the mirror step, for groups that do not bring their own ``alpha``. In the groups it is called
            ``mirror_alpha`` (RMSprop has another ``alpha``) and can be scheduled there. ``"auto"`` chooses it from the
            group's ``lr``, as in HORST, for optimizers that move a weight by about ``lr``: the Adam family, and Muon
            with ``adjust_lr_fn="match_rms_adamw"``.
        beta: Decay inside the mirror step, in the groups ``mirror_beta``.
        decoupled_decay: Whether ``optimizer`` applies ``weight_decay`` apart from the gradient. None: known for torch's
            own optimizers, an error for others that decay.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = with_mirror_step(sgd, alpha=5.0)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
    """
    return WithMirrorStep(optimizer, alpha=alpha, beta=beta, decoupled_decay=decoupled_decay)


class WithMirrorStep(Optimizer):
    """What :func:`with_mirror_step` returns: an optimizer whose groups and state are those of ``base``.

    Attributes:
        base: The optimizer that takes the first half of each step.
    """

    def __init__(self, base: Optimizer, *, alpha: Alpha, beta: float, decoupled_decay: bool | None) -> None:
        if not isinstance(base, Optimizer):
            hint = "; build it first: with_mirror_step(AdamW(model.parameters()))" if isinstance(base, type) else ""
            raise TypeError(f"optimizer must be a torch optimizer, got {base!r}{hint}.")
        name = type(base).__name__
        if isinstance(base, (MirroredAdam, WithMirrorStep)):
            raise TypeError(f"{name} takes a mirror step already. Give torch.optim.AdamW instead, or use HORST alone.")
        for group in base.param_groups:
            if all(f"mirror_{option}" in group for option in _OPTIONS):
                raise ValueError(
                    f"this {name} has a mirror step already: a group has mirror_alpha={group['mirror_alpha']}. Use the "
                    "optimizer that with_mirror_step returned, and change the strength there (group['mirror_alpha'] = "
                    f"...); or make a new {name}, add the mirror step to it, and load the state afterwards."
                )
        self.base = base
        self._decoupled_decay = decoupled_decay
        self._launches: dict[int, LaunchCache] = defaultdict(LaunchCache)
        self._auto = AutoAlpha("mirror_")
        self._is_built = False  # until then nothing of base may change
        own = {"mirror_alpha": alpha, "mirror_beta": beta, "mirror_max_step": None}
        _check(own)
        super().__init__(base.param_groups, {**base.defaults, **own})
        options = [self._mirror_options(group) for group in base.param_groups]
        self._resolve_auto(options)
        self._is_built = True
        for group, chosen in zip(base.param_groups, options, strict=True):
            self._write(group, chosen)

    # What the base optimizer holds is the truth: it may replace either (load_state_dict does).
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of ``base``, each with the mirror step's options as ``mirror_alpha`` and so on."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        if self._is_built:
            self.base.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of ``base``."""
        return self.base.state

    @state.setter
    def state(self, value: Any) -> None:
        if self._is_built:
            self.base.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``base``; an error changes nothing.

        ``alpha``, ``beta`` and ``max_step`` in it are the mirror step's, unless ``base`` has an option of that name.
        """
        if not self._is_built:  # called by the base class for groups that are there
            return
        group = {**param_group}
        if isinstance(group["params"], Iterator):  # it is read twice
            group["params"] = list(group["params"])
        chosen = self._mirror_options({**self.base.defaults, **group})
        self._resolve_auto([chosen])
        self.base.add_param_group(group)
        self._write(self.base.param_groups[-1], chosen)

    def _mirror_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """A copy of the group with the mirror step's options in it, checked."""
        params = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        options = {**group, "params": [p[1] if isinstance(p, tuple) else p for p in params]}
        for name in _OPTIONS:
            key = f"mirror_{name}"
            own = group.get(name) if name not in self.base.defaults else None
            options[key] = group.get(key, self.defaults[key] if own is None else own)
        _check(options)
        self._decay(options)  # an unknown optimizer that decays is refused here
        if options["mirror_alpha"] == AUTO:
            refuse_auto(self.base, options)
        return options

    def _write(self, group: dict[str, Any], options: dict[str, Any]) -> None:
        for name in _OPTIONS:
            if name not in self.base.defaults:
                group.pop(name, None)
            group[f"mirror_{name}"] = options[f"mirror_{name}"]

    def _resolve_auto(self, groups: list[dict[str, Any]]) -> None:
        everything = (p for group in self.param_groups for p in group["params"])
        self._auto.resolve(groups, lambda group: group["params"], everything)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``base`` does it."""
        self.base.zero_grad(set_to_none)

    # Both are handed to base, which may save and load in its own way; hooks may be on either optimizer.
    def state_dict(self) -> StateDict:
        """The state of ``base``, whose groups hold the mirror step's options too."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        state = self.base.state_dict()
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of ``base``'s; options that the latter lacks keep their current values."""
        self._check_groups()
        state_dict = {**state_dict}
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = self._auto.loadable(self.param_groups, state_dict["param_groups"])
        kept = [{f"mirror_{k}": g[f"mirror_{k}"] for k in _OPTIONS} for g in self.param_groups]
        self.base.load_state_dict({**state_dict, "param_groups": groups})
        for options, group in zip(kept, self.param_groups, strict=True):
            group.update({**options, **group})
        for finish in self._optimizer_load_state_dict_post_hooks.values():
            finish(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("base", "defaults", "_decoupled_decay")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_built = True
        if "base" in state:  # unpickled
            self.__dict__.update(state)
            self._auto = AutoAlpha("mirror_")
            super().__setstate__({})
        else:  # new groups and state: the base optimizer knows which of its options are missing
            self.base.__setstate__(state)
        self._launches = defaultdict(LaunchCache)

    def _decay(self, group: dict[str, Any]) -> float | Tensor:
        """The share of each weight that the base optimizer's step takes as decoupled decay."""
        if not group.get("weight_decay"):
            return 0.0
        apart = self._decoupled_decay
        if apart is None:
            apart = decays_apart(self.base, group)
        return group["lr"] * group["weight_decay"] if apart else 0.0

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take the base optimizer's step, then the mirror step.

        Args:
            closure: Function that evaluates the model again and returns the loss; handed to the base optimizer.
        """
        if not torch.compiler.is_compiling():
            self._check_groups()
            for group in self.param_groups:
                self._auto.check_step(group)
        clipped = self._clip_lr()

        def unclipped() -> float:
            """The closure, which sees the learning rates that were given and may schedule them."""
            nonlocal clipped
            assert closure is not None
            _restore_lr(clipped)
            try:
                return closure()
            finally:
                clipped = self._clip_lr()

        try:
            work = self._copy_weights(every=closure is not None)  # with a closure, gradients appear only in the step
            loss = self.base.step() if closure is None else self.base.step(unclipped)
        finally:
            _restore_lr(clipped)
        for i, pairs, options in work:
            stepped = [(local_shard(p), before) for p, before in pairs if p.grad is not None]
            if stepped:
                weights, before = [p for p, _ in stepped], [old for _, old in stepped]
                backend = choose_backend(weights, foreach=None, fused=None)
                mirror_step(weights, before, options, backend, self._launches[i])
        return loss

    def _check_groups(self) -> None:
        if any("mirror_alpha" not in group for group in self.param_groups):
            raise RuntimeError(
                f"a group of {type(self.base).__name__} has no mirror_alpha: it was added to this optimizer, or came "
                "with a state that was loaded into it. Add groups to what with_mirror_step returned, and load states "
                "into that."
            )

    def _clip_lr(self) -> list[tuple[dict[str, Any], Any, Any]]:
        """Clip learning rates to their groups' bounds; returns (group, rate before, rate after)."""
        clipped = []
        for group in self.param_groups:
            if (bound := group["mirror_max_step"]) is not None:
                given, group["lr"] = group["lr"], at_most(group["lr"], bound)
                clipped.append((group, given, group["lr"]))
        return clipped

    def _copy_weights(self, every: bool) -> list[tuple[int, list[tuple[Tensor, Tensor]], MirrorOptions]]:
        """For each group with a mirror step: its number, its weights with copies of them, and the options."""
        work = []
        for i, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p.grad is not None or every]
            if params and (group["mirror_alpha"] != 0 or group["mirror_beta"] != 0):
                copies = torch._foreach_mul([local_shard(p) for p in params], 1.0)  # by few calls
                # read before the step, in case the optimizer schedules itself
                shrink = group["lr"] * group["mirror_beta"] if group["mirror_beta"] != 0 else 0.0
                options = MirrorOptions(group["mirror_alpha"], self._decay(group), shrink)
                work.append((i, list(zip(params, copies, strict=True)), options))
        return work


def _restore_lr(clipped: list[tuple[dict[str, Any], Any, Any]]) -> None:
    for group, given, there in clipped:
        if group["lr"] is there:  # else the optimizer has set its own
            group["lr"] = given


def _check(options: dict[str, Any]) -> None:
    check_alpha(options["mirror_alpha"], "use 0 for no mirror step")
    check_number("beta", options["mirror_beta"], "use 0 for none")
    check_max_step(options["mirror_max_step"])
