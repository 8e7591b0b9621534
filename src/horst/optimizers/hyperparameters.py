"""Hyperparameters: their checks, whose errors say what is given, allowed and to be done, and those a state lacks."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from horst.optimizers.auto_alpha import AUTO


def check_adamw_options(group: dict[str, Any]) -> None:
    """Refuse a learning rate, betas, eps or decay of a group that is out of range or of the wrong type."""
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}.")
        if lr.device.type == "cpu" and not 0.0 <= float(lr) < math.inf:
            raise ValueError(f"lr must be a number of at least 0, got {float(lr)}.")
    else:
        check_number("lr", lr, "1e-3 is AdamW's default")
    check_number("eps", group["eps"], "1e-8 is AdamW's default")
    check_number("weight_decay", group["weight_decay"], "use 0 for no decay")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers such as (0.9, 0.999), got {betas!r}.")
    for i, b in enumerate(betas):
        if isinstance(b, bool) or not isinstance(b, numbers.Real) or not 0.0 <= float(b) < 1.0:
            raise ValueError(f"betas[{i}] must lie in [0, 1), got {b!r}.")


def check_adam_hyperparameters(group: dict[str, Any]) -> None:
    """Refuse options of a group that are out of range or of the wrong type."""
    check_adamw_options(group)
    check_alpha(group["alpha"], "use 0 for plain AdamW")
    check_number("beta", group["beta"], "use 0 for none; for Adam's averages the argument is betas")
    check_number("l1", group.get("l1", 0.0), "use 0 to leave it out")
    check_max_step(group["max_step"])
    for name in ("foreach", "fused"):
        if group[name] is not None and not isinstance(group[name], bool):
            raise TypeError(f"{name} must be True, False or None (the optimizer chooses), got {group[name]!r}.")
    for name in ("maximize", "capturable", "stochastic_rounding"):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name} must be True or False, got {group[name]!r}.")
    if group["foreach"] and group["fused"]:
        raise ValueError("foreach=True and fused=True clash: they name two backends. Set one of them to None.")


def check_alpha(value: object, hint: str) -> None:
    """Refuse what is neither ``"auto"`` nor a finite number of at least 0."""
    if isinstance(value, str):
        if value != AUTO:
            raise TypeError(f"alpha must be a number of at least 0 or 'auto', got {value!r}; {hint}.")
    else:
        check_number("alpha", value, hint)


def check_max_step(value: object) -> None:
    """Refuse what is neither None nor a number above 0."""
    if value is not None:
        check_number("max_step", value, "use None for no bound")
        if value == 0:
            raise ValueError("max_step must be above 0, got 0. Use lr=0 for no step.")


def check_number(name: str, value: object, hint: str) -> None:
    """Refuse what is not a finite number of at least 0; ``hint`` says what to do."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of at least 0, got {value!r}; {hint}.")
    if not 0.0 <= float(value) < math.inf:  # this form refuses NaN too
        raise ValueError(f"{name} must be a number of at least 0, got {value}; {hint}.")


def with_own_options(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """A state to load, whose groups take the options that they lack, as AdamW's do, from the optimizer's groups."""
    own, loaded = optimizer.param_groups, state_dict["param_groups"]
    if len(own) != len(loaded):  # the base class says what is wrong
        return state_dict
    kept = [{k: v for k, v in group.items() if k in optimizer.defaults} for group in own]
    return {**state_dict, "param_groups": [{**old, **new} for old, new in zip(kept, loaded, strict=True)]}
