r"""Weights as products of factors, and an optimizer that steps the factors.

The model keeps its plain weights: the factors lie in the optimizer's state, and the chain rule gives their gradients
from the weight's, :math:`\partial L / \partial f_d = g \odot \prod_{e \ne d} f_e`. So masks, checkpoints and pruning
work as with any optimizer. A weight that something else has changed, a mask for one, is split into factors anew.
"""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.per_parameter import PerParameter
from horst.operators import Adam, Operator


class Factored(PerParameter):
    r"""An operator's step on the factors of each weight.

    .. math::
        f_d \leftarrow (1 - \eta \lambda)\, f_d - \eta\, A(f_d,\, g \odot \textstyle\prod_{e \ne d} f_e), \quad
        \theta = \textstyle\prod_d f_d

    where :math:`\eta, \lambda, A` are ``lr``, ``weight_decay``, ``operator``. A subclass says how a weight is split.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate.
        weight_decay: Decoupled decay of every factor.
        operator: Elementwise operator that steps the factors; None is Adam. ``Identity()`` is gradient descent. It is
            code, not state: ``state_dict`` does not hold it.
        options: Further options of the groups.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        operator: Operator | None = None,
        **options: Any,
    ) -> None:
        self.operator = Adam() if operator is None else operator
        if self.operator.coupled_dims:
            raise ValueError(f"{operator!r} couples the entries of a tensor: use an elementwise one, such as Adam().")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **options})

    @abc.abstractmethod
    def _split(self, theta: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        """The factors of a weight, stacked along a new first dimension. ``state`` may hold what the split needs."""

    def _constants(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What :meth:`_split` and the regularisation need to remember."""
        return {}

    def _decay(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> float | Tensor:
        """The decay of this step."""
        decay: float = group["weight_decay"]
        return decay

    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        state = self._constants(p, group)
        factors = self._split(p, state, group)
        memory = {key: value for key, value in self.operator.init(factors).items() if key != "step"}
        return {**state, "factors": factors, **memory}

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        factors = state["factors"]
        stale = (factors.prod(0) != p) | (factors == 0).all(0)
        factors = torch.where(stale, self._split(p, state, group), factors)
        memory = {**state, "step": state["step"] - 1} if self.operator.is_stateful else {}
        direction, memory = self.operator.update(factors, g * _products_of_others(factors), memory)
        factors = (1 - group["lr"] * self._decay(p, state, group)) * factors - group["lr"] * direction
        state.update(memory, factors=factors.to(p.dtype))
        p.copy_(state["factors"].prod(0))

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying keep: torch's own entries and the operator."""
        return {**super().__getstate__(), "operator": self.operator}


def _products_of_others(factors: Tensor) -> Tensor:
    """For each factor the product of all others, without a division."""
    return torch.stack([torch.cat((factors[:d], factors[d + 1 :])).prod(0) for d in range(len(factors))])
