"""Theorem 4.7 measured: does the steepest-mirror flow tend to the L1 max-margin direction, and what of p = infinity?

The flow cannot change a sign, so it is compared with two solutions: the best of all, and the best with the signs of its
start. With every feature doubled as x and -x (theta = u - v with u, v > 0) the two are the same.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from horst.lab.data.max_margin import NotSeparableError, l1_dual_correlations, max_margin
from horst.lab.data.separable import sparse_teacher_data
from horst.lab.experiments.result import Found, recorded
from horst.lab.experiments.steepest_mirror_flow import Flow, integrate, predicted_exponent
from horst.lab.experiments.toy_suite import angle, mean_and_std

SETUPS = ("positive", "pairs", "random_signs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The data of Appendix D, or smaller, and the flows to follow on it.

    Args:
        p_values: Exponents of the norm. The theorem covers the integers from 2; ``inf`` is its open limit.
        setups: Setups: "positive" (theta starts positive), "pairs" (features x and -x, theta = u - v) and
            "random_signs" (theta starts with random signs).
        seeds: Data seeds.
        n_samples: Number of samples, N.
        n_features: Number of features, D.
        teacher: Values of the sparse teacher; positive, so that a positive start can reach it.
        init_scale: Size of theta at the start.
        log_norm_end: Log of the L1 norm of theta up to which every flow is followed.
        smoothing: Width of the smoothed sign at zero, for p > 2; see ``integrate``.
        other_smoothings: Widths with which p = infinity is run again in the first setup, to see what it owes to them.
        rtol: Relative tolerance of the solver.
        grid: Number of points of each path in the result.
    """

    p_values: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0, 16.0, 32.0, math.inf)
    setups: tuple[str, ...] = SETUPS
    seeds: tuple[int, ...] = (0, 1, 2)
    n_samples: int = 80
    n_features: int = 100
    teacher: tuple[float, ...] = (1.0, 1.0)
    init_scale: float = 0.01
    log_norm_end: float = 13.0
    smoothing: float = 1e-3
    other_smoothings: tuple[float, ...] = (1e-2, 1e-4)
    rtol: float = 1e-9
    grid: int = 40

    def __post_init__(self) -> None:
        unknown = [setup for setup in self.setups if setup not in SETUPS]
        if unknown:
            raise ValueError(f"unknown setups {unknown}. Choose from {list(SETUPS)}.")


@recorded("theorem4_7_implicit_bias")
def run(config: Config) -> Found:
    """Follow every flow; a row for every setup and p, a curve of the margin gap for each."""
    data = sparse_teacher_data(
        config.seeds, n_samples=config.n_samples, n_features=config.n_features, teacher=config.teacher
    )
    first = math.log(config.n_features * config.init_scale) + 1
    grid = torch.linspace(first, config.log_norm_end, config.grid, dtype=torch.float64).tolist()
    curves: dict[str, Any] = {"log10_norm": [value / math.log(10) for value in grid], "gap": {}, "angle": {}}
    rows: list[dict[str, Any]] = []
    for setup in config.setups:
        problems = [_Problem.build(z, setup, config, seed) for z, seed in zip(data.z, config.seeds, strict=True)]
        solvable = [problem for problem in problems if problem.restricted is not None]
        if not solvable:
            rows.append({"setup": setup, "p": None, "solvable_seeds": 0})
            continue
        for p in config.p_values:
            key = f"{setup} p={p:g}"
            row, curves["gap"][key], curves["angle"][key] = _measure(setup, p, solvable, grid, config)
            rows.append(row)
        if setup == config.setups[0] and math.inf in config.p_values:
            for smoothing in config.other_smoothings:
                changed = dataclasses.replace(config, smoothing=smoothing)
                rows.append(_measure(setup, math.inf, solvable, grid, changed)[0])
    return rows, curves, _NOTES


