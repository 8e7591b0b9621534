"""Figure 5: additive against multiplicative updates. SGD and Exp-SGD (a), Adam and Exp-Adam (b)."""

from __future__ import annotations

import dataclasses

from horst.lab.experiments import toy_suite
from horst.lab.experiments.result import Result, command_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(toy_suite.Config):
    """The toy suite"s setting with this figure"s methods; the other fields are those of the suite.

    Args:
        methods: The methods drawn.
    """

    methods: tuple[str, ...] = ("sgd", "exp_sgd", "adam", "exp_adam")


def run(config: Config) -> Result:
    """The final classifiers of the methods, and their summary rows."""
    return toy_suite.run_profiles("figure5_additive_vs_multiplicative", config, _NOTES)


def main() -> None:
    """The command line."""
    command_line(Config, run, "figure5_additive_vs_multiplicative: SGD against Exp-SGD, Adam against Exp-Adam")


_NOTES = [
    "Adam's profile is to be read beside the true L-infinity max-margin solution, which is a row of the toy suite.",
]


if __name__ == "__main__":
    main()
