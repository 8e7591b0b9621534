"""Wanda: the score of a weight is its magnitude times the size of its input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from horst.pruning.magnitude import Compare, check_compare, mask_by_score
from horst.pruning.method import Method, Prepared, Statistic
from horst.sparsity.masks import NM, Block


class InputNorms(Statistic):
    """Root mean square of each input of a layer, summed up batch after batch.

    Example:
        >>> norms = InputNorms(2)
        >>> norms.add(torch.tensor([[3.0, 0.0]]))
        >>> norms.add(torch.tensor([[3.0, 2.0]]))
        >>> norms.norms()
        tensor([3.0000, 1.4142])
    """

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(inputs, device)
        self.mean_square = torch.zeros(inputs, dtype=torch.float32, device=self.device)

    def _add(self, X: Tensor, share: float) -> None:
        self.mean_square.lerp_(X.square().mean(dim=0), share)

    def norms(self) -> Tensor:
        """Root mean square of each column."""
        return self.mean_square.sqrt()


def wanda_scores(W: Tensor, norms: Tensor) -> Tensor:
    r"""Wanda's scores :math:`|W_{ij}| \sqrt{\overline{x_j^2}}`, in float32.

    Args:
        W: Weights, out x in.
        norms: Root mean square of each input, :class:`InputNorms`.

    Example:
        >>> wanda_scores(torch.tensor([[1.0, -2.0]]), torch.tensor([3.0, 1.0]))
        tensor([[3., 2.]])
    """
    return W.to(torch.float32).abs() * norms


@dataclass(frozen=True)
class Wanda(Method):
    """Remove the weights of least magnitude times input, compared within each output's row; the others do not change.

    Args:
        compare: Group of comparison: ``"row"`` (Wanda's) compares the weights of one output, ``"tensor"`` all weights
            of a matrix.

    Example:
        >>> W = torch.tensor([[1.0, 2.0], [4.0, 3.0]])
        >>> Wanda().prune(W, {"norms": torch.tensor([3.0, 1.0])}, Block(), count=2)
        >>> W.tolist()
        [[1.0, 0.0], [4.0, 0.0]]

    References: Sun et al., *A Simple and Effective Pruning Approach for Large Language Models* (2023).
    """

    compare: Compare = "row"
    name = "wanda"
    statistic = InputNorms

    def __post_init__(self) -> None:
        check_compare(self.compare)

    def prepare(self, W: Tensor, statistic: Statistic | None, name: str) -> Prepared:
        """The norms of the inputs."""
        assert statistic is not None
        statistic.check(name)
        return {"norms": statistic.norms()}

    def prune(self, W: Tensor, prepared: Prepared, pattern: Block | NM, count: int) -> None:
        """Zero the ``count`` lowest scores."""
        scores = wanda_scores(W, prepared["norms"])
        W.masked_fill_(~mask_by_score(scores, count, pattern=pattern, compare=self.compare), 0.0)
