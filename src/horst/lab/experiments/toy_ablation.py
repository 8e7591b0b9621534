"""How far the toy figures depend on what the paper leaves open: start, teacher, dtype, and the two alphas.

All variants that share a dtype are stepped in one tensor, as further problems of the suite's runner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from horst.lab.experiments import toy_suite
from horst.lab.experiments.methods import AlternatingMethod, Method
from horst.lab.experiments.result import Found, recorded

# Changes to the suite's config, by the name of the variant.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "init 1e-4": {"init_scale": 1e-4},
    "init 0.1": {"init_scale": 0.1},
    "init 1": {"init_scale": 1.0},
    "random signs": {"init": "random_signs"},
    "gaussian start": {"init": "gaussian"},
    "teacher (1, 0.5)": {"teacher": (1.0, 0.5)},
    "teacher (1, -1)": {"teacher": (1.0, -1.0)},
    "float32": {"dtype": "float32"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
    """The toy suite's setting as the base of the variants.

    Args:
        methods: The methods compared; cosh at its best learning rate, 0.9.
        variants: Names of :data:`VARIANTS`.
        alphas: HORST's and HAM's alpha, each run on the base variant.
    """

    methods: tuple[str, ...] = ("sgd", "exp_sgd", "hyperbolic", "adam", "exp_adam", "adam_exp", "cosh", "horst", "ham")
    variants: tuple[str, ...] = tuple(VARIANTS)
    alphas: tuple[float, ...] = (0.0, 5.0, 20.0, 50.0, 200.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown:
            raise ValueError(f"unknown variants {unknown}. Choose from {list(VARIANTS)}.")


@recorded("toy_ablation")
def run(config: Config) -> Found:
    """A row for every variant and method, and for every alpha of HORST and HAM."""
    chosen = toy_suite.methods_of(config)
    methods = [dataclasses.replace(m, lrs=(0.9,)) if m.name == "cosh" else m for m in chosen]
    rows: list[dict[str, Any]] = []
    for dtype in ("float64", "float32"):
        variants = [name for name in config.variants if VARIANTS[name].get("dtype", config.dtype) == dtype]
        if variants:
            rows += _run_together(variants, methods, config)
    alphas: list[Method] = [
        AlternatingMethod(
            name=f"{name}_alpha_{alpha:g}",
            label=f"{label}, alpha {alpha:g}",
            along=along,
            alpha=alpha,
        )
        for name, label, along in (("horst", "HORST", "adam"), ("ham", "HAM", "gradient"))
        for alpha in config.alphas
    ]
    rows += _run_together(["base"], alphas, config)
    return rows, {}, _NOTES


def _run_together(variants: list[str], methods: Sequence[Method], config: Config) -> list[dict[str, Any]]:
    """Run variants of one dtype as one batch of problems, then measure each by itself."""
    built = [toy_suite.problem(dataclasses.replace(config, **VARIANTS[name])) for name in variants]
    z = torch.cat([data.z for data, _ in built])
    start = torch.cat([theta for _, theta in built])
    trajectories = toy_suite.simulate(methods, z, start, steps=config.steps, snapshots=2)
    rows = []
    for i, (name, (data, _)) in enumerate(zip(variants, built, strict=True)):
        seeds = slice(i * len(config.seeds), (i + 1) * len(config.seeds))
        part = {
            key: dataclasses.replace(t, thetas=t.thetas[:, seeds], log_losses=t.log_losses[:, seeds])
            for key, t in trajectories.items()
        }
        for row in toy_suite.summary_rows(part, data, toy_suite.solve_max_margins(data)):
            rows.append({"variant": name, **{key: row[key] for key in _COLUMNS}})
    return rows


_COLUMNS = (
    "method", "label", "lr", "diverged", "off_support", "off_support_std", "off_mass", "leads", "margin", "log10_loss",
    "angle_l1", "angle_l2", "angle_linf",
)  # fmt: skip
_NOTES = [
    "A negative margin means that the data are not separated: with a negative teacher value or random signs, updates "
    "that cannot change a sign may have no solution to find.",
]
