"""Which optimizer updates a masked weight, and that an optimizer has one open sparsifier at most."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from horst.sparsity.layers import Layer

if TYPE_CHECKING:
    from horst.sparsity.controller import Sparsifier

# By optimizer, the last sparsifier built on it: two at once would silently zero what the other keeps.
_latest: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Sparsifier]] = weakref.WeakKeyDictionary()


def find_owners(optimizers: Sequence[Optimizer], layers: Sequence[Layer]) -> dict[str, Optimizer]:
    """The optimizer of each layer, by the layer's name; a layer without one is refused."""
    owners: dict[str, Optimizer] = {}
    for optimizer in optimizers:
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners |= {layer.name: optimizer for layer in layers if id(layer.param) in ids}
    missing = [layer.name for layer in layers if layer.name not in owners]
    if missing:
        raise ValueError(
            f"{len(missing)} masked weights are in no optimizer: {', '.join(missing[:4])}. Make the optimizer from "
            "the model's present parameters (after moving and sharding it), pass every optimizer in a list, or "
            "exclude these layers."
        )
    return owners


def refuse_a_second(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers on which a sparsifier is open."""
    if any(_open_on(optimizer) for optimizer in optimizers):
        gc.collect()  # one that was dropped may wait in a cycle of references, where nobody can close it
    for optimizer in optimizers:
        if (other := _open_on(optimizer)) is not None:
            raise ValueError(
                f"{type(optimizer).__name__} has an open sparsifier, {type(other).__name__} (sparsity "
                f"{other.current_sparsity:.4f}): a second one would undo its masks. Call close() on the first before "
                "building the next; of keep_zeros, on what it returned."
            )


def note(sparsifier: Sparsifier) -> None:
    """Remember an open sparsifier for :func:`refuse_a_second`."""
    _latest.update((optimizer, weakref.ref(sparsifier)) for optimizer in sparsifier.optimizers)


def release(handles: list[Any], owned: Sequence[tuple[weakref.ref[Optimizer], Sequence[Tensor]]]) -> None:
    """Remove all hooks, and the masks from the optimizers that were given them."""
    for handle in handles:
        handle.remove()
    handles.clear()
    for optimizer, params in owned:
        alive = optimizer()
        if alive is not None and hasattr(alive, "set_masks"):
            alive.set_masks(dict.fromkeys(params))


def _open_on(optimizer: Optimizer) -> Sparsifier | None:
    latest = _latest.get(optimizer)
    sparsifier = None if latest is None else latest()
    return sparsifier if sparsifier is not None and sparsifier._release.alive else None
