"""The last look: every masked weight is exactly zero, and the sparsity that was asked for is there, or an error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from horst.parameters.sharding import Shard, local_shard, sum_over_ranks
from horst.pruning.report import PrunedLayer
from horst.sparsity.layers import Layer
from horst.sparsity.masks import NM, Block
from horst.sparsity.selection import exact_floor

__all__ = ["NotSparse", "check_sparse", "named_numbers", "warn_if_sparser", "zeros_of"]

logger = logging.getLogger(__name__)
_MORE = 0.005  # share of zeros beyond rounding


class NotSparse(RuntimeError):
    """A model that should be sparse is not: a masked weight is not zero, or there are too few zeros."""


@torch.no_grad()
def check_sparse(
    layers: Sequence[Layer],
    masks: Mapping[str, Tensor],
    pattern: Block | NM,
    sparsity: float,
    distribution: Literal["uniform", "global"] = "uniform",
) -> list[PrunedLayer]:
    """Count the zeros of each layer; raise where they are not what was asked for.

    Args:
        layers: Layers that were pruned.
        masks: Masks by layer name, True where a weight is kept; of a cut weight, this rank's part.
        pattern: Pattern that the zeros must have.
        sparsity: Share of zeros that is needed, rounded down to whole units of the pattern.
        distribution: Where it is needed: ``"uniform"``, in each layer, or ``"global"``, in all of them together.

    Returns:
        What each layer keeps, over all ranks.

    Example:
        >>> from torch import nn
        >>> from horst.sparsity import find_layers
        >>> model = nn.Linear(2, 2)
        >>> model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> mask = {"weight": model.weight != 0}
        >>> check_sparse(find_layers(model, "all"), mask, Block(), 0.5)[0].sparsity
        0.5
    """
    found, problems = [], []
    zeros = units = 0
    for layer in layers:
        shard = Shard.of(layer.param)
        weight = local_shard(layer.param)
        # NaN is not zero either.
        alive = int(sum_over_ranks(((weight != 0) & ~masks[layer.name]).sum(), shard.group))
        if alive:
            problems.append(f"{layer.name} has {alive} masked weights that are not zero")
        kept = int(sum_over_ranks((weight != 0).sum(), shard.group))
        found.append(PrunedLayer(layer.name, tuple(layer.param.shape), kept))
        if isinstance(pattern, NM):
            if full := _full_groups(layer, weight, shard, pattern):
                problems.append(f"{layer.name} has {full} groups of {pattern.m} with more than {pattern.n} weights")
            continue
        have, size = _zero_units(layer, weight, shard, pattern)
        matrices = layer.experts or 1
        need = matrices * exact_floor(sparsity, size // matrices)
        if distribution == "uniform" and have < need:
            problems.append(f"{layer.name} has {have} zero units of the {need} needed")
        zeros, units = zeros + have, units + size
    if zeros < (need := exact_floor(sparsity, units)) and distribution == "global":
        problems.append(f"the layers together have {zeros} zero units of the {need} needed")
    if problems:
        raise NotSparse(
            f"the model is not as sparse as asked for ({_name(pattern, sparsity)}): {'; '.join(problems[:4])}"
            f"{f'; and {len(problems) - 4} more' if len(problems) > 4 else ''}. Did something else change its weights?"
        )
    return found


@torch.no_grad()
def zeros_of(layers: Sequence[Layer]) -> float:
    """Share of the weights of some layers that are zero, over all ranks.

    Example:
        >>> from torch import nn
        >>> from horst.sparsity import find_layers
        >>> model = nn.Linear(2, 2)
        >>> model.weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> zeros_of(find_layers(model, "all"))
        0.5
    """
    params = [layer.param for layer in layers]
    kept = [sum_over_ranks(local_shard(p).count_nonzero(), Shard.of(p).group) for p in params]
    return 1 - sum(map(int, kept)) / sum(p.numel() for p in params)


def warn_if_sparser(layers: Sequence[Layer], sparsity: float) -> None:
    """Say that a model has more zeros already than it is asked to have."""
    if (share := zeros_of(layers)) > sparsity + _MORE:
        logger.warning(
            "%.3g %% of the weights to prune are zero already, more than the %.3g %% asked for. Give a higher "
            "sparsity, or the dense model.", 100 * share, 100 * sparsity,
        )  # fmt: skip


def named_numbers(evaluate: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Mapping[str, float]]:
    """The function ``evaluate`` of :func:`horst.sparsify`, with what it returns checked.

    Raises:
        TypeError: It returns something else than a dictionary of numbers, when it is called.
    """

    def checked(model: nn.Module) -> Mapping[str, float]:
        found = evaluate(model)
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(found, Mapping):
                raise TypeError(f"evaluate must return numbers by name, got {found!r}.") from error
            raise TypeError(
                f"evaluate must return a dictionary of named numbers, got {type(found).__name__}. Return "
                '{"perplexity": value}.'
            ) from error

    return checked


def _full_groups(layer: Layer, weight: Tensor, shard: Shard, pattern: NM) -> int:
    """Groups of a layer with more weights than the pattern keeps."""
    groups = weight.movedim(layer.input_dim, -1).reshape(-1, pattern.m)
    return int(sum_over_ranks((groups.count_nonzero(1) > pattern.n).sum(), shard.group))


def _zero_units(layer: Layer, weight: Tensor, shard: Shard, pattern: Block) -> tuple[int, int]:
    """Units of a layer that are zero, and all its units."""
    matrices = list(weight) if layer.experts else [weight]
    zeros = sum(((pattern.unit_scores(m) == 0).sum() for m in matrices), torch.zeros((), device=weight.device))
    count = layer.experts or 1
    units = count * (layer.param.numel() // count // (pattern.rows * pattern.columns))
    return int(sum_over_ranks(zeros.long(), shard.group)), units


def _name(pattern: Block | NM, sparsity: float) -> str:
    return f"{pattern.n}:{pattern.m}" if isinstance(pattern, NM) else f"sparsity {sparsity}"
