"""Figure 1 (right): a diagonal network <u * v, x>. Gradient descent finds the sparse features, Adam spreads out."""

from __future__ import annotations

import dataclasses
from typing import Any

from horst.lab.experiments import toy_suite
from horst.lab.experiments.methods import DiagonalMethod
from horst.lab.experiments.result import Result, run_and_record
from horst.operators import Adam, Identity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
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


def run(config: Config) -> Result:
    """Gradient descent and Adam on the factors: summary rows and final classifiers."""

    def body() -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
        data, start = toy_suite.problem(config)
        methods = [
            DiagonalMethod(
                name=f"{name}_{'balanced' if balanced else 'zero'}",
                label=f"{label}" if balanced else f"{label}, v starts at 0",
                operator=operator,
                lrs=(config.lr,),
                depth=config.depth,
                balanced=balanced,
            )
            for balanced in ((True, False) if config.both_starts else (True,))
            for name, label, operator in (("gd", "GD", Identity()), ("adam", "Adam", Adam()))
        ]
        trajectories = toy_suite.simulate(methods, data.z, start, steps=config.steps, snapshots=config.snapshots)
        rows = toy_suite.summary_rows(trajectories, data, toy_suite.solve_max_margins(data))
        curves = {"profiles": toy_suite.profiles(trajectories), "support": int(data.support.sum())}
        return rows, curves, _NOTES

    return run_and_record("figure1_diagonal_network", config, body)


_NOTES = [
    "theta is the product of the factors. Balanced: every factor starts at the root of init_scale, so theta stays "
    "non-negative. The other start has u at the root and v at 0.",
]
