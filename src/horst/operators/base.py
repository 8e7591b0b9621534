r"""Section 3: optimizers as operators :math:`(\theta, g) \mapsto` direction, and the algebra they live in.

An operator :math:`A` is run as :math:`\theta_{k+1} = \theta_k - \eta\, A(\theta_k, g_k)`. Composition, sum, multiple
and bracket of operators are operators again, also when a part has memory: then the state of the whole is the state of
its parts, handed in and handed back, and every function stays pure.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import final

from torch import Tensor

# Flat, so that the tools that look into an optimizer's state for tensors shaped like the parameter find them.
State = dict[str, Tensor]


class Operator(abc.ABC):
    r"""A map :math:`(\theta, g) \mapsto` direction, used as ``theta - lr * A(theta, g)``.

    Operators without memory are called, ``A(theta, g)``. One with memory (:class:`~horst.operators.Adam`) is stepped:
    ``state = A.init(theta)``, then ``direction, state = A.update(theta, g, state)``. ``update`` works for both, so code
    that must take any operator uses it alone.

    Leading dimensions are a batch: a vector operator treats ``theta[..., :]`` as one parameter vector, a matrix
    operator ``theta[..., :, :]`` as one matrix.
    """

    @property
    def made_of(self) -> tuple[Operator, ...]:
        """The operators that it combines."""
        return ()

    @property
    def is_stateful(self) -> bool:
        """Whether the operator has memory."""
        return any(part.is_stateful for part in self.made_of)

    @property
    def coupled_dims(self) -> int:
        """How many trailing dimensions it treats as one object: 0 elementwise, 1 vectors, 2 matrices."""
        return max((part.coupled_dims for part in self.made_of), default=0)

    def init(self, theta: Tensor) -> State:
        """The state before the first step: empty for an operator without memory."""
        return _merge([part.init(theta) for part in self.made_of], self.made_of)

    @abc.abstractmethod
    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """The direction at ``theta`` for the gradient ``g``, and the new state. Changes nothing in place."""

    def __call__(self, theta: Tensor, g: Tensor) -> Tensor:
        """The direction at ``theta`` for the gradient ``g``."""
        if self.is_stateful:
            raise TypeError(
                f"{self!r} has memory and cannot be called. Start with state = operator.init(theta) and step it: "
                "direction, state = operator.update(theta, g, state)."
            )
        return self.update(theta, g, {})[0]

    def __matmul__(self, other: Operator) -> Operator:
        """The paper's AB: ``(A @ B)(theta, g) = A(theta, B(theta, g))``."""
        parts = [a.parts if isinstance(a, Composition) else (a,) for a in (self, _checked(other, "@"))]
        return Composition((*parts[0], *parts[1]))

    def __rmatmul__(self, other: object) -> Operator:
        return _checked(other, "@") @ self

    def __add__(self, other: Operator) -> Operator:
        """``(A + B)(theta, g) = A(theta, g) + B(theta, g)``."""
        terms = [a.terms if isinstance(a, Sum) else (a,) for a in (self, _checked(other, "+"))]
        return Sum((*terms[0], *terms[1]))

    def __sub__(self, other: Operator) -> Operator:
        """``(A - B)(theta, g) = A(theta, g) - B(theta, g)``."""
        return self + (-1.0) * _checked(other, "-")

    def __neg__(self) -> Operator:
        return (-1.0) * self

    def __mul__(self, factor: float) -> Operator:
        """``(c * A)(theta, g) = c * A(theta, g)``."""
        if isinstance(factor, Operator):
            raise TypeError("A * B is not defined for two operators. Use A @ B for the composition AB.")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            raise TypeError(f"an operator can be multiplied by a real number, got {type(factor).__name__}.")
        if not math.isfinite(factor):
            raise ValueError(f"the factor of an operator must be finite, got {factor}.")
        return Scaled(float(factor), self)

    __rmul__ = __mul__


class Memoryless(Operator):
    """An operator without memory: write ``__call__``, and ``update`` follows."""

    @abc.abstractmethod
    def __call__(self, theta: Tensor, g: Tensor) -> Tensor:
        """The direction at ``theta`` for the gradient ``g``."""

    @final
    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """The direction, and the empty state again."""
        return self(theta, g), {}


@final
@dataclass(frozen=True)
class Identity(Memoryless):
    r""":math:`I(\theta, g) = g`: gradient descent, and the unit of composition.

    Example:
        >>> import torch
        >>> Identity()(torch.ones(2), torch.tensor([1.0, -2.0]))
        tensor([ 1., -2.])
    """

    def __call__(self, theta: Tensor, g: Tensor) -> Tensor:
        """The gradient itself."""
        check_shapes(theta, g)
        return g


