"""The best dense and the best sparse model of a run, kept apart: AC/DC yields both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from horst.parameters.kinds import clean_name
from horst.parameters.sharding import local_shard


@dataclass(frozen=True)
class Best:
    """A model's metric, the step it was taken at, and its weights on the CPU (of sharded ones, this rank's part)."""

    metric: float
    step: int
    weights: dict[str, Tensor]


class BestModels(dict[str, Best]):
    """By kind, ``"dense"`` or ``"sparse"``, the best model recorded; filled by ``sparsifier.record(metric)``.

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

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {kind: {"metric": b.metric, "step": b.step, "weights": dict(b.weights)} for kind, b in self.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.clear()
        self.update({kind: Best(b["metric"], b["step"], dict(b["weights"])) for kind, b in state_dict.items()})