@dataclasses.dataclass(frozen=True)
class _Problem:
    """One data set in one setup, with its solutions in the coordinates of the flow."""

    z: Tensor
    start: Tensor
    best: dict[str, Tensor]  # by geometry, over all signs
    restricted: Tensor | None  # L1, with the signs of the start; None where there is none

    @classmethod
    def build(cls, z: Tensor, setup: str, config: Config, seed: int) -> _Problem:
        best = {name: max_margin(z, name) for name in ("l1", "l2", "linf")}  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(20_000 + seed)
        noise = torch.randn(z.shape[1], generator=generator, dtype=torch.float64)
        start = config.init_scale * (noise.sign() if setup == "random_signs" else torch.ones_like(noise))
        if setup == "pairs":
            z, start = torch.cat([z, -z], dim=1), torch.cat([start, start])
        try:
            restricted = max_margin(z, "l1", signs=start.sign())
        except NotSeparableError:
            restricted = None
        return cls(z, start, best, restricted)

    def in_features(self, theta: Tensor) -> Tensor:
        """Theta of the flow in the coordinates of the data: u - v where the features are doubled."""
        features = self.best["l1"].shape[-1]
        return theta if theta.shape[-1] == features else theta[..., :features] - theta[..., features:]

    def gap(self, theta: Tensor, solution: Tensor) -> Tensor:
        """1 minus the L1-normalised margin over the largest possible: 0 at the solution, above 1 where unseparated."""
        margin = (theta @ self.z.mT).amin(-1) / theta.abs().sum(-1)
        return 1 - margin * solution.abs().sum()


def _measure(
    setup: str, p: float, problems: list[_Problem], grid: list[float], config: Config
) -> tuple[dict[str, Any], list[float], list[float]]:
    values: dict[str, list[float]] = {}
    gaps, angles = [], []
    for problem in problems:
        assert problem.restricted is not None
        options = {"log_norm_end": config.log_norm_end, "smoothing": config.smoothing, "rtol": config.rtol}
        flow = integrate(problem.z, p, problem.start, **options)
        # The same data from a start of uneven magnitudes: does the limit remember it?
        generator = torch.Generator().manual_seed(30_000)
        uneven = problem.start * torch.exp(torch.randn(problem.start.shape, generator=generator, dtype=torch.float64))
        other = integrate(problem.z, p, uneven, **options)
        path = torch.stack([flow.at(value) for value in grid])
        gap = problem.gap(path, problem.restricted)
        gaps.append(gap)
        angles.append(angle(problem.in_features(path), problem.in_features(problem.restricted)))
        end = flow.theta[-1]
        correlations = l1_dual_correlations(problem.z, signs=problem.start.sign()) * problem.start.sign()
        found = {
            "gap": float(gap[-1]),
            "gap_halfway": float(gap[len(grid) // 2]),
            "gap_global": float(problem.gap(end, problem.best["l1"])),
            "angle_restricted": float(angles[-1][-1]),
            "angle_between_starts": float(angle(problem.in_features(end), problem.in_features(other.theta[-1]))),
            "measured_exponent": _slope(flow, problem),
            "predicted_exponent": predicted_exponent(correlations, p),
        }
        for name, solution in problem.best.items():
            found[f"angle_{name}"] = float(angle(problem.in_features(end), solution))
        for key, value in found.items():
            values.setdefault(key, []).append(value)
    row: dict[str, Any] = {"setup": setup, "p": p if math.isfinite(p) else "inf", "solvable_seeds": len(problems)}
    row["smoothing"] = 0.0 if p == 2 else config.smoothing
    row["log10_norm"] = config.log_norm_end / math.log(10)
    row |= mean_and_std({key: torch.tensor(found, dtype=torch.float64) for key, found in values.items()})
    return row, torch.stack(gaps).mean(0).tolist(), torch.stack(angles).mean(0).tolist()


def _slope(flow: Flow, problem: _Problem) -> float:
    """Minus the slope of the log gap against the log norm over the last quarter of the path."""
    assert problem.restricted is not None
    end = float(flow.log_norm[-1])
    begin = end - (end - float(flow.log_norm[0])) / 4
    late, early = (float(problem.gap(flow.at(value), problem.restricted)) for value in (end, begin))
    return (math.log(early) - math.log(late)) / (end - begin) if early > 0 and late > 0 else math.nan


_NOTES = [
    "gap: 1 minus the flow's L1-normalised margin over the best with the signs of its start, at the largest norm. "
    "gap_global: the same against the best of all signs. Angles in degrees. Mean over the seeds that are solvable.",
    "Read as a statement about theta, the theorem needs the right signs: L1 max-margin is a convex problem, so its KKT "
    "points are its solutions, while a flow that keeps its signs can at best solve the problem restricted to them. The "
    "proof's KKT point is one of the problem in the factors, where a zero factor is stationary.",
    "For p > 2 the flow is smoothed within `smoothing` of a zero gradient entry; p = infinity is run with three "
    "widths.",
    "predicted_exponent: the rate at which the slowest feature off the support is left behind, from the multipliers of "
    "the linear program; measured_exponent: minus the slope of log gap against log norm over the last quarter.",
]
