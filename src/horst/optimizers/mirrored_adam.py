"""Adam followed by a mirror step: what HORST and HAM share, as a torch optimizer.

The state is that of ``torch.optim.AdamW`` (``step``, ``exp_avg``, ``exp_avg_sq``), and so are the names of the options:
checkpoints, schedulers and trainers need not know the difference.
"""

from __future__ import annotations

import abc
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from horst.kernels.backends import Backend, choose_backend, why_not_fused
from horst.kernels.horst_step import StepOptions, StepTensors, horst_step
from horst.kernels.multi_tensor import LaunchCache
from horst.kernels.soft_threshold import soft_threshold_
from horst.optimizers.auto_alpha import AUTO, Alpha, AutoAlpha
from horst.optimizers.hyperparameters import check_adam_hyperparameters
from horst.optimizers.step_parts import Parts, at_most, local_shards, own_parts, split
from horst.optimizers.user_warnings import warn_user
from horst.parameters.kinds import refuse_flat_shards

__all__ = ["MirroredAdam"]

_EXP_AVG, _EXP_AVG_SQ, _STEP = (operator.itemgetter(key) for key in ("exp_avg", "exp_avg_sq", "step"))
_LARGE_EXPONENT = 0.5  # of one step: more than this, unbounded, gets a warning
# how the step runs here, not what it computes: a checkpoint from another machine has no say in it
_OF_THIS_MACHINE = ("foreach", "fused", "capturable")


