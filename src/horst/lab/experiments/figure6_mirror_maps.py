"""Figure 6: mirror maps. The hyperbolic entropy (a) against the cosh entropy (b)."""

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

    methods: tuple[str, ...] = ("hyperbolic", "cosh")


def run(config: Config) -> Result:
    """The final classifiers of the methods, and their summary rows."""
    return toy_suite.run_profiles("figure6_mirror_maps", config, _NOTES)


_NOTES = ["cosh at the best learning rate of Appendix D's sweep."]
