"""Any operator of Sections 3 and 4 run as a torch optimizer: Exp-SGD, Exp-Adam, Adam-Exp and whatever else composes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from horst.operators import Operator, State, dual_step, split_mirror
from horst.optimizers.hyperparameters import with_own_options


class OperatorOptimizer(Optimizer):
    r"""An operator as an optimizer.

    .. math::
        \theta_{k+1} = \theta_k - \eta\, A(\theta_k, g_k) - \eta \lambda\, \theta_k

    where :math:`A, \eta, \lambda` are ``operator``, ``lr``, ``weight_decay``. With ``exact_mirror=True`` and an
    operator ``Mirror(R) @ B``, the first two terms become the exact dual step,
    :math:`\nabla R(\theta') = \nabla R(\theta_k) - \eta\, B(\theta_k, g_k)`: the paper's exponentiated updates.

    The operator acts on every parameter tensor by itself, seen as one vector (as matrices where it holds a matrix norm
    such as ``Spectral``). Its memory lives in ``optimizer.state`` under the operator's own names, shaped like the
    parameter, so that ``state_dict`` and tools that mask or reset the state work as for torch's optimizers.

    Args:
        params: Parameters or parameter groups. ``lr``, ``weight_decay``, ``exact_mirror``, ``maximize`` may differ by
            group.
        operator: Operator, with or without memory. It is code, not state: ``state_dict`` does not hold it.
        lr: Learning rate, at least 0.
        weight_decay: Decoupled decay, as in AdamW, of the weights before the step.
        exact_mirror: Whether to take the exact dual step of the leading ``Mirror``.
        maximize: Whether to ascend.

    Example:
        >>> from horst.operators import Adam, Entropy, Mirror
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> exp_adam = OperatorOptimizer([weight], Mirror(Entropy()) @ Adam(), lr=0.1, exact_mirror=True)
        >>> weight.sum().backward()
        >>> exp_adam.step()
        >>> weight.detach()
        tensor([ 0.9048, -1.1052])

    References: Section 3 (update rule), Definition 3.8.
    """

    def __init__(
        self,
        params: ParamsT,
        operator: Operator,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        exact_mirror: bool = False,
        maximize: bool = False,
    ) -> None:
        if not isinstance(operator, Operator):
            raise TypeError(
                f"operator must be an Operator, got {operator!r}. "
                "Wrap norms in Steepest(norm) and potentials in Mirror(potential)."
            )
        self.operator = operator
        defaults = {"lr": lr, "weight_decay": weight_decay, "exact_mirror": exact_mirror, "maximize": maximize}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options and shapes are checked against the operator."""
        group = {**self.defaults, **param_group}
        # Checked here, not in __init__, so that a group's own values are seen too.
        if not group["lr"] >= 0:  # this form refuses NaN too
            raise ValueError(f"lr must be at least 0, got {group['lr']}.")
        if not group["weight_decay"] >= 0:
            raise ValueError(f"weight_decay must be at least 0, got {group['weight_decay']}.")
        if group["exact_mirror"]:
            split_mirror(self.operator)
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if self.operator.coupled_dims == 2 and p.dim() < 2:
                self.param_groups.pop()
                raise ValueError(
                    f"{self.operator!r} acts on matrices, but a parameter has shape {tuple(p.shape)}. "
                    "Give vectors (biases, norms) to another optimizer."
                )

    def __getstate__(self) -> dict[str, Any]:
        """What pickling and copying keep: torch's own entries and the operator."""
        return {**super().__getstate__(), "operator": self.operator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint; options that it lacks keep their values.

        Counters keep their own dtype, which torch would cast to the parameter's.
        """
        super().load_state_dict(with_own_options(self, state_dict))
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        for p, index in zip(params, indices, strict=True):
            for key, saved in state_dict["state"].get(index, {}).items():
                if key.rpartition(".")[2] == "step":
                    self.state[p][key] = saved.detach().clone().to(p.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Function that evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() > 0:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        assert p.grad is not None
        if p.grad.is_sparse:
            raise RuntimeError(
                "OperatorOptimizer does not take sparse gradients. Build the embedding with sparse=False."
            )
        if not self.state[p]:
            self.state[p] = self.operator.init(p)
        # Only what couples entries needs the vector view; elementwise operators keep any shape.
        flat = self.operator.coupled_dims == 1
        theta = p.reshape(-1) if flat else p
        grad = p.grad.reshape(-1) if flat else p.grad
        g = -grad if group["maximize"] else grad
        state = _reshaped(self.state[p], p.shape, theta.shape)
        lr = group["lr"]
        if group["exact_mirror"]:
            new, state = dual_step(self.operator, theta, g, state, lr)
        else:
            direction, state = self.operator.update(theta, g, state)
            new = theta - lr * direction
        if group["weight_decay"] != 0:
            new = new - lr * group["weight_decay"] * theta
        self.state[p] = _reshaped(state, theta.shape, p.shape)
        p.copy_(new.reshape(p.shape))


def _reshaped(state: State, old: torch.Size, new: torch.Size) -> State:
    """The tensors shaped like the parameter, seen in another shape."""
    return {key: value.reshape(new) if value.shape == old else value for key, value in state.items()}
