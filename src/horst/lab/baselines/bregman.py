"""LinBreg and AdaBreg: linearised Bregman iterations, which start sparse and add weights that are needed.

References: Bungert, Roith, Tenbrinck and Burger, *A Bregman Learning Framework for Sparse Neural Networks*, JMLR 2022.
The rule that moves lambda towards a target sparsity is ours; theirs adds and subtracts fixed amounts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from horst.lab.baselines.per_parameter import PerParameter
from horst.operators import Operator
from horst.sparsity.masks import check_sparsity


class LinBreg(PerParameter):
    r"""Gradient steps on a dual variable; the weight is its soft threshold.

    .. math::
        v_{k+1} &= v_k - \eta\, A(g_k), \quad v_0 = \theta_0 / \delta + \lambda_0\, \mathrm{sign}(\theta_0) \\
        \theta_{k+1} &= \mathrm{soft}(\delta v_{k+1},\, \delta \lambda_{k+1}), \quad
            \mathrm{soft}(x, t) = \mathrm{sign}(x) \max(|x| - t, 0)

    where :math:`\eta, \delta, \lambda_0, A` are ``lr``, ``delta``, ``l1``, ``operator``: the gradient itself for
    LinBreg, ``Adam()`` for AdaBreg. A zero weight stays zero until its dual variable has gone as far as
    :math:`\lambda`. With fixed :math:`\lambda` this is mirror descent with the potential ``ElasticNet(l1, delta)``.

    With a target sparsity :math:`s^*`, each tensor has a :math:`\lambda` of its own, which every step moves towards it:
    :math:`\lambda_{k+1} = \lambda_k \exp(\rho\, (s^* - s_k))`, where :math:`\rho, s^*` are ``rate``, ``sparsity`` and
    :math:`s_k` is the share of zeros.

    A weight that something else has changed, a mask for one, gets the dual variable of a start.

    Args:
        params: Parameters or groups, as for any torch optimizer.
        lr: Learning rate.
        operator: Elementwise operator that gives the direction; None is the gradient. It is code, not state.
        l1: First strength of the L1 term. It is in units of the dual variable, which moves by ``lr`` times a gradient.
        delta: Size of the weights per unit of the dual variable.
        sparsity: Target share of zeros of every tensor; None keeps ``l1``.
        rate: Relative change of lambda per step and unit of sparsity.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([0.0, 0.0]))
        >>> optimizer = LinBreg([weight], lr=0.1, l1=0.15)
        >>> for _ in range(2):
        ...     weight.grad = torch.tensor([-1.0, 0.5])
        ...     optimizer.step()
        >>> weight.detach()
        tensor([0.0500, -0.0000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        operator: Operator | None = None,
        *,
        l1: float = 0.1,
        delta: float = 1.0,
        sparsity: float | None = None,
        rate: float = 0.1,
    ) -> None:
        if not delta > 0:
            raise ValueError(f"delta must be above 0, got {delta}. 1 is the default.")
        if sparsity is not None:
            check_sparsity(sparsity)
        self.operator = operator
        defaults = {"lr": lr, "l1": l1, "delta": delta, "sparsity": sparsity, "rate": rate}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying keep: torch's own entries and the operator."""
        return {**super().__getstate__(), "operator": self.operator}

    def _start(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        l1 = torch.full((), group["l1"], dtype=p.dtype, device=p.device)
        memory = self.operator.init(p) if self.operator else {}
        memory.pop("step", None)
        return {"dual": _first_dual(p, l1, group["delta"]), "l1": l1, **memory}

    def _update(self, p: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        delta, l1 = group["delta"], state["l1"]
        changed = _weight(state["dual"], l1, delta) != p
        dual = torch.where(changed, _first_dual(p, l1, delta), state["dual"])
        if self.operator is not None:
            g, memory = self.operator.update(p, g, {**state, "step": state["step"] - 1})
            state.update(memory)
        state["dual"] = dual - group["lr"] * g
        if group["sparsity"] is not None:
            zeros = (_weight(state["dual"], l1, delta) == 0).to(p.dtype).mean()
            state["l1"] = l1 * torch.exp(group["rate"] * (group["sparsity"] - zeros))
        p.copy_(_weight(state["dual"], state["l1"], delta))


@torch.no_grad()
def sparse_start(weights: list[Tensor], density: float) -> None:
    """Keep a random share of each weight's entries, scaled so that the sum of squares stays about the same.

    Args:
        weights: Tensors, changed in place.
        density: Share of the entries that are kept, in (0, 1].

    Example:
        >>> weight = torch.ones(1000, 10)
        >>> sparse_start([weight], density=0.25)
        >>> weight.unique()
        tensor([0., 2.])
    """
    if not 0 < density <= 1:
        raise ValueError(f"density must lie in (0, 1], got {density}. 1 keeps all weights.")
    for weight in weights:
        kept = torch.rand_like(weight) < density
        weight.mul_(kept / density**0.5)


def _weight(dual: Tensor, l1: Tensor, delta: float) -> Tensor:
    """The soft threshold."""
    return delta * dual.sign() * (dual.abs() - l1).clamp(min=0)


def _first_dual(theta: Tensor, l1: Tensor, delta: float) -> Tensor:
    """The dual variable of least size that has this weight."""
    return theta / delta + l1 * theta.sign()
