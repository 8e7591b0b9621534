"""Appendix D: every operator on sparse linear classification, all runs stepped together, and the table over them.

The other toy experiments use the same runner. One tensor holds every run of every method, seed and learning rate; the
gradients of all of them are two batched products, and each method then updates its slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from horst.lab.data.max_margin import Geometry, max_margin, norm_of
from horst.lab.data.separable import SeparableData, log_loss, loss_gradient, sparse_teacher_data
from horst.lab.experiments.methods import COSH_SWEEP, Method, methods_by_name
from horst.lab.experiments.result import Found, recorded
from horst.training.torch_settings import threads

GEOMETRIES: tuple[Geometry, ...] = ("l1", "l2", "linf")
Init = Literal["constant", "random_signs", "gaussian"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Appendix D's setting, and what it leaves open.

    Args:
        methods: Names of :func:`horst.lab.experiments.methods.methods_by_name`; empty for all.
        seeds: Data seeds. The paper has three.
        steps: Full-batch steps.
        n_samples: Number of samples, N.
        n_features: Number of features, D.
        teacher: Values of the sparse teacher. Open in the paper; (1, 1) gives both features the same weight and
            the positive sign that the constant start can reach.
        init: Start of theta. Open; "constant" because a multiplicative update cannot leave zero nor change a sign,
            so its start decides which solutions it can reach, and a positive constant can reach the positive teacher.
        init_scale: Size of theta at the start. Open; 0.01 is small beside the solution, as a rich regime needs.
        dtype: Precision, "float64" or "float32". Open; float64, whose loss underflows at a margin of 745, not 103.
        gamma: Parameter of the hyperbolic entropy. Open; 0.001 is a tenth of the start, close to the entropy.
        horst_alpha: HORST's alpha, the paper's 5.
        ham_alpha: HAM's alpha, its default 200.
        snapshots: Number of points of the trajectory to keep, spaced evenly in log time.
    """

    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 10_000
    n_samples: int = 80
    n_features: int = 100
    teacher: tuple[float, ...] = (1.0, 1.0)
    init: Init = "constant"
    init_scale: float = 0.01
    dtype: Literal["float64", "float32"] = "float64"
    gamma: float = 1e-3
    horst_alpha: float = 5.0
    ham_alpha: float = 200.0
    snapshots: int = 60

    def __post_init__(self) -> None:
        if self.steps < 1 or self.snapshots < 2:
            raise ValueError(f"need steps >= 1 and snapshots >= 2, got {self.steps} and {self.snapshots}.")


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """What one method did, with problems (seeds) first and its learning rates second.

    Args:
        method: The method.
        times: The steps at which snapshots were taken, 0 first.
        thetas: ``(times, problems, rates, features)``.
        log_losses: ``(times, problems, rates)``.
    """

    method: Method
    times: list[int]
    thetas: Tensor
    log_losses: Tensor

    @property
    def best_rate(self) -> int:
        """The index of the learning rate with the smallest final loss, averaged over problems (the paper's choice)."""
        final = torch.nan_to_num(self.log_losses[-1].exp().mean(0), nan=math.inf)
        return int(final.argmin())


