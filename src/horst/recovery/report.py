"""What came of making a model sparse: stage by stage, layer by layer, before and after."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from horst.pruning.report import Report

__all__ = ["SparsifyReport", "Stage"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One pruning and the training after it.

    Args:
        sparsity: Share of zeros that was asked for.
        steps: Optimizer steps.
        units: Tokens, images or rows that were trained on.
        loss: Training loss at the end.
        pruned: Numbers of the evaluation after pruning, before training; none where training starts dense.
        metrics: Numbers of the evaluation after training.
        seconds: Wall time of the training.
        units_per_second: Tokens, images or rows per second, without the first steps (which compile); None where nothing
            is left then.
    """

    sparsity: float
    steps: int
    units: int
    loss: float
    pruned: Mapping[str, float]
    metrics: Mapping[str, float]
    seconds: float
    units_per_second: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparsifyReport:
    """What :func:`horst.sparsify` did.

    Args:
        settings: Settings of the run, as plain data.
        unit: Unit of :attr:`Stage.units`: ``"tokens"``, ``"images"`` or ``"rows"``.
        dense: Numbers of the evaluation of the dense model.
        stages: Stages, in order.
        layers: Zeros of each layer, and their share of the model.

    Example:
        >>> from horst.pruning import PrunedLayer
        >>> stage = Stage(sparsity=0.5, steps=10, units=640, loss=2.5, pruned={"loss": 4.0}, metrics={"loss": 2.2},
        ...               seconds=1.5, units_per_second=430.0)
        >>> layers = Report("sparsegpt", [PrunedLayer("fc.weight", (4, 4), kept=8)], model_weights=20)
        >>> report = SparsifyReport(settings={}, unit="tokens", dense={"loss": 2.0}, stages=[stage], layers=layers)
        >>> print(report.summary())
        stage     sparsity   steps      tokens        loss
        dense            0       0           0           2
        pruned         0.5       0           0           4
        trained        0.5      10         640         2.2
        >>> report.after
        {'loss': 2.2}
    """

    settings: Mapping[str, Any]
    unit: str
    dense: Mapping[str, float]
    stages: list[Stage]
    layers: Report

    @property
    def before(self) -> Mapping[str, float]:
        """Numbers of the dense model."""
        return self.dense

    @property
    def after(self) -> Mapping[str, float]:
        """Numbers of the sparse model at the end."""
        return self.stages[-1].metrics

    @property
    def sparsity(self) -> float:
        """Share of zeros in the pruned layers, counted."""
        return self.layers.sparsity_of_pruned_layers

    @property
    def units(self) -> int:
        """Tokens, images or rows of all stages."""
        return sum(stage.units for stage in self.stages)

    @property
    def seconds(self) -> float:
        """Wall time of all training."""
        return sum(stage.seconds for stage in self.stages)

    def rows(self) -> list[dict[str, Any]]:
        """The dense model, each pruned and each trained one, in order: one plain dictionary each."""
        rows: list[dict[str, Any]] = [_row("dense", 0.0, 0, 0, 0.0, self.dense)]
        for stage in self.stages:
            if stage.pruned or not self.dense:
                rows.append(_row("pruned", stage.sparsity, 0, 0, 0.0, stage.pruned))
            rows.append(
                {
                    **_row("trained", stage.sparsity, stage.steps, stage.units, stage.seconds, stage.metrics),
                    "training_loss": stage.loss,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        return {
            "settings": dict(self.settings),
            "unit": self.unit,
            "sparsity": self.sparsity,
            **self.layers.shares(),
            "before": dict(self.before),
            "after": dict(self.after),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "rows": self.rows(),
            "layers": self.layers.rows(),
        }

    def summary(self) -> str:
        """A table as text."""
        names = list(self.dense)
        titles = "".join(f"{name:>{_wide(name)}}" for name in names)
        lines = [f"{'stage':8}{'sparsity':>10}{'steps':>8}{self.unit:>12}{titles}"]
        for row in self.rows():
            numbers = "".join(f"{row['metrics'].get(n, float('nan')):>{_wide(n)}.6g}" for n in names)
            lines.append(f"{row['stage']:8}{row['sparsity']:>10g}{row['steps']:>8}{row['units']:>12}{numbers}")
        return "\n".join(lines)


def _row(stage: str, sparsity: float, steps: int, units: int, seconds: float, metrics: Mapping[str, float]) -> Any:
    return {
        "stage": stage, "sparsity": sparsity, "steps": steps, "units": units, "seconds": seconds,
        "metrics": dict(metrics),
    }  # fmt: skip


def _wide(name: str) -> int:
    return max(len(name) + 2, 12)
