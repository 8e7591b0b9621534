"""Adam followed by a mirror step: what HORST and HAM share, as a torch optimizer.

The state is that of ``torch.optim.AdamW`` (``step``, ``exp_avg``, ``exp_avg_sq``), and so are the names of the options:
checkpoints, schedulers and trainers need not know the difference.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from horst.kernels.backends import Backend, choose_backend, why_not_fused
from horst.kernels.horst_step import StepOptions, StepTensors, horst_step
from horst.optimizers.auto_alpha import AUTO, AutoAlpha, at_most
from horst.optimizers.hyperparameters import check_adam_hyperparameters, with_own_options
from horst.optimizers.masks import with_new_masks
from horst.optimizers.step_cache import StepCache
from horst.optimizers.step_parts import Parts, local_shards, split
from horst.parameters.kinds import refuse_flat_shards
from horst.user_warnings import warn_user

__all__ = ["MirroredAdam"]

_EXP_AVG, _EXP_AVG_SQ, _STEP = (operator.itemgetter(key) for key in ("exp_avg", "exp_avg_sq", "step"))
_LARGE_EXPONENT = 0.5  # of one step: more than this gets a warning
# What a checkpoint does not change: how the step runs on this machine, and options of AdamW that we do not have.
_NOT_LOADED = ("foreach", "fused", "capturable", "amsgrad", "differentiable", "decoupled_weight_decay")
_MIRROR_OPTIONS = ("alpha", "beta", "l1")


class MirroredAdam(Optimizer):
    """The skeleton of an optimizer that takes AdamW's step and then a mirror step. Use HORST or HAM.

    Args:
        params: Parameters, named parameters or groups.
        defaults: Options of groups that bring none of their own. The ``max_step`` of ``alpha="auto"`` is added.
    """

    # Along lr * gradient (HAM) or along Adam's own step (HORST).
    _along_gradient: ClassVar[bool]

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        defaults = {"max_step": None, **defaults}
        check_adam_hyperparameters(defaults)
        if isinstance(params, torch.nn.Module):
            raise TypeError(f"{type(self).__name__} takes parameters, got a module: give model.parameters().")
        self._cache, self._warned, self._warned_of_bfloat16 = StepCache(), False, False
        self._masks: dict[Tensor, Tensor] = {}
        self._auto = AutoAlpha()
        self._is_built = False
        carried = _carried_by_all(params)  # before torch writes the defaults into the groups
        super().__init__(params, defaults)
        self._is_built = True
        self._warn_of_options_without_effect(carried)
        self._resolve_auto(self.param_groups)

    def _warn_of_options_without_effect(self, carried: Sequence[str]) -> None:
        own = inspect.signature(type(self)).parameters
        given = {n: self.defaults[n] for n in _MIRROR_OPTIONS if n in own and self.defaults[n] != own[n].default}
        idle = [n for n in given if n in carried and any(group[n] != given[n] for group in self.param_groups)]
        if not idle:
            return
        listed, names = " and ".join(f"{n}={given[n]!r}" for n in idle), " and ".join(idle)
        have, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        # Groups of horst.param_groups always carry alpha and beta, and l1 only where it was given there.
        l1 = ""
        if "l1" in given and "l1" not in carried:
            l1 = f" l1={given['l1']!r} does have one, on all tensors; horst.param_groups limits it to block matrices."
        warn_user(
            f"{listed} {have} no effect: every parameter group carries its own {names}. Give {names} to "
            f"horst.param_groups, or set {them} in the groups.{l1}"
        )

    def _choose_mirrored(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        """Which of these parameters of a group get the mirror step and ``l1``; the others get AdamW's step."""
        return [True] * len(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own hyperparameters if given. An error changes nothing."""
        if isinstance(param_group, dict):  # else the base class says what is wrong
            group = {**self.defaults, **param_group}
            check_adam_hyperparameters(group)
            if self._along_gradient and group["alpha"] == AUTO:
                raise ValueError(
                    f"alpha='auto' knows the size of Adam's step, and {type(self).__name__}'s mirror step goes along "
                    "the raw gradient. Use HORST, or give alpha as a number."
                )
            if isinstance(params := param_group.get("params", ()), Iterator):  # it is read twice
                params = param_group["params"] = list(params)
            self._check_parameters([params] if isinstance(params, Tensor) else params, group["fused"])
        super().add_param_group(param_group)
        self._warn_of_bfloat16(self.param_groups[-1])
        try:
            group = self.param_groups[-1]
            if not all(self._choose_mirrored(group, group["params"])):
                refuse_flat_shards(group["params"], f"{type(self).__name__} takes its mirror step on matrices")
            if self._is_built:  # else it is done for all groups together
                self._resolve_auto([group])
        except BaseException:
            self.param_groups.pop()
            raise

    def _check_parameters(self, params: Iterable[Any], fused: bool | None) -> None:
        named = [item[1] if isinstance(item, tuple) else item for item in params]
        tensors = [p for p in named if isinstance(p, Tensor)]  # the base class refuses the others
        # Frozen weights may be anything, such as the codes of a quantized layer.
        trained = [p for p in tensors if p.requires_grad]
        for p in trained:
            if not p.dtype.is_floating_point:
                raise ValueError(
                    f"{type(self).__name__} takes real floating-point parameters, got one of {p.dtype} and shape "
                    f"{tuple(p.shape)}. The mirror step needs the sign of a weight, which a complex number lacks: "
                    "give it to torch.optim.AdamW."
                )
            # Stored in float32 it would not help: load_state_dict casts it back to the weight's dtype.
            if p.dtype is torch.float16:
                raise ValueError(
                    f"{type(self).__name__} got a weight of torch.float16 and shape {tuple(p.shape)}: the squares of "
                    "usual gradients are 0 there, and so is Adam's second moment, which makes steps far too large. "
                    "Use float32 weights with autocast, or bfloat16 with stochastic_rounding=True."
                )
        if fused and (reason := why_not_fused(trained or tensors)) is not None:
            raise ValueError(f"fused=True was asked for, but {reason}. Use fused=None to let the optimizer choose.")

    def _warn_of_bfloat16(self, group: dict[str, Any]) -> None:
        # Whatever lr is: weight decay changes a weight by lr * weight_decay, far below 2**-9 of it, and so does every
        # step near the end of a schedule.
        trained = (p.dtype for p in group["params"] if p.requires_grad)
        if not self._warned_of_bfloat16 and not group["stochastic_rounding"] and torch.bfloat16 in trained:
            self._warned_of_bfloat16 = True
            warn_user(
                f"{type(self).__name__} got bfloat16 weights without stochastic_rounding: a change below 2**-9 of a "
                "weight, such as weight decay and small steps, is lost in rounding. Use stochastic_rounding=True, or "
                "float32 weights with autocast."
            )

    def _resolve_auto(self, groups: list[dict[str, Any]]) -> None:
        def mirrored(group: dict[str, Any]) -> Iterator[Tensor]:
            return itertools.compress(group["params"], self._choose_mirrored(group, group["params"]))

        self._auto.resolve(groups, mirrored, (p for group in self.param_groups for p in group["params"]))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of ``torch.optim.AdamW``.

        Options that AdamW lacks keep their current values, and so do ``foreach``, ``fused`` and ``capturable``: a
        checkpoint written on another machine, or by a trainer with other defaults, continues here. A state of HAM
        brings HAM's ``alpha``, which is too large for HORST: set it again.
        """
        groups = state_dict["param_groups"]
        for entry in state_dict["state"].values():
            if isinstance(entry, dict) and entry and not {"step", "exp_avg", "exp_avg_sq"} <= entry.keys():
                raise ValueError(
                    f"the state_dict holds {', '.join(map(repr, entry))} for a parameter, and {type(self).__name__} "
                    "needs 'step', 'exp_avg' and 'exp_avg_sq'. Load a state of AdamW, Adam, HORST or HAM, or start "
                    "with a fresh optimizer state."
                )
        if any(g.get("amsgrad") for g in groups):
            raise ValueError(
                f"the state_dict was made with amsgrad=True, which {type(self).__name__} does not have. "
                "Continue with torch.optim.AdamW, or start with a fresh optimizer state."
            )
        groups = [{k: v for k, v in group.items() if k not in _NOT_LOADED} for group in groups]
        groups = self._auto.loadable(self.param_groups, groups)
        super().load_state_dict(with_own_options(self, {**state_dict, "param_groups": groups}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # which torch adds for its own optimizers
        self._cache, self._warned, self._is_built = StepCache(), False, True
        self._warned_of_bfloat16 = True
        self.__dict__.setdefault("_masks", {})  # who set masks sets them again on a copy
        self.__dict__.setdefault("_auto", AutoAlpha())
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def set_masks(self, masks: Mapping[Tensor, Tensor | None]) -> None:
        """Keep pruned weights at zero inside the step: on the fused backend, in the same pass over memory.

        :mod:`horst.sparsity` calls this whenever its masks change. Masks are not part of ``state_dict``.

        Args:
            masks: For parameters of this optimizer, a boolean tensor shaped like the (local) weight, True where it is
                kept; None makes the parameter dense again. Parameters that are not named keep their masks.
        """
        self._masks = with_new_masks(self, self._masks, masks)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler then leaves unscaling and skipping to the kernel, and the host never waits
        return all(self._cache.backend(group) == "fused" for group in self.param_groups)

    # torch.compile calls this method outside of its trace, by this name and with lists that it fills.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
    ) -> Backend:
        """Fill the lists with the group's parameters that have a gradient; missing states are created."""
        backend = self._cache.backend(group)
        step_on_device = group["capturable"] or backend == "fused"
        # List by list rather than parameter by parameter: this is most of what the host does in a fused step.
        grads += [grad for p in group["params"] if (grad := p.grad) is not None]
        every = len(grads) == len(group["params"])
        params += group["params"] if every else [p for p in group["params"] if p.grad is not None]
        states = self._cache.states(self.state, group["params"], params)
        if not all(states):
            for p, grad, state in zip(params, grads, states, strict=True):
                if grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} needs dense gradients, got {grad.layout} for a parameter of shape "
                        f"{tuple(p.shape)}. Use sparse=False in nn.Embedding, or torch.optim.SparseAdam for it."
                    )
                if not state:
                    self._check_parameters([p], None)  # it may have been frozen when it was given
                    self._warn_of_bfloat16(group)
                    # float32 always: a bfloat16 counter stops at 256
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if step_on_device else "cpu")
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        self._cache.place_counters(self.state, group["params"], step_on_device)
        exp_avgs += map(_EXP_AVG, states)
        exp_avg_sqs += map(_EXP_AVG_SQ, states)
        steps += map(_STEP, states)
        return backend

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on every parameter that has a gradient.

        Args:
            closure: Function that evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for i, group in enumerate(self.param_groups):
            tensors = StepTensors([], [], [], [], [])
            backend = self._init_group(group, *tensors)
            if torch.compiler.is_compiling():  # which _init_group cannot see
                backend = choose_backend(tensors.params, group["foreach"], group["fused"])
            if tensors.params:
                self._step_group(i, group, tensors, backend)
        return loss

    def _step_group(self, index: int, group: dict[str, Any], tensors: StepTensors, backend: Backend) -> None:
        if not torch.compiler.is_compiling():
            self._check_before_step(group)
        mirrored = self._choose_mirrored(group, tensors.params)
        masks = [self._masks.get(p) for p in tensors.params] if self._masks else None
        tensors = local_shards(tensors)
        parts: Parts = {(True, False): (tensors, None)}
        if masks is not None or not all(mirrored):
            parts = split(tensors, mirrored, masks or [None] * len(mirrored))
        beta1, beta2 = group["betas"]
        for (on, masked), (part, part_masks) in parts.items():
            options = StepOptions(
                lr=at_most(group["lr"], group["max_step"]) if on else group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                alpha=group["alpha"] if on else 0.0,
                beta=group["beta"] if on else 0.0,
                along_gradient=self._along_gradient,
                maximize=group["maximize"],
                capturable=group["capturable"],
                stochastic_rounding=group["stochastic_rounding"],
                l1=group["l1"] if on and "l1" in self.defaults else 0.0,
            )
            horst_step(
                part,
                options,
                backend,
                masks=part_masks,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                cache=self._cache.launches[index, on, masked] if backend == "fused" else None,
            )

    def _check_before_step(self, group: dict[str, Any]) -> None:
        on_gpu = group["params"][0].is_cuda
        if on_gpu and not group["capturable"] and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() is being captured in a CUDA graph with capturable=False. "
                "Make the optimizer with capturable=True, and with a tensor lr if a schedule changes it."
            )
        self._auto.check_step(group)
        if self._warned or self._along_gradient or isinstance(group["lr"], Tensor):
            return
        product = group["alpha"] * at_most(group["lr"], group["max_step"])
        if product > _LARGE_EXPONENT:
            self._warned = True
            warn_user(
                f"alpha * lr is {product:.3g}: one step may change a weight by a factor of exp({product:.3g}). The "
                "paper's runs at 1 crashed; its own setting is 0.025. Lower alpha or lr, or use alpha='auto'."
            )


def _carried_by_all(params: object) -> list[str]:
    """The options of the mirror step that every one of these groups brings; none where they are no groups."""
    if not isinstance(params, list) or not all(isinstance(group, dict) for group in params):
        return []
    return [name for name in _MIRROR_OPTIONS if all(name in group for group in params)]
