"""Definition 3.8: the mirror operator, and the exact dual step it is the first order of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from horst.operators.base import Composition, Identity, Memoryless, Operator, State, check_shapes
from horst.operators.potentials import Potential


@final
@dataclass(frozen=True)
class Mirror(Memoryless):
    r"""Mirror descent with a potential: linear, unbounded in general (Lemma 4.2).

    .. math::
        M_R(\theta, g) = \nabla^2 R(\theta)^{-1} g

    where :math:`R` is ``potential``. Called, it is this operator, the first order of a mirror step. The method
    :meth:`step` takes the exact one, :math:`\nabla R(\theta') = \nabla R(\theta) - \eta\, d`; the two agree up to
    :math:`O(\eta^2)`.

    Args:
        potential: Potential, such as ``Euclidean()``, ``Entropy()``, ``HyperbolicEntropy(gamma)``, ``CoshEntropy()``,
            ``CustomPotential(value)``.

    Example:
        >>> import torch
        >>> from horst.operators import Entropy
        >>> M, theta, g = Mirror(Entropy()), torch.tensor([2.0, -1.0]), torch.tensor([1.0, 1.0])
        >>> M(theta, g)
        tensor([2., 1.])
        >>> M.step(theta, g, lr=0.01)  # theta - 0.01 * M(theta, g), up to the second order
        tensor([ 1.9801, -1.0101])
    """

    potential: Potential

    def __post_init__(self) -> None:
        if not isinstance(self.potential, Potential):
            raise TypeError(
                f"potential must be a Potential such as Entropy(), got {self.potential!r}. "
                "Give an instance, and wrap a function of your own in CustomPotential(function)."
            )

    @property
    def coupled_dims(self) -> int:
        """0 for a separable potential, else 1."""
        return 0 if self.potential.separable else 1

    def __call__(self, theta: Tensor, g: Tensor) -> Tensor:
        """The inverse Hessian times ``g``."""
        check_shapes(theta, g, self.coupled_dims)
        return self.potential.apply_inverse_hessian(theta, g)

    def step(self, theta: Tensor, direction: Tensor, lr: float | Tensor) -> Tensor:
        """The exact dual step from ``theta`` along ``direction``."""
        check_shapes(theta, direction, self.coupled_dims)
        return self.potential.step(theta, direction, lr)


def split_mirror(operator: Operator) -> tuple[Mirror, Operator]:
    """An operator ``Mirror @ rest`` as the pair ``(Mirror, rest)``; a plain ``Mirror`` has ``rest = Identity()``.

    Raises:
        ValueError: The operator does not begin with a mirror, so there is no dual step to take.
    """
    if isinstance(operator, Mirror):
        return operator, Identity()
    if isinstance(operator, Composition) and isinstance(operator.parts[0], Mirror):
        rest = operator.parts[1:]
        return operator.parts[0], rest[0] if len(rest) == 1 else Composition(rest)
    raise ValueError(
        f"the exact dual step needs an operator that begins with a mirror, Mirror(...) @ rest, got {operator!r}. "
        "Use the first-order step instead."
    )


def dual_step(operator: Operator, theta: Tensor, g: Tensor, state: State, lr: float | Tensor) -> tuple[Tensor, State]:
    r"""One exact mirror step of ``Mirror @ rest``: the rest gives the direction, the mirror's dual step takes it.

    For the entropy this is the paper's Exp- update, :math:`\theta \odot \exp(-\eta\, \mathrm{sign}(\theta) \odot d)`.

    Args:
        state: The state of ``operator``, as for :meth:`~horst.operators.Operator.update`.

    Returns:
        The new ``theta`` and the new state.

    Example:
        >>> import torch
        >>> from horst.operators import Adam, Entropy
        >>> exp_adam, theta = Mirror(Entropy()) @ Adam(), torch.tensor([1.0, -1.0])
        >>> dual_step(exp_adam, theta, torch.tensor([3.0, 3.0]), exp_adam.init(theta), lr=0.1)[0]
        tensor([ 0.9048, -1.1052])
    """
    mirror, rest = split_mirror(operator)
    direction, state = rest.update(theta, g, state)
    return mirror.step(theta, direction, lr), state
