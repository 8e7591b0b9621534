"""Figure 3 (right): the order of composition. Exp-Adam, a mirror after Adam, against Adam-Exp, a mirror before it."""

from __future__ import annotations

import dataclasses

from horst.lab.experiments import toy_suite
from horst.lab.experiments.result import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
    """The toy suite's setting with this figure's methods.

    Args:
        methods: Methods to draw.
    """

    methods: tuple[str, ...] = ("adam", "exp_adam", "adam_exp")


def run(config: Config) -> Result:
    """The final classifiers of the methods, and their summary rows."""
    return toy_suite.run_profiles("figure3_composition_order", config, _NOTES)


_NOTES = [
    "Lemma 4.3 is exact for the sign; Adam stands in for it. leads is the share of seeds in which the informative "
    "coordinates are the largest.",
]
