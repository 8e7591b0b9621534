"""Figure 5: additive against multiplicative updates. SGD and Exp-SGD (a), Adam and Exp-Adam (b)."""

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

    methods: tuple[str, ...] = ("sgd", "exp_sgd", "adam", "exp_adam")


def run(config: Config) -> Result:
    """The final classifiers of the methods, and their summary rows."""
    return toy_suite.run_profiles("figure5_additive_vs_multiplicative", config, _NOTES)


_NOTES = [
    "Adam's profile is to be read beside the true L-infinity max-margin solution, which is a row of the toy suite.",
]