def simulate(
    methods: Sequence[Method], z: Tensor, start: Tensor, *, steps: int, snapshots: int = 60
) -> dict[str, Trajectory]:
    """Run all methods on all problems at once.

    Args:
        z: Inputs times labels, ``(problems, samples, features)``.
        start: Theta at the start, ``(problems, features)``.
        steps: Full-batch steps.
        snapshots: Number of points of the trajectories to keep.

    Returns:
        One trajectory per method, by name.
    """
    problems, features = start.shape
    counts = [len(method.lrs) for method in methods]
    thetas = [start.unsqueeze(1).expand(problems, count, features).clone() for count in counts]
    rates = [torch.tensor(m.lrs, dtype=z.dtype).reshape(1, -1, 1) if len(m.lrs) > 1 else m.lrs[0] for m in methods]
    states = [method.init(theta) for method, theta in zip(methods, thetas, strict=True)]
    times = _log_spaced(steps, snapshots)
    wanted, kept = set(times), [torch.cat(thetas, dim=1)]
    # Threads cost more than they give on tensors this small: twenty times as much on a busy machine.
    with torch.no_grad(), threads(1):
        for k in range(1, steps + 1):
            g = loss_gradient(torch.cat(thetas, dim=1), z)
            for i, g_i in enumerate(g.split(counts, dim=1)):
                thetas[i], states[i] = methods[i].step(thetas[i], g_i, states[i], rates[i])
            if k in wanted:
                kept.append(torch.cat(thetas, dim=1))
        stacked = torch.stack(kept)
        losses = torch.stack([log_loss(theta, z) for theta in kept])
    return {
        method.name: Trajectory(method, times, theta, loss)
        for method, theta, loss in zip(methods, stacked.split(counts, 2), losses.split(counts, 2), strict=True)
    }


def start_values(config: Config, problems: int) -> Tensor:
    """Theta at the start, ``(problems, features)``; random ones from a generator of each problem's own."""
    shape = (config.n_features,)
    rows = []
    for problem in range(problems):
        generator = torch.Generator().manual_seed(10_000 + problem)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        unit = {"constant": torch.ones(shape, dtype=torch.float64), "random_signs": noise.sign(), "gaussian": noise}
        rows.append(config.init_scale * unit[config.init])
    return torch.stack(rows).to(getattr(torch, config.dtype))


def problem(config: Config) -> tuple[SeparableData, Tensor]:
    """The data of a config and the start of theta."""
    data = sparse_teacher_data(
        config.seeds,
        n_samples=config.n_samples,
        n_features=config.n_features,
        teacher=config.teacher,
        dtype=getattr(torch, config.dtype),
    )
    return data, start_values(config, len(config.seeds))


def methods_of(config: Config) -> list[Method]:
    """The methods that a config names, or all."""
    known = methods_by_name(gamma=config.gamma, horst_alpha=config.horst_alpha, ham_alpha=config.ham_alpha)
    unknown = [name for name in config.methods if name not in known]
    if unknown:
        raise ValueError(f"unknown methods {unknown}. Choose from {list(known)}.")
    return [known[name] for name in config.methods or known]


def simulate_config(config: Config) -> tuple[SeparableData, dict[str, Trajectory]]:
    """Run a config's methods on its data."""
    data, start = problem(config)
    return data, simulate(methods_of(config), data.z, start, steps=config.steps, snapshots=config.snapshots)


def measures(theta: Tensor, data: SeparableData, solutions: dict[Geometry, Tensor]) -> dict[str, Tensor]:
    """What is said of a classifier, for theta of shape ``(..., seeds, features)``; every value is ``(..., seeds)``.

    ``off_support``: mean magnitude off the teacher's support with theta scaled to largest magnitude 1. ``off_mass``:
    the share of the L1 norm there. ``leads``: 1 where the informative coordinates are the largest. ``angle_*``: degrees
    to each max-margin direction. ``norm_ratio_*``: the norm at margin 1 beside the smallest possible (1 is optimal;
    infinite where the data are not separated).
    """
    support, magnitude = data.support, theta.abs()
    margin = (data.z @ theta.unsqueeze(-1)).squeeze(-1).amin(-1)
    found = {
        "off_support": magnitude[..., ~support].mean(-1) / magnitude.amax(-1),
        "off_mass": magnitude[..., ~support].sum(-1) / magnitude.sum(-1),
        "leads": (magnitude[..., support].amin(-1) > magnitude[..., ~support].amax(-1)).to(theta.dtype),
        "margin": margin,
    }
    for geometry, solution in solutions.items():
        found[f"angle_{geometry}"] = angle(theta, solution)
        ratio = norm_of(theta, geometry) / (margin * norm_of(solution, geometry))
        found[f"norm_ratio_{geometry}"] = torch.where(margin > 0, ratio, torch.full_like(ratio, math.inf))
    return found


