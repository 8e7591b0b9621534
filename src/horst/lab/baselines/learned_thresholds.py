r"""STR: weights behind a soft threshold that is learnt, one per layer.

.. math:: W = \mathrm{sign}(\Theta) \odot \mathrm{relu}(|\Theta| - \sigma(s))

The gradient and weight decay move :math:`s`, which starts far below 0: decay draws it towards 0, and the threshold up.
How sparse a layer becomes is found by training and not chosen, so it is no method of :mod:`horst.sparsity`.

References: Kusupati et al., *Soft Threshold Weight Reparameterization for Learnable Sparsity*, 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class _SoftThreshold(nn.Module):
    def __init__(self, like: Tensor, initial: float) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.full((), initial, dtype=like.dtype, device=like.device))

    def forward(self, theta: Tensor) -> Tensor:
        return theta.sign() * torch.relu(theta.abs() - self.s.sigmoid())


def learn_thresholds(model: nn.Module, weights: Iterable[Tensor], *, initial: float = -10.0) -> None:
    """STR: put weights of a model behind soft thresholds that are learnt, one per layer.

    The thresholds are parameters called ``parametrizations.weight.0.s``. Make the optimizer afterwards, and give them
    the weight decay of the weights.

    Args:
        model: Holds the weights as ``weight`` of its modules.
        weights: Some of the model's parameters.
        initial: The first s of every layer; -10 is a threshold of 4.5e-5.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> learn_thresholds(model, [model.weight])
        >>> [name for name, _ in model.named_parameters()]
        ['bias', 'parametrizations.weight.original', 'parametrizations.weight.0.s']
    """
    wanted = {id(weight) for weight in weights}
    for module in list(model.modules()):
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in wanted:
            parametrize.register_parametrization(module, "weight", _SoftThreshold(weight, initial))
            wanted.discard(id(weight))
    if wanted:
        raise ValueError(f"{len(wanted)} of the tensors are not called weight in any module of the model.")


def merge_thresholds(model: nn.Module) -> None:
    """Put plain weights, with their zeros, in the place of what :func:`learn_thresholds` made.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> learn_thresholds(model, [model.weight], initial=9.0)  # above every weight
        >>> merge_thresholds(model)
        >>> int((model.weight == 0).sum())
        6
    """
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight") and isinstance(
            module.parametrizations["weight"][0],  # type: ignore[index]
            _SoftThreshold,
        ):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
