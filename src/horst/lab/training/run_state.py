"""All that a checkpoint must bring back, gathered from a run and put into it again; and what tells runs apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horst.parameters.kinds import clean_name
from horst.sparsity import Sparsifier

__all__ = ["load_optimizer_state", "load_tensors", "named_tensors", "optimizer_state", "settings"]

# Entries of a group that change how an optimizer computes, not what.
_SPEED_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a tied one once, under its first name.

    Example:
        >>> sorted(named_tensors(nn.BatchNorm1d(2, affine=False)))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"checkpoints hold tensors, but the model's {name} is a {type(value).__name__}.")
        tensors.setdefault(id(value), (clean_name(name), value))
    return dict(tensors.values())


@torch.no_grad()
def load_tensors(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy ``saved`` into ``targets``, name by name."""
    for name, target in targets.items():
        target.copy_(saved[name])


def optimizer_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """The optimizer's state by the names of its parameters. Its options are not in it: a run begins with them.

    Args:
        names: Names of the model's parameters, by ``id``.
    """
    return {name: dict(optimizer.state[p]) for name, p in _params(optimizer, names).items() if p in optimizer.state}


def load_optimizer_state(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> None:
    """Put back what :func:`optimizer_state` gave."""
    state = {i: saved[name] for i, name in enumerate(_params(optimizer, names)) if name in saved}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _params(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Tensor]:
    """The optimizer's parameters in its own order, by name; by position where they are not the model's."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {names.get(id(p), f"parameter {i}"): p for i, p in enumerate(params)}


def settings(model: nn.Module, optimizer: Optimizer, sparsifier: Sparsifier | None) -> dict[str, Any]:
    """What model, optimizer and sparsifier are, as JSON: a checkpoint of a run with other ones is refused."""
    tensors = named_tensors(model)
    return {
        "model": {name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()},
        "optimizer": {
            "class": type(optimizer).__name__,
            **{f"group {i}": _options(group) for i, group in enumerate(optimizer.param_groups)},
        },
        "sparsifier": None
        if sparsifier is None
        else {
            "method": type(sparsifier).__name__,
            "sparsity": sparsifier.sparsity,
            "pattern": repr(sparsifier.pattern),
            "schedule": repr(getattr(sparsifier, "schedule", None)),
            "policy": repr(sparsifier.policy),
        },
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _SPEED_OPTIONS}
    options["lr"] = float(group.get("initial_lr", group["lr"]))
    options = {
        key: value if isinstance(value, (bool, int, float, type(None))) else repr(value)
        for key, value in options.items()
    }
    return {**options, "parameters": len(group["params"])}