@final
@dataclass(frozen=True)
class Composition(Operator):
    r"""The paper's :math:`AB(\theta, g) = A(\theta, B(\theta, g))`, for any number of parts; made by ``A @ B``.

    All parts see the same :math:`\theta`, so composition is associative, and ``(A @ B) @ C`` is stored flat.

    Args:
        parts: The operators, the one applied last first: ``(A, B)`` is AB.

    Example:
        >>> import torch
        >>> from horst.operators import Adam, Entropy, Mirror
        >>> exp_adam = Mirror(Entropy()) @ Adam()
        >>> theta, g = torch.tensor([0.5, -2.0]), torch.tensor([3.0, 3.0])
        >>> direction, state = exp_adam.update(theta, g, exp_adam.init(theta))
        >>> direction
        tensor([0.5000, 2.0000])
        >>> sorted(state)
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    parts: tuple[Operator, ...]

    @property
    def made_of(self) -> tuple[Operator, ...]:
        """The parts."""
        return self.parts

    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """Apply the parts, the last first."""
        states = _split(state, self.parts)
        direction = g
        for i in reversed(range(len(self.parts))):
            direction, states[i] = self.parts[i].update(theta, direction, states[i])
        return direction, _merge(states, self.parts)


@final
@dataclass(frozen=True)
class Sum(Operator):
    r""":math:`\sum_i A_i(\theta, g)`; made by ``A + B``. Every term keeps its own memory.

    Args:
        terms: The operators to add.
    """

    terms: tuple[Operator, ...]

    @property
    def made_of(self) -> tuple[Operator, ...]:
        """The terms."""
        return self.terms

    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """Add the directions of the terms."""
        states = _split(state, self.terms)
        total, states[0] = self.terms[0].update(theta, g, states[0])
        for i, term in enumerate(self.terms[1:], start=1):
            direction, states[i] = term.update(theta, g, states[i])
            total = total + direction
        return total, _merge(states, self.terms)


@final
@dataclass(frozen=True)
class Scaled(Operator):
    r""":math:`c\, A(\theta, g)`; made by ``c * A``.

    Args:
        factor: The number :math:`c`.
        operator: The operator :math:`A`.
    """

    factor: float
    operator: Operator

    @property
    def made_of(self) -> tuple[Operator, ...]:
        """The operator alone."""
        return (self.operator,)

    def update(self, theta: Tensor, g: Tensor, state: State) -> tuple[Tensor, State]:
        """Scale the direction."""
        direction, state = self.operator.update(theta, g, state)
        return self.factor * direction, state


def bracket(a: Operator, b: Operator) -> Operator:
    r"""The Lie bracket :math:`[A, B] = AB - BA` of Definition 3.3. It vanishes where the operators commute.

    Example:
        >>> import torch
        >>> from horst.operators import HyperbolicEntropy, LInf, Mirror, Steepest
        >>> S, M = Steepest(LInf()), Mirror(HyperbolicEntropy(gamma=1.0))
        >>> bracket(S, M)(torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.0]))
        tensor([ 0.0000, -2.1623])
    """
    return a @ b - b @ a


def check_shapes(theta: Tensor, g: Tensor, coupled_dims: int = 0) -> None:
    """Raise unless ``theta`` and ``g`` have one shape with at least ``coupled_dims`` dimensions."""
    if theta.shape != g.shape:
        raise ValueError(
            f"theta and g must have the same shape, got {tuple(theta.shape)} and {tuple(g.shape)}. "
            "Expand the smaller one first: an operator never broadcasts."
        )
    if theta.dim() < coupled_dims:
        kind = "a vector (one dimension or more)" if coupled_dims == 1 else "a matrix (two dimensions or more)"
        raise ValueError(f"this operator acts on {kind}, got shape {tuple(theta.shape)}. Reshape theta and g first.")


def _merge(states: list[State], owners: tuple[Operator, ...]) -> State:
    """One flat state: the keys of the only part with memory as they are, else prefixed with the part's index."""
    if sum(owner.is_stateful for owner in owners) <= 1:
        return {key: value for state in states for key, value in state.items()}
    return {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}


def _split(state: State, owners: tuple[Operator, ...]) -> list[State]:
    """The inverse of :func:`_merge`."""
    if sum(owner.is_stateful for owner in owners) <= 1:
        return [dict(state) if owner.is_stateful else {} for owner in owners]
    split: list[State] = [{} for _ in owners]
    for key, value in state.items():
        index, _, rest = key.partition(".")
        split[int(index)][rest] = value
    return split


def _checked(other: object, symbol: str) -> Operator:
    if not isinstance(other, Operator):
        raise TypeError(
            f"an operator can only meet another operator in {symbol}, got {type(other).__name__}. "
            "Wrap norms in Steepest(norm) and potentials in Mirror(potential)."
        )
    return other
