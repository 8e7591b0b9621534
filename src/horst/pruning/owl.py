"""OWL: blocks with many outliers keep more of their weights; a distribution that works with every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from horst.sparsity.distributions import outlier_share, ratios_by_outliers


@dataclass(frozen=True)
class OWL:
    """One sparsity per block, by the share of its scores that are far above the block's mean.

    Args:
        threshold: Multiple of the mean above which a score is an outlier: 5 in OWL's instructions, 3 in its code.
        spread: Half the largest difference between the sparsities of two blocks.

    Example:
        >>> import torch
        >>> flat, peaked = torch.ones(1, 100), torch.eye(1, 100)
        >>> OWL().ratios({"h.0": lambda: [flat], "h.1": lambda: [peaked]}, 0.7)
        {'h.0': 0.78, 'h.1': 0.62}

    References: Yin et al., *Outlier Weighed Layerwise Sparsity* (2023).
    """

    threshold: float = 5.0
    spread: float = 0.08

    def ratios(self, scores: Mapping[str, Callable[[], Sequence[Tensor]]], sparsity: float) -> dict[str, float]:
        """The sparsity of each block, :func:`horst.sparsity.owl_ratios`, with one block's scores in memory at a time.

        Args:
            scores: Functions, by the name of a block, that compute the scores of its layers.
            sparsity: The mean over the blocks.
        """
        shares = {block: outlier_share(compute(), self.threshold) for block, compute in scores.items()}
        return ratios_by_outliers(shares, sparsity, self.spread)
