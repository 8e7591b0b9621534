"""Magnitude pruning, and the mask of a matrix by exact choice of scores, which Wanda shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from horst.pruning.method import Method, Prepared, Statistic
from horst.sparsity.masks import NM, Block
from horst.sparsity.selection import magnitude_keys, smallest

Compare = Literal["tensor", "row"]


@dataclass(frozen=True)
class Magnitude(Method):
    """Remove the smallest weights: the paper's one-shot rule.

    Args:
        compare: Group of comparison: ``"tensor"`` compares all weights of a matrix, ``"row"`` those of one output.

    Example:
        >>> W = torch.tensor([[3.0, -1.0], [2.0, 0.5]])
        >>> Magnitude().prune(W, {}, Block(), count=2)
        >>> W.tolist()
        [[3.0, 0.0], [2.0, 0.0]]
    """

    compare: Compare = "tensor"
    name = "magnitude"

    def __post_init__(self) -> None:
        check_compare(self.compare)

    def prepare(self, W: Tensor, statistic: Statistic | None, name: str) -> Prepared:
        """Nothing to know beside the weights."""
        return {}

    def prune(self, W: Tensor, prepared: Prepared, pattern: Block | NM, count: int) -> None:
        """Zero the ``count`` smallest."""
        W.masked_fill_(~mask_by_score(W, count, pattern=pattern, compare=self.compare), 0.0)


def mask_by_score(
    scores: Tensor, count: int, *, pattern: Block | NM | None = None, compare: Compare = "tensor"
) -> Tensor:
    """The mask of a matrix without its ``count`` lowest scores (by magnitude): exactly so many, also with ties.

    Args:
        scores: Matrix of scores, out x in.
        count: Number of units of the pattern to remove. N:M fixes it and does not read it.
        pattern: Pattern that says what a unit is; None is single weights. N:M groups along the inputs.
        compare: Group of comparison. ``"tensor"`` removes the lowest of all. ``"row"`` removes ``count // rows`` in
            each row, and the ``count % rows`` that are left over in those rows where the next score is lowest.

    Returns:
        A boolean tensor, True where a weight is kept.

    Example:
        >>> scores = torch.tensor([[1.0, 2.0, 3.0], [7.0, 8.0, 9.0]])
        >>> mask_by_score(scores, 3)
        tensor([[False, False, False],
                [ True,  True,  True]])
        >>> mask_by_score(scores, 3, compare="row")
        tensor([[False, False,  True],
                [False,  True,  True]])
    """
    pattern = pattern or Block()
    if isinstance(pattern, NM):
        return pattern.mask(scores, input_dim=1)
    units = pattern.unit_scores(scores)
    chosen = smallest([units], count)[0] if compare == "tensor" else _lowest_in_rows(units, count)
    return pattern.expand(~chosen)


def _lowest_in_rows(scores: Tensor, count: int) -> Tensor:
    each, rest = divmod(count, len(scores))
    # Stable: of equal scores the one with the lower index goes first, as in every selection of ours.
    order = magnitude_keys(scores).argsort(dim=1, stable=True)
    chosen = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, order[:, :each], True)
    if rest:
        column = order[:, each : each + 1]
        chosen.scatter_(1, column, smallest([scores.gather(1, column)], rest)[0])
    return chosen


def check_compare(compare: str) -> None:
    """Refuse what is no group of comparison."""
    if compare not in ("tensor", "row"):
        raise ValueError(f"compare must be 'tensor' or 'row', got {compare!r}.")
