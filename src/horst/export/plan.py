"""Which kernel a sparse layer uses for how many tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# A sparse kernel must need at most this share of the dense time to be chosen: less is noise.
MARGIN = 0.9


@dataclass(frozen=True)
class Plan:
    """The choice of kernel by number of tokens: for each measured number, seconds by kernel.

    At a number without seconds for ``"dense"``, a sparse kernel is chosen whatever dense would take.

    Example:
        >>> plan = Plan({1: {"dense": 5.0, "csr": 1.0, "bag": 7.0}, 100: {"dense": 5.0, "csr": 6.0, "bag": 2.0}})
        >>> plan.kernel(1), plan.kernel(9), plan.kernel(11), plan.kernel(1000)
        ('csr', 'csr', 'bag', 'bag')
    """

    seconds: dict[int, dict[str, float]]
    _memory: dict[int, str] = field(default_factory=dict, repr=False, compare=False)

    def kernel(self, tokens: int) -> str:
        """The choice at ``tokens``: that of the nearest measured number, by ratio."""
        if tokens not in self._memory:
            nearest = min(self.seconds, key=lambda measured: abs(math.log(measured / max(tokens, 1))))
            self._memory[tokens] = self._best(self.seconds[nearest])
        return self._memory[tokens]

    def choices(self) -> set[str]:
        """All kernels that the plan may choose."""
        return {self._best(seconds) for seconds in self.seconds.values()}

    @staticmethod
    def _best(seconds: dict[str, float]) -> str:
        sparse = min((name for name in seconds if name != "dense"), key=lambda name: seconds[name])
        return sparse if seconds[sparse] <= MARGIN * seconds.get("dense", math.inf) else "dense"
