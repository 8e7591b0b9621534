"""A sparsifier's state for checkpoints, and back, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from horst.sparsity.masks import load_bits, save_bits
from horst.sparsity.model_copies import Best, BestModels

if TYPE_CHECKING:
    from horst.sparsity.controller import Sparsifier


def state_of(sparsifier: Sparsifier) -> dict[str, Any]:
    """See :meth:`horst.sparsity.Sparsifier.state_dict`."""
    best, is_dense = sparsifier.best, not sparsifier._pruned
    # Masks are always there: torch.distributed.checkpoint reads only what a new sparsifier's state has.
    pruned = {name: ~mask for name, mask in sparsifier.masks.items()}
    state: dict[str, Any] = {
        "method": type(sparsifier).__name__,
        "steps": sparsifier.steps,
        "seed": sparsifier.seed,
        "draws": sparsifier._draws,
        "layers": {layer.name: list(layer.param.shape) for layer in sparsifier.layers},
        "dense": is_dense,
        "pruned": {layer.name: save_bits(layer.param, pruned[layer.name]) for layer in sparsifier.layers},
        "best": {kind: {**vars(b), "weights": sparsifier._as_saved(b.weights)} for kind, b in best.items()},
        "extra": sparsifier._extra_state(),
        "observers": [observer.state_dict() for observer in _observers_with_state(sparsifier)],
    }
    return {**state, "tensors": _count_tensors(state)}


def restore(sparsifier: Sparsifier, state: Mapping[str, Any]) -> None:
    """See :meth:`horst.sparsity.Sparsifier.load_state_dict`."""
    if state["method"] != type(sparsifier).__name__:
        raise ValueError(f"this state was saved by {state['method']}, not by {type(sparsifier).__name__}.")
    weights: dict[str, Tensor] = {layer.name: layer.param for layer in sparsifier.layers}
    shapes = {name: tuple(shape) for name, shape in state["layers"].items()}
    if differing := sorted(shapes.keys() ^ weights.keys()):
        raise ValueError(
            f"the state masks {len(shapes)} layers, this sparsifier {len(weights)}; {differing[0]!r} is masked in "
            "one of them only. Give the layers, include and exclude that the run began with."
        )
    for name, shape in shapes.items():
        if shape != weights[name].shape:
            raise ValueError(
                f"the saved mask of {name} has shape {shape}, its weight here {tuple(weights[name].shape)}. "
                "Resume the same model."
            )
    if (found := _count_tensors(state)) != state["tensors"]:
        raise ValueError(
            f"the state has {found} tensors, and {state['tensors']} were saved: torch.distributed.checkpoint reads "
            "only what the state of a new sparsifier has, and that has no best models, nor what a method keeps later "
            "on. Convert the checkpoint by torch.distributed.checkpoint.format_utils.dcp_to_torch_save, and load the "
            "state from that file."
        )
    pruned = {name: load_bits(weights[name], mask) for name, mask in state["pruned"].items()}
    best = BestModels()
    for kind, b in state.get("best", {}).items():  # converted checkpoints lack what is empty
        best_weights = {name: value.cpu() for name, value in sparsifier._from_saved(b["weights"]).items()}
        best[kind] = Best(b["metric"], b["step"], best_weights)
    sparsifier.steps, sparsifier.seed, sparsifier._draws = (int(state[key]) for key in ("steps", "seed", "draws"))
    sparsifier.best, sparsifier._pruned = best, {} if state["dense"] else pruned
    sparsifier._masks_changed()
    sparsifier._load_extra_state(state.get("extra", {}))
    # A run begun without observers may continue with some, and the other way round.
    saved = list(state.get("observers", []))
    for observer in _observers_with_state(sparsifier)[: len(saved)]:
        observer.load_state_dict(saved.pop(0))
    sparsifier._unclaimed = saved


def _count_tensors(state: Any) -> int:
    """Tensors in a nested state; observers may be left out of one."""
    if isinstance(state, Mapping):
        return sum(_count_tensors(value) for key, value in state.items() if key != "observers")
    if isinstance(state, list):
        return sum(map(_count_tensors, state))
    return int(isinstance(state, Tensor))


def refuse_to_copy(sparsifier: Sparsifier) -> Any:
    """An error in place of a pickle or a copy, which would have neither hooks nor masks in its optimizer."""
    name = type(sparsifier).__name__
    raise TypeError(
        f"{name} cannot be pickled or copied: its hooks are on its own model and optimizer. Save its state_dict(), and "
        f"build another {name}(..., state_dict=...) around the copies of model and optimizer."
    )


def _observers_with_state(sparsifier: Sparsifier) -> list[Any]:
    return [observer for observer in sparsifier.observers if hasattr(observer, "state_dict")]
