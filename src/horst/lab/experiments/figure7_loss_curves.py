"""Figure 7: the loss over time. SignSGD (a), and the cosh entropy over Appendix D's sweep of learning rates (b)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from horst.lab.experiments import toy_suite
from horst.lab.experiments.result import Result, run_and_record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
    """The toy suite's setting with this figure's methods; the other fields are those of the suite.

    Args:
        methods: The methods drawn. The others give the scale that "slow" is measured on.
        thresholds: Losses for which the table says how many steps each run needed.
        snapshots: More than the suite's, since the table counts steps.
    """

    methods: tuple[str, ...] = ("sign_sgd", "cosh", "sgd", "hyperbolic")
    thresholds: tuple[float, ...] = (1e-1, 1e-2, 1e-3)
    snapshots: int = 400


def run(config: Config) -> Result:
    """Log losses over time for every method and learning rate, and the steps each needs to reach the thresholds."""

    def body() -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
        _, trajectories = toy_suite.simulate_config(config)
        rows: list[dict[str, Any]] = []
        curves: dict[str, Any] = {"steps": next(iter(trajectories.values())).times, "losses": {}}
        for name, trajectory in trajectories.items():
            mean = trajectory.log_losses.mean(1) / math.log(10)  # the mean over seeds of log10 of the loss
            for i, lr in enumerate(trajectory.method.lrs):
                curve = mean[:, i].tolist()
                row: dict[str, Any] = {"method": name, "label": trajectory.method.label, "lr": lr}
                for threshold in config.thresholds:
                    reached = [
                        t for t, value in zip(trajectory.times, curve, strict=True) if value <= math.log10(threshold)
                    ]
                    row[f"steps_to_{threshold:g}"] = reached[0] if reached else None
                row["log10_loss"] = curve[-1]
                row["best"] = i == trajectory.best_rate
                rows.append(row)
                curves["losses"][f"{name}@{lr:g}"] = curve
        return rows, curves, _NOTES

    return run_and_record("figure7_loss_curves", config, body)


_NOTES = [
    "log10 of the loss by log-sum-exp, so it goes on where the loss itself underflows (10^-323 in float64); the "
    "gradient underflows there too. Steps are counted to the next snapshot.",
]
