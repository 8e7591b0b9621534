"""Figure 6: mirror maps. The hyperbolic entropy (a) against the cosh entropy (b)."""

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

    methods: tuple[str, ...] = ("hyperbolic", "cosh")


def run(config: Config) -> Result:
    """The final classifiers of the methods, and their summary rows."""
    return toy_suite.run_profiles("figure6_mirror_maps", config, _NOTES)


def main() -> None:
    """The command line."""
    command_line(Config, run, "figure6_mirror_maps: hyperbolic entropy against cosh entropy")


_NOTES = ["cosh at the best learning rate of Appendix D's sweep."]


if __name__ == "__main__":
    main()
