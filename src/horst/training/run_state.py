"""All that a checkpoint must bring back, gathered from a run and put into it again; and what tells runs apart."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from horst.parameters.kinds import clean_name
from horst.sparsity import Sparsifier

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


def random_state() -> dict[str, Any]:
    """Every random number generator of this process, as JSON: Python's, torch's on CPU and GPU, NumPy's if loaded.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(3)
        >>> set_random_state(state)
        >>> torch.equal(torch.rand(3), first)
        True
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state().tolist()  # of this process's device
    if (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = numpy.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on where :func:`random_state` was taken. What this process does not have, a GPU for one, is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
    if "numpy" in state and (numpy := sys.modules.get("numpy.random")) is not None:
        kind, keys, *rest = state["numpy"]
        numpy.set_state((kind, torch.tensor(keys, dtype=torch.int64).numpy(), *rest))


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
    options = {key: value for key, value in group.items() if key not in _SPEED_OPTIONS and value is not None}
    options["lr"] = float(group.get("initial_lr", group["lr"]))
    options = {
        key: value if isinstance(value, (bool, int, float, type(None))) else repr(value)
        for key, value in options.items()
    }
    return {**options, "parameters": len(group["params"])}
