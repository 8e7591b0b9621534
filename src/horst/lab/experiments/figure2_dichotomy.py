"""Figure 2, the steepest-mirror dichotomy, as a measured table: what the probes say of each operator, and its bias.

The figure's four quadrants are sign and coordinate descent (steepest), cosh and hyperbolic entropy (mirror). The table
adds the operators around them and the compositions of Section 4.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from horst.lab.experiments import toy_suite
from horst.lab.experiments.methods import methods_by_name
from horst.lab.experiments.result import Found, recorded
from horst.operators import (
    L1,
    L2,
    Adam,
    CoshEntropy,
    Entropy,
    Euclidean,
    HyperbolicEntropy,
    LInf,
    Mirror,
    Operator,
    Potential,
    Steepest,
)
from horst.operators.properties import commutes, inverse_coercivity, is_bounded, is_linear


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
    """What is probed, and the toy runs that measure the bias; ``methods`` of the suite is not used.

    Args:
        n_probe: The dimension in which properties are probed.
        steepest_lr: Step of the four quadrants' steepest methods in the toy runs. Appendix D has 0.1 for SignSGD, at
            which every step moves a margin by several units; 0.001 is closer to the flow that the bias is a limit of.
        mirror_lr: Step of the mirror methods: 0.9, Appendix D's best for cosh, for both.
    """

    n_probe: int = 6
    steepest_lr: float = 1e-3
    mirror_lr: float = 0.9


@recorded("figure2_dichotomy")
def run(config: Config) -> Found:
    """Probe every operator, and run those of the four quadrants."""
    measured = _measured_bias(config)
    rows = [
        _probe(name, group, operator, config) | measured.get(name, {})
        for name, group, operator in _operators(config.gamma)
    ]
    return rows, {}, _NOTES


def _operators(gamma: float) -> list[tuple[str, str, Operator]]:
    sign, hyperbolic = Steepest(LInf()), Mirror(HyperbolicEntropy(gamma))
    return [
        ("Sign descent", "steepest", sign),
        ("Coordinate descent", "steepest", Steepest(L1())),
        ("Normalised gradient", "steepest", Steepest(L2())),
        ("Adam", "steepest-like", Adam()),
        ("cosh entropy", "mirror", Mirror(CoshEntropy())),
        ("Hyperbolic entropy", "mirror", hyperbolic),
        ("Entropy", "mirror", Mirror(Entropy())),
        ("Gradient descent", "mirror", Mirror(Euclidean())),
        ("Hyperbolic after sign", "composed", hyperbolic @ sign),
        ("Sign after hyperbolic", "composed", sign @ hyperbolic),
        ("Hyperbolic after Adam", "composed", hyperbolic @ Adam()),
    ]


def _probe(name: str, group: str, operator: Operator, config: Config) -> dict[str, Any]:
    shape = (config.n_probe,)
    linear, bounded = is_linear(operator, shape=shape), is_bounded(operator, shape=shape)
    commuting = commutes(operator, Mirror(HyperbolicEntropy(config.gamma)), shape=shape)
    potential: Potential | None = operator.potential if isinstance(operator, Mirror) else None
    coercive = inverse_coercivity(potential) if potential is not None else None
    return {
        "operator": name,
        "class": group,
        "linear": linear.holds,
        "bounded": bounded.holds,
        "bound": bounded.constant if bounded.holds else None,
        "commutes_with_hyperbolic": commuting.holds,
        "coercive": None if coercive is None else coercive.holds,
        "mu": coercive.constant if coercive is not None and coercive.holds else None,
    }


def _measured_bias(config: Config) -> dict[str, dict[str, Any]]:
    """Angles to the max-margin solutions at the end of a toy run, for the operators of the four quadrants."""
    known = methods_by_name(gamma=config.gamma)
    quadrants = {
        "Sign descent": ("sign_sgd", config.steepest_lr),
        "Coordinate descent": ("coordinate", config.steepest_lr),
        "cosh entropy": ("cosh", config.mirror_lr),
        "Hyperbolic entropy": ("hyperbolic", config.mirror_lr),
    }
    methods = [dataclasses.replace(known[key], name=name, lrs=(lr,)) for name, (key, lr) in quadrants.items()]
    data, start = toy_suite.problem(config)
    trajectories = toy_suite.simulate(methods, data.z, start, steps=config.steps, snapshots=config.snapshots)
    rows = toy_suite.summary_rows(trajectories, data, toy_suite.solve_max_margins(data))
    wanted = ("lr", "angle_l1", "angle_l2", "angle_linf", "off_support", "log10_loss")
    return {row["method"]: {key: row[key] for key in wanted} for row in rows}


_NOTES = [
    "linear, bounded and coercive are verdicts of numerical probes: 'no' comes with a counter-example, 'yes' means "
    "that none was found. bound is C of Definition 3.2 in the L2 norm, mu the constant of Definition 3.7.",
    "Angles in degrees to the max-margin solutions after the toy budget, for the figure's four quadrants.",
    "Figure 2 calls coordinate descent infeasible for large networks, which is about cost: a toy run does not show it.",
]