def angle(theta: Tensor, solution: Tensor) -> Tensor:
    """The angle between two directions, in degrees."""
    cosine = torch.cosine_similarity(theta, solution.expand_as(theta), dim=-1)
    return torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))


def mean_and_std(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Entries of a row: the mean over seeds under each name, the standard deviation under ``NAME_std``."""
    row = {}
    for key, per_seed in values.items():
        row[key] = float(per_seed.mean())
        row[f"{key}_std"] = float(per_seed.std(correction=1)) if len(per_seed) > 1 else 0.0
    return row


def solve_max_margins(data: SeparableData) -> dict[Geometry, Tensor]:
    """The L1, L2 and L-infinity max-margin solutions of every seed, ``(seeds, features)`` each."""
    return {
        geometry: torch.stack([max_margin(z, geometry) for z in data.z]).to(data.z.dtype) for geometry in GEOMETRIES
    }


def summary_rows(
    trajectories: dict[str, Trajectory], data: SeparableData, solutions: dict[Geometry, Tensor]
) -> list[dict[str, Any]]:
    """One row per method at its best learning rate: means over seeds, spreads as ``*_std``, seeds that diverged."""
    rows = []
    for name, trajectory in trajectories.items():
        best = trajectory.best_rate
        theta = trajectory.thetas[-1, :, best]
        values = measures(theta, data, solutions)
        values["log10_loss"] = trajectory.log_losses[-1, :, best] / math.log(10)
        row: dict[str, Any] = {"method": name, "label": trajectory.method.label, "lr": trajectory.method.lrs[best]}
        row["diverged"] = int((~torch.isfinite(theta)).any(-1).sum())
        rows.append(row | mean_and_std(values))
    return rows


@recorded("toy_suite")
def run(config: Config) -> Found:
    """The table over all methods, and the angles and norm ratios over time."""
    data, trajectories = simulate_config(config)
    solutions = solve_max_margins(data)
    references = {f"max_margin_{geometry}": theta for geometry, theta in solutions.items()}
    references["teacher"] = data.teacher.expand(len(config.seeds), -1)
    rows = summary_rows(trajectories, data, solutions)
    for name, theta in references.items():
        reference: dict[str, Any] = {"method": name, "label": name.replace("_", " "), "lr": None, "log10_loss": None}
        rows.append(reference | mean_and_std(measures(theta, data, solutions)))
    curves: dict[str, Any] = {"steps": next(iter(trajectories.values())).times, "methods": {}}
    for name, trajectory in trajectories.items():
        over_time = measures(trajectory.thetas[:, :, trajectory.best_rate], data, solutions)
        over_time["log10_loss"] = trajectory.log_losses[:, :, trajectory.best_rate] / math.log(10)
        del over_time["margin"]
        curves["methods"][name] = {key: value.mean(-1).tolist() for key, value in over_time.items()}
    if "cosh" in trajectories:
        final = trajectories["cosh"].log_losses[-1] / math.log(10)
        curves["cosh_sweep"] = {"lr": list(COSH_SWEEP), "log10_loss": final.mean(0).tolist()}
    return rows, curves, _NOTES


_NOTES = [
    "Mean over seeds, *_std the standard deviation. off_support: mean magnitude off the teacher's support, theta "
    "scaled to largest magnitude 1. The max_margin_* and teacher rows measure the solver's solutions and the teacher "
    "alike.",
    "Exponentiated updates (Exp-SGD, Exp-Adam, hyperbolic and cosh entropy) take the exact dual step.",
    "The gradient of the exponential loss underflows to zero at a margin of about 745 in float64: a method that gets "
    "there stops.",
]


def _log_spaced(steps: int, count: int) -> list[int]:
    """0, then about ``count`` distinct steps, even in log time, the last one included."""
    exponents = torch.linspace(0, math.log(steps), count, dtype=torch.float64)
    return [0, *sorted({round(float(value)) for value in exponents.exp()})]
