"""The result of a pruning: per layer, and as a share of the whole model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from horst.sparsity.layers import summary_table


@dataclass(frozen=True)
class PrunedLayer:
    """One layer after pruning.

    Args:
        name: The parameter's name.
        shape: Shape of the parameter; of a mixture's experts experts x out x in, or experts x in x out.
        kept: Number of its weights that are not zero.
        error: Share of the output's energy lost on the calibration inputs, ``|X W' - X W|^2 / |X W|^2``; None where
            the method does not know it. Of a mixture the mean over the experts that saw a token.
    """

    name: str
    shape: tuple[int, ...]
    kept: int
    error: float | None = None

    @property
    def weights(self) -> int:
        """Number of weights, zeros included."""
        return math.prod(self.shape)

    @property
    def sparsity(self) -> float:
        """Share of zeros."""
        return 1.0 - self.kept / self.weights


@dataclass(frozen=True)
class Report:
    """The layers that were pruned, and what that makes of the model.

    Args:
        method: Name of the method.
        layers: Pruned layers, in the order of the model.
        model_weights: Number of all parameters of the model, tied ones once.
        left_dense: Numbers of weights, by name, of matrices inside the blocks that were neither pruned nor excluded.

    Example:
        >>> report = Report("magnitude", [PrunedLayer("fc.weight", (10, 10), kept=10)], model_weights=110)
        >>> report.sparsity_of_pruned_layers, report.sparsity_of_all_weights
        (0.9, 0.8181818181818182)
        >>> print(report.summary())
        layer         shape    weights      zeros   share
        fc.weight     10x10        100         90   90.0%
        these layers               100         90   90.0%
        whole model                110         90   81.8%
    """

    method: str
    layers: list[PrunedLayer]
    model_weights: int
    left_dense: dict[str, int] = field(default_factory=dict)

    @property
    def zeros(self) -> int:
        """Zeros in the pruned layers."""
        return sum(layer.weights - layer.kept for layer in self.layers)

    @property
    def sparsity_of_pruned_layers(self) -> float:
        """Share of zeros among the weights of the pruned layers."""
        return self.zeros / sum(layer.weights for layer in self.layers)

    @property
    def sparsity_of_all_weights(self) -> float:
        """The same zeros as a share of all parameters of the model."""
        return self.zeros / self.model_weights

    def shares(self) -> dict[str, float]:
        """Both shares of zeros, by name."""
        names = ("sparsity_of_pruned_layers", "sparsity_of_all_weights")
        return {name: getattr(self, name) for name in names}

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per layer."""
        columns = ("weights", "kept", "sparsity", "error")
        return [
            {"layer": layer.name, "shape": list(layer.shape), **{name: getattr(layer, name) for name in columns}}
            for layer in self.layers
        ]

    def summary(self) -> str:
        """A table as text, with the errors where the method knows them, and what in the blocks was left dense."""
        rows = [(layer.name, layer.shape, layer.weights - layer.kept) for layer in self.layers]
        errors = {layer.name: layer.error for layer in self.layers if layer.error is not None}
        left = [f"left dense in the blocks: {name} ({count} weights)" for name, count in self.left_dense.items()]
        if errors:
            left.insert(0, "error: share of the energy of a layer's output that is lost on the calibration data")
        return "\n".join([summary_table(rows, self.model_weights, errors), *left])
