"""The update rules of Appendix D's experiments, each a batched step built from the operators."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, final

import torch
from torch import Tensor

from horst.kernels.horst_step.reference import ham_step_reference, horst_step_reference
from horst.operators import (
    L1,
    Adam,
    CoshEntropy,
    Entropy,
    HyperbolicEntropy,
    Identity,
    LInf,
    Mirror,
    Operator,
    State,
    Steepest,
    dual_step,
)

# Appendix D's grid for the cosh entropy.
COSH_SWEEP = (0.001, 0.005, 0.009, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """An update rule with its learning rates, each a run of its own.

    Args:
        name: Key in tables and files.
        label: Name in figures, the paper's where it has one.
        lrs: Learning rates.
    """

    name: str
    label: str
    lrs: tuple[float, ...] = (0.01,)

    @abc.abstractmethod
    def init(self, theta: Tensor) -> State:
        """The state before the first step."""

    @abc.abstractmethod
    def step(self, theta: Tensor, g: Tensor, state: State, lr: float | Tensor) -> tuple[Tensor, State]:
        """The new theta and the new state."""


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorMethod(Method):
    """``theta - lr * A(theta, g)``, or the exact dual step where the operator begins with a mirror.

    Args:
        operator: The operator A.
        exact: Whether to take the exact dual step.
    """

    operator: Operator
    exact: bool = False

    def init(self, theta: Tensor) -> State:
        """The operator's state."""
        return self.operator.init(theta)

    def step(self, theta: Tensor, g: Tensor, state: State, lr: float | Tensor) -> tuple[Tensor, State]:
        """One step of the operator."""
        if self.exact:
            return dual_step(self.operator, theta, g, state, lr)
        direction, state = self.operator.update(theta, g, state)
        return theta - lr * direction, state


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class AlternatingMethod(Method):
    """HORST or HAM: AdamW's step, then the entropy mirror step along Adam's direction or the raw gradient.

    Args:
        along: Direction; ``"adam"`` is HORST (Algorithm 2), ``"gradient"`` is HAM (Algorithm 1).
        alpha: Strength of the mirror step.
    """

    along: str
    alpha: float

    def init(self, theta: Tensor) -> State:
        """Adam's averages and the number of steps."""
        return {"m": torch.zeros_like(theta), "v": torch.zeros_like(theta), "step": torch.zeros(())}

    def step(self, theta: Tensor, g: Tensor, state: State, lr: float | Tensor) -> tuple[Tensor, State]:
        """One step of the paper's algorithm, without weight decay: it would bound theta and hide the direction."""
        step = state["step"] + 1
        reference = horst_step_reference if self.along == "adam" else ham_step_reference
        own: dict[str, Any] = {"alpha": self.alpha, "beta": 0.0}
        adamw: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
        theta, m, v = reference(theta, g, state["m"], state["v"], float(step), lr=lr, **adamw, **own)
        return theta, {"m": m, "v": v, "step": step}


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagonalMethod(Method):
    r"""An operator run on the factors of a diagonal network: Figure 1 (right) and the proof of Theorem 4.7.

    :math:`f(x) = \langle \theta, x \rangle` with :math:`\theta = w_1 \odot \dots \odot w_L`. Gradient flow on the
    factors, started balanced, is mirror flow on :math:`\theta`: for L = 2 with the entropy.

    Args:
        operator: Elementwise operator that steps every factor.
        depth: Number of factors.
        balanced: Whether to start every factor at the depth-th root of theta; else the first starts at
            ``sqrt(theta)`` and the others at 0 and 1, so that theta starts at 0 and can take either sign.
    """

    operator: Operator
    depth: int = 2
    balanced: bool = True

    def init(self, theta: Tensor) -> State:
        """The factors, stacked before the last dimension, and the operator's state for them."""
        root = theta.abs() ** (1 / self.depth)
        if self.balanced:
            factors = torch.stack([theta.sign() * root, *[root] * (self.depth - 1)], dim=-2)
        else:
            ones = [torch.ones_like(root)] * (self.depth - 2)
            factors = torch.stack([root, torch.zeros_like(root), *ones], dim=-2)
        return {"factors": factors, **self.operator.init(factors)}

    def step(self, theta: Tensor, g: Tensor, state: State, lr: float | Tensor) -> tuple[Tensor, State]:
        """One step on the factors. Theta itself is their product and plays no part."""
        factors = state["factors"]
        memory = {key: value for key, value in state.items() if key != "factors"}
        rate = lr.unsqueeze(-1) if isinstance(lr, Tensor) else lr
        direction, memory = self.operator.update(factors, factor_gradients(factors, g), memory)
        factors = factors - rate * direction
        return factors.prod(-2), {"factors": factors, **memory}


def factor_gradients(factors: Tensor, g: Tensor) -> Tensor:
    r"""The gradient in every factor from the gradient in theta: :math:`\partial_{w_i} = g \odot \prod_{j \ne i} w_j`.

    Args:
        factors: Factors, ``(..., depth, features)``.
        g: Gradient in theta, ``(..., features)``.

    Example:
        >>> factor_gradients(torch.tensor([[2.0], [3.0]]), torch.tensor([10.0]))
        tensor([[30.],
                [20.]])
    """
    depth = factors.shape[-2]
    # Not theta / w_i: a factor may be zero.
    others = [torch.cat([factors[..., :i, :], factors[..., i + 1 :, :]], dim=-2).prod(-2) for i in range(depth)]
    return g.unsqueeze(-2) * torch.stack(others, dim=-2)


def methods_by_name(*, gamma: float = 1e-3, horst_alpha: float = 5.0, ham_alpha: float = 200.0) -> dict[str, Method]:
    """Every method of the toy suite with the learning rates of Appendix D, by name.

    Coordinate descent, HORST and HAM are not among the paper's toy runs; they get its baseline rate of 0.01.

    Args:
        gamma: Parameter of the hyperbolic entropy.
        horst_alpha: HORST's alpha.
        ham_alpha: HAM's alpha.

    Example:
        >>> methods_by_name()["sign_sgd"].lrs
        (0.1,)
    """
    entropy = Mirror(Entropy())
    methods: list[Method] = [
        OperatorMethod(name="sgd", label="SGD", operator=Identity()),
        OperatorMethod(name="sign_sgd", label="SignSGD", operator=Steepest(LInf()), lrs=(0.1,)),
        OperatorMethod(name="coordinate", label="Coordinate descent", operator=Steepest(L1())),
        OperatorMethod(name="exp_sgd", label="Exp-SGD", operator=entropy, exact=True),
        OperatorMethod(
            name="hyperbolic", label="Hyperbolic entropy", operator=Mirror(HyperbolicEntropy(gamma)), exact=True
        ),
        OperatorMethod(name="cosh", label="cosh entropy", operator=Mirror(CoshEntropy()), exact=True, lrs=COSH_SWEEP),
        OperatorMethod(name="adam", label="Adam", operator=Adam()),
        OperatorMethod(name="exp_adam", label="Exp-Adam", operator=entropy @ Adam(), exact=True),
        OperatorMethod(name="adam_exp", label="Adam-Exp", operator=Adam() @ entropy),
        AlternatingMethod(name="horst", label="HORST", along="adam", alpha=horst_alpha),
        AlternatingMethod(name="ham", label="HAM", along="gradient", alpha=ham_alpha),
    ]
    return {method.name: method for method in methods}
