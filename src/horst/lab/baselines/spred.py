r"""spred: weights as elementwise products, so that L2 decay of the factors is an L1 penalty on the weights.

.. math:: \min_{U \odot V = W} \tfrac12 (\|U\|_2^2 + \|V\|_2^2) = \|W\|_1

References: Ziyin and Wang, *spred: Solving L1 Penalty with SGD*, 2023.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class _Product(nn.Module):
    def forward(self, U: Tensor, V: Tensor) -> Tensor:
        return U * V

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        # Factors that are equal up to sign, weight by weight, would stay so under Adam, and no weight could change
        # its sign. So V starts the same everywhere, at the scale that makes the factors alike on the whole.
        V = torch.full_like(W, max(float(W.square().mean().sqrt().sqrt()), torch.finfo(W.dtype).tiny))
        return W / V, V


def factorize(model: nn.Module, weights: Iterable[Tensor]) -> None:
    """Replace weights of a model by products of two factors, in place; each product begins as the weight it replaces.

    The factors are parameters called ``parametrizations.weight.original0`` and ``original1``. Make the optimizer
    afterwards, and give them L2 decay.

    Args:
        model: Holds the weights as ``weight`` of its modules.
        weights: Some of the model's parameters.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> factorize(model, [model.weight])
        >>> [name for name, _ in model.named_parameters()]
        ['bias', 'parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    wanted = {id(weight) for weight in weights}
    for module in list(model.modules()):
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in wanted:
            parametrize.register_parametrization(module, "weight", _Product())
            wanted.discard(id(weight))
    if wanted:
        raise ValueError(f"{len(wanted)} of the tensors are not called weight in any module of the model.")


def merge_factors(model: nn.Module) -> None:
    """Put plain weights in the place of what :func:`factorize` made; other models are left as they are.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> factorize(model, [model.weight])
        >>> merge_factors(model)
        >>> sorted(name for name, _ in model.named_parameters())
        ['bias', 'weight']
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight") and isinstance(
            module.parametrizations["weight"][0],  # type: ignore[index]
            _Product,
        ):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
