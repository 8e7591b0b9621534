"""OWL: blocks with many outliers keep more of their weights; a distribution that works with every method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from horst.sparsity import owl_ratios


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
            scores: By the name of a block, a function that computes the scores of its layers.
            sparsity: The mean over the blocks.
        """
        return owl_ratios(_OneAtATime(scores), sparsity, threshold=self.threshold, spread=self.spread)


class _OneAtATime(Mapping[str, Sequence[Tensor]]):
    """Scores that are computed when they are looked up, and not kept."""

    def __init__(self, scores: Mapping[str, Callable[[], Sequence[Tensor]]]) -> None:
        self._scores = scores

    def __getitem__(self, block: str) -> Sequence[Tensor]:
        return self._scores[block]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._scores)

    def __len__(self) -> int:
        return len(self._scores)