class MirroredAdam(Optimizer, abc.ABC):
    """The skeleton of an optimizer that takes AdamW's step and then a mirror step. Use HORST or HAM."""

    # Along lr * gradient (HAM) or along Adam's own step (HORST).
    _along_gradient: ClassVar[bool]

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        alpha: Alpha,
        beta: float,
        max_exponent: float | None,
        max_scale: float | None,
        max_step: float | None,
        l1: float,
        maximize: bool,
        foreach: bool | None,
        fused: bool | None,
        capturable: bool,
        stochastic_rounding: bool,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "alpha": alpha,
            "beta": beta,
            "max_exponent": max_exponent,
            "max_scale": max_scale,
            "max_step": max_step,
            "l1": l1,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
            "stochastic_rounding": stochastic_rounding,
        }
        check_adam_hyperparameters(defaults)
        if isinstance(params, torch.nn.Module):
            raise TypeError(f"{type(self).__name__} takes parameters, got a module: give model.parameters().")
        self._forget_launches()
        self._masks: dict[Tensor, Tensor] = {}
        self._auto = AutoAlpha()
        self._is_built = False
        super().__init__(params, defaults)
        self._is_built = True
        self._resolve_auto(self.param_groups)

    @abc.abstractmethod
    def _choose_mirrored(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        """Which of these parameters of a group get the mirror step, given that its alpha or beta is not 0."""

    def _choose_shrunk(self, group: dict[str, Any], params: list[Tensor]) -> list[bool]:
        """Which of these parameters of a group get the soft threshold, given that its l1 is not 0."""
        return [True] * len(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with hyperparameters of its own if wished. Nothing changes on an error."""
        if isinstance(param_group, dict):  # else the base class says what is wrong
            check_adam_hyperparameters({**self.defaults, **param_group})
            if self._along_gradient and {**self.defaults, **param_group}["alpha"] == AUTO:
                raise ValueError(
                    f"alpha='auto' knows the size of Adam's step, and {type(self).__name__}'s mirror step goes along "
                    "the raw gradient. Use HORST, or give alpha as a number."
                )
            params = param_group.get("params", ())
            if isinstance(params, Tensor):
                params = param_group["params"] = [params]
            elif not isinstance(params, list):
                params = param_group["params"] = list(params)  # it may be an iterator, and is read twice
            for item in params:
                # (name, parameter) pairs are allowed
                p = item[1] if isinstance(item, tuple) else item
                if isinstance(p, Tensor) and not p.dtype.is_floating_point:
                    raise ValueError(
                        f"{type(self).__name__} takes real floating-point parameters, got one of {p.dtype} and shape "
                        f"{tuple(p.shape)}. The mirror step needs the sign of a weight, which a complex number lacks: "
                        "give it to torch.optim.AdamW."
                    )
            if param_group.get("fused", self.defaults["fused"]):
                tensors = [i[1] if isinstance(i, tuple) else i for i in params]
                if (reason := why_not_fused([t for t in tensors if isinstance(t, Tensor)])) is not None:
                    raise ValueError(
                        f"fused=True was asked for, but {reason}. Use fused=None to choose by what is there."
                    )
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            if not all(self._choose_mirrored(group, group["params"])):
                refuse_flat_shards(group["params"], f"{type(self).__name__} takes its mirror step on matrices")
            if self._is_built:  # else all groups are resolved together
                self._resolve_auto([group])
        except BaseException:
            self.param_groups.pop()
            raise

    def _resolve_auto(self, groups: list[dict[str, Any]]) -> None:
        def mirrored(group: dict[str, Any]) -> Iterator[Tensor]:
            return itertools.compress(group["params"], self._choose_mirrored(group, group["params"]))

        self._auto.resolve(groups, mirrored, (p for group in self.param_groups for p in group["params"]))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of ``torch.optim.AdamW``.

        What AdamW's lacks keeps its current value, and so do ``foreach``, ``fused`` and ``capturable``: a checkpoint
        written on another machine, or by a trainer with other defaults, goes on here.
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
        if len(groups) == len(self.param_groups):  # else the base class says what is wrong
            merged = []
            for old, loaded in zip(self.param_groups, groups, strict=True):
                new = self._auto.without_unresolved(loaded)
                kept = {k: v for k, v in old.items() if k in self.defaults}
                merged.append({**kept, **new, **{k: kept[k] for k in _OF_THIS_MACHINE}})
                self._auto.check_loaded(old, new)
            groups = merged
        super().load_state_dict({**state_dict, "param_groups": groups})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_launches()
        self.__dict__.setdefault("_masks", {})  # who set masks sets them again on a copy
        self.__dict__.setdefault("_auto", AutoAlpha())
        self._is_built = True
        # a pickle from before these existed
        for option, value in (("l1", 0.0), ("max_scale", None), ("max_step", None)):
            self.defaults.setdefault(option, value)
        for group in self.param_groups:
            for key, value in self.defaults.items():  # checkpoints from before an option existed
                group.setdefault(key, value)

    def set_masks(self, masks: Mapping[Tensor, Tensor | None]) -> None:
        """Keep pruned weights at zero inside the step: on the fused backend, in the same pass over memory.

        :mod:`horst.sparsity` calls this whenever its masks change. Masks are not part of ``state_dict``.

        Args:
            masks: For parameters of this optimizer, a boolean tensor shaped like the (local) weight, True where it is
                kept; None makes the parameter dense again. Parameters that are not named keep what they have.
        """
        known = {id(p) for group in self.param_groups for p in group["params"]}
        for p, mask in masks.items():
            if id(p) not in known:
                raise ValueError(f"a mask of shape {tuple(p.shape)} is for a parameter that is not in this optimizer.")
            (local,) = own_parts([p])
            if mask is not None and (mask.dtype is not torch.bool or mask.shape != local.shape):
                raise ValueError(
                    f"a mask must be a boolean tensor shaped like its weight {tuple(local.shape)}, got {mask.dtype} of "
                    f"shape {tuple(mask.shape)}."
                )
        for p, mask in masks.items():
            if mask is None:
                self._masks.pop(p, None)
            else:
                self._masks[p] = mask

    def _forget_launches(self) -> None:
        self._launches: dict[tuple[int, bool, bool], LaunchCache] = defaultdict(LaunchCache)
        self._backends: dict[int, tuple[tuple[Any, ...], Backend]] = {}
        # by id of a group's list: all values of self.state when the group's own were looked up, and these
        self._group_states: dict[int, tuple[list[Any], list[dict[str, Any]]]] = {}
        self._counters_on_device: dict[int, bool] = {}  # where the step counters of a group lie, by id of the list
        self._warned = False

    def _refuse_sparse(self, params: list[Tensor], grads: list[Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            if grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} needs dense gradients, got {grad.layout} for a parameter of shape "
                    f"{tuple(p.shape)}. Use sparse=False in nn.Embedding, or torch.optim.SparseAdam for that parameter."
                )

    def _backend(self, group: dict[str, Any]) -> Backend:
        params, foreach, fused = group["params"], group["foreach"], group["fused"]
        if not params or torch.compiler.is_compiling():
            return choose_backend(params, foreach, fused)
        key = (len(params), params[0].device, params[0].dtype, foreach, fused)
        known = self._backends.get(id(params))
        if known is None or known[0] != key:  # looking at every parameter at every step would show on the clock
            known = self._backends[id(params)] = (key, choose_backend(params, foreach, fused))
        return known[1]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # torch.amp.GradScaler then leaves unscaling and skipping to the kernel, and the host never waits
        return all(self._backend(group) == "fused" for group in self.param_groups)

    def _states(self, group_params: list[Tensor], params: list[Tensor]) -> list[dict[str, Any]]:
        """The state of each parameter; looked up by hash only when a dictionary in ``self.state`` has been replaced."""
        if torch.compiler.is_compiling():
            return [self.state[p] for p in params]
        known = self._group_states.get(id(group_params))
        if known is not None:
            everything, states = known
            same = len(everything) == len(self.state) and all(map(operator.is_, self.state.values(), everything))
            if same and len(states) == len(params):
                return states
        states = list(map(self.state.__getitem__, params))
        if len(params) == len(group_params):
            self._group_states[id(group_params)] = (list(self.state.values()), states)
        return states

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
        """Fill the lists with the group's parameters that have a gradient, their state made where it is missing."""
        backend = self._backend(group)
        step_on_device = group["capturable"] or backend == "fused"
        # List by list rather than parameter by parameter: this is most of what the host does in a fused step.
        grads += [grad for p in group["params"] if (grad := p.grad) is not None]
        every = len(grads) == len(group["params"])
        params += group["params"] if every else [p for p in group["params"] if p.grad is not None]
        states = self._states(group["params"], params)
        if not all(states):
            self._refuse_sparse(params, grads)
            for p, state in zip(params, states, strict=True):
                if not state:
                    # float32 always: a bfloat16 counter stops at 256
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if step_on_device else "cpu")
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        placed, key = self._counters_on_device, id(group["params"])
        if key not in placed or placed[key] is not step_on_device:  # no get: Dynamo of torch 2.11 does not know it here
            for p in group["params"]:
                if found := self.state.get(p):  # it may have been loaded from one that lived elsewhere
                    where = p.device if step_on_device else "cpu"
                    found["step"] = torch.as_tensor(found["step"], dtype=torch.float32, device=where)
            placed[key] = step_on_device
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
            closure: Evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        for i, group in enumerate(self.param_groups):
            params: list[Tensor] = []
            grads: list[Tensor] = []
            exp_avgs: list[Tensor] = []
            exp_avg_sqs: list[Tensor] = []
            steps: list[Tensor] = []
            backend = self._init_group(group, params, grads, exp_avgs, exp_avg_sqs, steps)
            if torch.compiler.is_compiling():  # which _init_group cannot see
                backend = choose_backend(params, group["foreach"], group["fused"])
            if params:
                self._step_group(i, group, StepTensors(params, grads, exp_avgs, exp_avg_sqs, steps), backend)
        return loss

    def _step_group(self, index: int, group: dict[str, Any], tensors: StepTensors, backend: Backend) -> None:
        if not torch.compiler.is_compiling():
            self._check_before_step(group)
        mirrored = self._choose_mirrored(group, tensors.params)
        masks = [self._masks.get(p) for p in tensors.params] if self._masks else None
        if set(map(type, tensors.params)) != {torch.nn.Parameter}:
            tensors = local_shards(tensors)
        parts: Parts = {(True, False): (tensors, None)}
        if masks is not None or not all(mirrored):
            parts = split(tensors, mirrored, masks or [None] * len(mirrored))
        lr = at_most(group["lr"], group["max_step"])
        for (on, masked), (part, part_masks) in parts.items():
            beta1, beta2 = group["betas"]
            options = StepOptions(
                lr=lr if on else group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                alpha=group["alpha"] if on else 0.0,
                beta=group["beta"] if on else 0.0,
                max_exponent=group["max_exponent"],
                along_gradient=self._along_gradient,
                maximize=group["maximize"],
                capturable=group["capturable"],
                stochastic_rounding=group["stochastic_rounding"],
                max_scale=group["max_scale"],
            )
            horst_step(
                part,
                options,
                backend,
                masks=part_masks,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                cache=self._launches[index, on, masked] if backend == "fused" else None,
            )
        if group["l1"]:
            shrunk = self._choose_shrunk(group, tensors.params)
            soft_threshold_(
                [p for p, on in zip(tensors.params, shrunk, strict=True) if on],
                lr * group["l1"],
                steps=[t for t, on in zip(tensors.steps, shrunk, strict=True) if on]
                if group["stochastic_rounding"]
                else None,
                found_inf=getattr(self, "found_inf", None),
            )

    def _check_before_step(self, group: dict[str, Any]) -> None:
        on_gpu = group["params"][0].is_cuda
        if on_gpu and not group["capturable"] and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{type(self).__name__}.step() is being captured in a CUDA graph with capturable=False. "
                "Make the optimizer with capturable=True, and with a tensor lr if a schedule changes it."
            )
        self._auto.check_step(group)
        if self._warned or self._along_gradient or isinstance(group["lr"], Tensor) or group["max_scale"] is not None:
            return
        lr, alpha = at_most(group["lr"], group["max_step"]), group["alpha"]
        if not alpha * lr > _LARGE_EXPONENT:
            return
        exponent = min(alpha * lr, group["max_exponent"] or math.inf)
        if exponent <= _LARGE_EXPONENT:
            return
        self._warned = True
        warn_user(
            f"alpha * lr is {alpha * lr:.3g}: one step may change a weight by a factor of exp({exponent:.3g}). The "
            "paper's runs at 1 crashed; its own setting is 0.025. Lower alpha or lr, set max_exponent (0.1, say) or "
            "max_scale, or use alpha='auto'."
        )
