"""How the zeros are divided among the layers: uniform, global, ERK, or a given sparsity for each layer.

A distribution turns an overall sparsity into the number of units that each layer loses, or, for ``"global"``, into one
number for all layers together, to be found by one threshold.

- ``"uniform"``: ``floor(s * n)`` in every layer.
- ``"global"``: ``floor(s * N)`` over all layers, one threshold (the reference implementation of AC/DC).
- ``"erk"``: Erdős-Rényi-kernel (Evci et al., *Rigging the Lottery*, 2020): a layer's density is proportional to
  ``sum(shape) / prod(shape)``. Layers that would exceed density 1 stay dense and the rest is solved again; the total
  is ``floor(s * N)`` to the unit.
- a dictionary ``{pattern: sparsity}``: a layer takes the first entry whose key is its name, a prefix of it
  (``"blocks.3"``) or a wildcard pattern of either. :func:`owl_ratios` makes one with an entry per block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor

from horst.sparsity.masks import check_sparsity
from horst.sparsity.selection import exact_floor

Distribution = Literal["uniform", "global", "erk"] | Mapping[str, float]


def allocate(
    distribution: Distribution,
    sparsity: float,
    units: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    final: float | None = None,
) -> dict[str, int] | int:
    """Units to remove: of each layer by name, or of all together (``"global"``).

    Args:
        distribution: Name or dictionary, see the module.
        sparsity: Overall share of zeros now. Of a dictionary's layers, each gets its own entry times
            ``sparsity / final``, so that a gradual schedule brings each layer to its own sparsity.
        units: Number of units (weights, unless masks are by block) in each layer.
        shapes: Shape of each layer's weight.
        final: The overall sparsity a gradual schedule ends at; None: ``sparsity`` is final.

    Example:
        >>> allocate("uniform", 0.9, {"a": 15, "b": 100}, {"a": (3, 5), "b": (10, 10)})
        {'a': 13, 'b': 90}
        >>> allocate("erk", 0.9, {"a": 15, "b": 100}, {"a": (3, 5), "b": (10, 10)})
        {'a': 12, 'b': 91}
    """
    if isinstance(distribution, Mapping):
        part = 1.0 if final is None or final == 0.0 else sparsity / final
        return {name: exact_floor(layer_sparsity(distribution, name) * part, n) for name, n in units.items()}
    if distribution == "uniform":
        return {name: exact_floor(sparsity, n) for name, n in units.items()}
    total = exact_floor(sparsity, sum(units.values()))
    if distribution == "global":
        return total
    if distribution == "erk":
        return _erk(total, units, shapes)
    raise ValueError(
        f"distribution must be 'uniform', 'global', 'erk' or a dictionary of sparsities by layer, got {distribution!r}."
    )


def owl_ratios(
    scores: Mapping[str, Sequence[Tensor]], sparsity: float, *, threshold: float = 5.0, spread: float = 0.08
) -> dict[str, float]:
    r"""OWL's sparsity for each block: blocks with many outliers keep more of their weights.

    With :math:`D_b` the share of block b's scores above :math:`M` times their mean,

    .. math::
        s_b = s + \overline{d} - d_b, \quad d_b = 2 \lambda\, (D_b - \min D) / (\max D - \min D)

    where :math:`s, M, \lambda` are ``sparsity``, ``threshold``, ``spread``: the mean over the blocks is ``sparsity``,
    and no two blocks are further apart than ``2 * spread``.

    Args:
        scores: Scores of the weights of each block, by the prefix of its layers' names: magnitudes, or magnitudes times
            input norms (Wanda's, as in OWL).
        threshold: Multiple of the mean above which a score is an outlier: 5 in OWL's instructions, 3 in its code.
        spread: Half the largest difference between two blocks.

    Returns:
        A dictionary to pass as ``distribution``.

    Example:
        >>> import torch
        >>> flat, peaked = torch.ones(100), torch.cat([torch.zeros(99), torch.ones(1)])
        >>> owl_ratios({"blocks.0": [flat], "blocks.1": [peaked]}, 0.7)
        {'blocks.0': 0.78, 'blocks.1': 0.62}

    References: Yin et al., *Outlier Weighed Layerwise Sparsity* (2023).
    """
    return ratios_by_outliers(
        {block: outlier_share(parts, threshold) for block, parts in scores.items()}, sparsity, spread
    )


def outlier_share(scores: Sequence[Tensor], threshold: float) -> float:
    """The share of a block's scores above ``threshold`` times their mean."""
    if not threshold > 0:
        raise ValueError(f"threshold must be above 0, got {threshold}.")
    count = sum(part.numel() for part in scores)
    limit = threshold * sum(part.double().sum() for part in scores) / count
    return sum(int((part > limit).sum()) for part in scores) / count


def ratios_by_outliers(shares: Mapping[str, float], sparsity: float, spread: float) -> dict[str, float]:
    """:func:`owl_ratios` from the share of outliers of each block."""
    check_sparsity(sparsity)
    if not shares:
        raise ValueError("scores is empty: give the scores of at least one block.")
    if not spread >= 0:
        raise ValueError(f"spread must be at least 0, got {spread}.")
    low, high = min(shares.values()), max(shares.values())
    width = 2 * spread / (high - low) if high > low else 0.0
    bonus = {block: width * (share - low) for block, share in shares.items()}
    mean = sum(bonus.values()) / len(bonus)
    ratios = {block: round(sparsity + mean - b, 12) for block, b in bonus.items()}
    outside = {block: ratio for block, ratio in ratios.items() if not 0.0 <= ratio < 1.0}
    if outside:
        raise ValueError(
            f"spread={spread} takes blocks out of [0, 1) at sparsity {sparsity}: {outside}. Use a smaller spread."
        )
    return ratios


def layer_sparsity(ratios: Mapping[str, float], name: str) -> float:
    """The entry of ``ratios`` for the layer ``name``: by name, by prefix or by wildcard, the first that fits."""
    for key, ratio in ratios.items():
        if _fits(key, name):
            check_sparsity(ratio)
            return ratio
    raise ValueError(
        f"no entry of the sparsity dictionary fits layer {name!r}; its keys are {list(ratios)}. "
        "Add the layer's name, a prefix of it, or a wildcard such as '*' at the end."
    )


def check_ratios(ratios: Mapping[str, float], names: Sequence[str]) -> None:
    """Refuse ratios where a layer has no entry in [0, 1), or an entry no layer."""
    for name in names:
        layer_sparsity(ratios, name)
    for key in ratios:
        if not any(_fits(key, name) for name in names):
            raise ValueError(f"{key!r} in the sparsity dictionary fits no layer. The layers are: {', '.join(names)}.")


def _fits(key: str, name: str) -> bool:
    return name == key or name.startswith(key + ".") or fnmatchcase(name, key) or fnmatchcase(name, key + ".*")


def _erk(total_removed: int, units: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    kept = sum(units.values()) - total_removed
    factor = {name: sum(shapes[name]) / math.prod(shapes[name]) for name in units}
    dense: set[str] = set()
    while True:  # at least one more layer turns dense each time round
        rest = [name for name in units if name not in dense]
        weight = sum(factor[name] * units[name] for name in rest)
        scale = (kept - sum(units[name] for name in dense)) / weight if rest else 0.0
        too_dense = {name for name in rest if scale * factor[name] > 1.0}
        if not too_dense:
            break
        dense |= too_dense
    share = {name: float(units[name]) if name in dense else scale * factor[name] * units[name] for name in units}
    keep = {name: min(math.floor(share[name]), units[name]) for name in units}
    # Hand out what rounding down left over, largest fraction first, so that the budget is met to the unit.
    order = sorted((name for name in units), key=lambda name: keep[name] - share[name])
    while (missing := kept - sum(keep.values())) > 0:
        for name in [name for name in order if keep[name] < units[name]][:missing]:
            keep[name] += 1
    return {name: units[name] - keep[name] for name in units}
