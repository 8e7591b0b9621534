"""Copies of the model: averages (EMA) and state dicts under the trained masks, and the best models of a run.

``pruned`` holds, by layer name, the weights that are zero; ``names`` gives the layer of each name that a masked weight
goes by. A tied weight has several, and in a state dict it stands under all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from horst.parameters.kinds import clean_name
from horst.parameters.sharding import local_shard
from horst.sparsity.layers import Layer


def names_of(layers: Sequence[Layer], model: nn.Module) -> dict[str, str]:
    """The layer's name for every name, without wrappers, that its weight has in ``model``."""
    by_id = {id(layer.param): layer.name for layer in layers}
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name): by_id[id(p)] for name, p in named if id(p) in by_id}


@contextlib.contextmanager
def masked(model: nn.Module, pruned: Mapping[str, Tensor], names: Mapping[str, str]) -> Iterator[nn.Module]:
    """``model`` with its pruned weights zero; put back on leaving."""
    saved = []
    with torch.no_grad():
        for weight, zeros in matched(model, pruned, names):
            saved.append((weight, zeros, weight[zeros]))
            weight.masked_fill_(zeros, 0)
    try:
        yield model
    finally:
        with torch.no_grad():
            for weight, zeros, values in saved:
                weight[zeros] = values


@torch.no_grad()
def masked_state_dict(
    state_dict: Mapping[str, Any], pruned: Mapping[str, Tensor], names: Mapping[str, str]
) -> dict[str, Any]:
    """A copy of ``state_dict`` with the pruned weights zero; tensors that are not masked are shared."""
    out = dict(state_dict)
    copies: dict[tuple[str, int], Tensor] = {}  # entries of a tied weight share memory, and their copies do too
    _require(pruned, {layer for name in state_dict if (layer := names.get(clean_name(name)))}, "state")
    for name, value in state_dict.items():
        layer = names.get(clean_name(name))
        if layer is None or layer not in pruned:
            continue
        key = (layer, local_shard(value).data_ptr())
        if key not in copies:
            copies[key] = value.detach().clone()
            local_shard(copies[key]).masked_fill_(pruned[layer].to(value.device), 0)
        out[name] = copies[key]
    return out


def matched(model: nn.Module, pruned: Mapping[str, Tensor], names: Mapping[str, str]) -> list[tuple[Tensor, Tensor]]:
    """The local weights of a copy of the model, each once, with the trained model's pruned weights."""
    pairs: dict[int, tuple[Tensor, Tensor]] = {}
    seen = set[str]()
    for name, p in model.named_parameters(remove_duplicate=False):
        layer = names.get(clean_name(name))
        if layer is not None and layer in pruned:
            weight = local_shard(p)
            pairs[id(p)] = (weight, pruned[layer].to(weight.device))  # averages may live on the CPU
            seen.add(layer)
    _require(pruned, seen, "model")
    return list(pairs.values())


def _require(pruned: Mapping[str, Tensor], found: set[str], kind: str) -> None:
    """Refuse a copy that lacks a pruned layer: it would stay dense in silence."""
    for layer in pruned:
        if layer not in found:
            raise ValueError(f"the given {kind} has no parameter {layer!r}: it must be a copy of the trained one.")


@dataclass(frozen=True)
class Best:
    """A model's metric, the step it was taken at, and its weights on the CPU (of sharded ones, this rank's part)."""

    metric: float
    step: int
    weights: dict[str, Tensor]


class BestModels(dict[str, Best]):
    """By kind, ``"dense"`` or ``"sparse"``, the best model recorded; filled by ``sparsifier.record(metric)``.

    The two are kept apart because AC/DC yields both.

    Example:
        >>> best = BestModels()
        >>> best.record("sparse", 0.7, 10, {}), best.record("sparse", 0.6, 20, {}), best["sparse"].step
        (True, False, 10)
    """

    def record(
        self, kind: str, metric: float, step: int, state_dict: Mapping[str, Any], higher_is_better: bool = True
    ) -> bool:
        """Keep a copy of ``state_dict`` if ``metric`` beats the best of its ``kind``; a NaN never does."""
        metric = float(metric)
        if metric != metric:
            return False
        if kind in self and not (metric > self[kind].metric if higher_is_better else metric < self[kind].metric):
            return False
        tensors = {
            clean_name(name): local_shard(v).cpu().clone() for name, v in state_dict.items() if isinstance(v, Tensor)
        }
        self[kind] = Best(metric, step, tensors)
        return True

    def load_into(self, model: nn.Module, kind: str) -> None:
        """Copy the best model of ``kind`` into ``model``."""
        if kind not in self:
            raise KeyError(f"no {kind} model has been recorded; recorded are: {list(self) or 'none'}.")
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                local_shard(value).copy_(self[kind].weights[clean_name(name)])
