"""Figures 1 (right), 3 (right), 5, 6 and 7: methods of the toy suite side by side."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from horst.lab.data.separable import SeparableData
from horst.lab.experiments import toy_suite
from horst.lab.experiments.methods import DiagonalMethod
from horst.lab.experiments.result import Found, Result, recorded, run_and_record
from horst.operators import Adam, Identity

_NOTES = {
    "figure1_diagonal_network": "theta is the product of the factors. Balanced: every factor starts at the root of "
    "init_scale, so theta stays non-negative. The other start has u at the root and v at 0.",
    "figure3_composition_order": "Lemma 4.3 is exact for the sign; Adam stands in for it. leads is the share of seeds "
    "in which the informative coordinates are the largest.",
    "figure5_additive_vs_multiplicative": "Adam's profile is to be read beside the true L-infinity max-margin "
    "solution, which is a row of the toy suite.",
    "figure6_mirror_maps": "cosh at the best learning rate of Appendix D's sweep.",
    "figure7_loss_curves": "log10 of the loss by log-sum-exp, so it goes on where the loss itself underflows (10^-323 "
    "in float64); the gradient underflows there too. Steps are counted to the next snapshot.",
}


def run_profiles(config: toy_suite.Config, name: str) -> Result:
    """Figures 3 (right), 5 and 6: the summary rows and the final classifiers of a config's methods."""
    return run_and_record(name, config, lambda: _profiles(name, *toy_suite.simulate_config(config)))


def _profiles(name: str, data: SeparableData, trajectories: dict[str, toy_suite.Trajectory]) -> Found:
    """Summary rows, and every final classifier scaled to largest magnitude 1: mean and spread over seeds."""
    rows = toy_suite.summary_rows(trajectories, data, toy_suite.solve_max_margins(data))
    profiles = {}
    for key, trajectory in trajectories.items():
        theta = trajectory.thetas[-1, :, trajectory.best_rate]
        scaled = theta / theta.abs().amax(-1, keepdim=True)
        spread = scaled.std(0, correction=1) if len(scaled) > 1 else torch.zeros_like(scaled[0])
        profiles[key] = {"label": trajectory.method.label, "mean": scaled.mean(0).tolist(), "std": spread.tolist()}
    return rows, {"profiles": profiles, "support": int(data.support.sum())}, [_NOTES[name]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagonalConfig(toy_suite.Config):
    """The toy suite's setting on the factors of a diagonal network; ``methods`` of the suite is not used.

    Args:
        depth: The number of factors, 2 in the figure.
        lr: The learning rate of both. Not given for this figure; 0.01 is Appendix D's baseline.
        both_starts: Also run the start with the second factor at zero, from which theta can take either sign. The
            paper does not say which it used; the balanced one is that of its proof.
    """

    depth: int = 2
    lr: float = 0.01
    both_starts: bool = True


@recorded("figure1_diagonal_network")
def run_diagonal(config: DiagonalConfig) -> Found:
    """Figure 1 (right): gradient descent and Adam on the factors of <u * v, x>."""
    methods = [
        DiagonalMethod(
            name=f"{name}_{'balanced' if balanced else 'zero'}",
            label=label if balanced else f"{label}, v starts at 0",
            operator=operator,
            lrs=(config.lr,),
            depth=config.depth,
            balanced=balanced,
        )
        for balanced in ((True, False) if config.both_starts else (True,))
        for name, label, operator in (("gd", "GD", Identity()), ("adam", "Adam", Adam()))
    ]
    data, start = toy_suite.problem(config)
    trajectories = toy_suite.simulate(methods, data.z, start, steps=config.steps, snapshots=config.snapshots)
    return _profiles("figure1_diagonal_network", data, trajectories)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossCurvesConfig(toy_suite.Config):
    """The toy suite's setting with the methods of Figure 7; the other fields are those of the suite.

    Args:
        methods: The methods drawn. The others give the scale that "slow" is measured on.
        thresholds: Losses for which the table says how many steps each run needed.
        snapshots: More than the suite's, since the table counts steps.
    """

    methods: tuple[str, ...] = ("sign_sgd", "cosh", "sgd", "hyperbolic")
    thresholds: tuple[float, ...] = (1e-1, 1e-2, 1e-3)
    snapshots: int = 400


@recorded("figure7_loss_curves")
def run_loss_curves(config: LossCurvesConfig) -> Found:
    """Figure 7: log losses over time, by method and learning rate, and the steps each needs to reach the thresholds."""
    _, trajectories = toy_suite.simulate_config(config)
    rows: list[dict[str, Any]] = []
    curves: dict[str, Any] = {"steps": next(iter(trajectories.values())).times, "losses": {}}
    for name, trajectory in trajectories.items():
        mean = trajectory.log_losses.mean(1) / math.log(10)  # the mean over seeds of log10 of the loss
        for i, lr in enumerate(trajectory.method.lrs):
            curve = mean[:, i].tolist()
            row: dict[str, Any] = {"method": name, "label": trajectory.method.label, "lr": lr}
            for threshold in config.thresholds:
                reached = (
                    t for t, value in zip(trajectory.times, curve, strict=True) if value <= math.log10(threshold)
                )
                row[f"steps_to_{threshold:g}"] = next(reached, None)
            rows.append({**row, "log10_loss": curve[-1], "best": i == trajectory.best_rate})
            curves["losses"][f"{name}@{lr:g}"] = curve
    return rows, curves, [_NOTES["figure7_loss_curves"]]
