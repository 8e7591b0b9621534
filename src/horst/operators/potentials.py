r"""The mirror potentials R of Examples 3.9 to 3.11, and the elastic net.

Each has its value, mirror map, inverse Hessian and exact dual step.

All but a non-separable :class:`CustomPotential` are sums over coordinates, :math:`R(\theta) = \sum_i r(\theta_i)`, so
the Hessian is diagonal and its inverse is returned as a vector.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

Rate = float | Tensor


class Potential(abc.ABC):
    r"""A convex function R on the last dimension of a tensor, batched over the others."""

    @property
    def separable(self) -> bool:
        r"""Whether :math:`R(\theta) = \sum_i r(\theta_i)`."""
        return True

    @abc.abstractmethod
    def __call__(self, theta: Tensor) -> Tensor:
        r"""The value :math:`R(\theta)`, the last dimension reduced."""

    @abc.abstractmethod
    def gradient(self, theta: Tensor) -> Tensor:
        r"""The mirror map :math:`\nabla R(\theta)`."""

    @abc.abstractmethod
    def apply_inverse_hessian(self, theta: Tensor, g: Tensor) -> Tensor:
        r""":math:`\nabla^2 R(\theta)^{-1} g`."""

    @abc.abstractmethod
    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        r"""The exact dual step: the :math:`\theta'` with :math:`\nabla R(\theta') = \nabla R(\theta) - \eta\, d`."""

    def interior(self, theta: Tensor) -> Tensor:
        """Where ``theta`` lies inside the domain of R, entry by entry."""
        return torch.isfinite(theta)


class SeparablePotential(Potential):
    r"""A potential :math:`R(\theta) = \sum_i r(\theta_i)`: write ``inverse_hessian``, its application follows."""

    @abc.abstractmethod
    def inverse_hessian(self, theta: Tensor) -> Tensor:
        r"""The diagonal of :math:`\nabla^2 R(\theta)^{-1}`."""

    @final
    def apply_inverse_hessian(self, theta: Tensor, g: Tensor) -> Tensor:
        """The diagonal times ``g``."""
        return self.inverse_hessian(theta) * g


@final
@dataclass(frozen=True)
class Euclidean(SeparablePotential):
    r""":math:`R(\theta) = \frac12 \|\theta\|_2^2` (Example 3.9): gradient descent, L2 bias, inversely 1-coercive.

    Example:
        >>> Euclidean().inverse_hessian(torch.tensor([0.0, -3.0]))
        tensor([1., 1.])
    """

    def __call__(self, theta: Tensor) -> Tensor:
        """Half the squared length."""
        return 0.5 * theta.square().sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        """Theta itself."""
        return theta

    def inverse_hessian(self, theta: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(theta)

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The gradient step."""
        return theta - lr * direction


@final
@dataclass(frozen=True)
class Entropy(SeparablePotential):
    r"""The entropy, with mirror map :math:`\nabla R(\theta) = \log \theta`, on each half line: L1 bias, not coercive.

    .. math::
        R(\theta) = \sum_i |\theta_i| \log |\theta_i| - |\theta_i|, \quad
        \nabla R(\theta) = \mathrm{sign}(\theta) \log |\theta|, \quad
        \nabla^2 R(\theta)^{-1} = |\theta|

    which is the paper's :math:`\log \theta` for positive weights and its mirror image for negative ones. The exact dual
    step, :math:`\theta \odot \exp(-\eta\, \mathrm{sign}(\theta) \odot d)`, never changes a sign and keeps zero at zero.

    Example:
        >>> Entropy().step(torch.tensor([1.0, -1.0, 0.0]), torch.ones(3), lr=0.5)
        tensor([ 0.6065, -1.6487,  0.0000])
    """

    def __call__(self, theta: Tensor) -> Tensor:
        """The negative entropy of the magnitudes."""
        magnitude = theta.abs()
        return (torch.xlogy(magnitude, magnitude) - magnitude).sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        """The signed logarithm; it diverges at zero, the boundary of the domain."""
        return theta.sign() * theta.abs().log()

    def inverse_hessian(self, theta: Tensor) -> Tensor:
        """The magnitudes."""
        return theta.abs()

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The exponentiated step."""
        return theta * torch.exp(-lr * theta.sign() * direction)

    def interior(self, theta: Tensor) -> Tensor:
        """Everything but zero, where the two half lines meet."""
        return torch.isfinite(theta) & (theta != 0)


@final
@dataclass(frozen=True)
class HyperbolicEntropy(SeparablePotential):
    r"""The hyperbolic entropy (Example 3.10): L1 bias, inversely :math:`\gamma`-coercive.

    .. math::
        R_\gamma(\theta) = \sum_i \theta_i\, \mathrm{arcsinh}(\theta_i / \gamma) - \sqrt{\theta_i^2 + \gamma^2}, \quad
        \nabla R_\gamma(\theta) = \mathrm{arcsinh}(\theta / \gamma), \quad
        \nabla^2 R_\gamma(\theta)^{-1} = \sqrt{\theta^2 + \gamma^2}

    The exact dual step is :math:`\gamma \sinh(\mathrm{arcsinh}(\theta / \gamma) - \eta\, d)`. As :math:`\gamma \to 0`
    it tends to :class:`Entropy`.

    Args:
        gamma: The width of the region around zero where the geometry is Euclidean. Positive.

    Example:
        >>> HyperbolicEntropy(gamma=4.0).inverse_hessian(torch.tensor([3.0, 0.0]))
        tensor([5., 4.])
    """

    gamma: float

    def __post_init__(self) -> None:
        if not 0 < self.gamma < float("inf"):
            raise ValueError(f"gamma must be positive and finite, got {self.gamma}. For gamma = 0 use Entropy().")

    def __call__(self, theta: Tensor) -> Tensor:
        """The hyperbolic entropy."""
        return (theta * torch.asinh(theta / self.gamma) - self.inverse_hessian(theta)).sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        """The inverse hyperbolic sine."""
        return torch.asinh(theta / self.gamma)

    def inverse_hessian(self, theta: Tensor) -> Tensor:
        """The root of the sum of squares, without overflow."""
        return torch.hypot(theta, torch.full_like(theta, self.gamma))

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The hyperbolic step."""
        return self.gamma * torch.sinh(torch.asinh(theta / self.gamma) - lr * direction)


@final
@dataclass(frozen=True)
class CoshEntropy(SeparablePotential):
    r""":math:`R(\theta) = \sum_i \cosh \theta_i` (Example 3.11): L-infinity bias, Legendre but not inversely coercive.

    .. math::
        \nabla R(\theta) = \sinh \theta, \quad \nabla^2 R(\theta)^{-1} = 1 / \cosh \theta

    The exact dual step is :math:`\mathrm{arcsinh}(\sinh \theta - \eta\, d)`. The inverse Hessian vanishes for large
    weights: this is where it stalls.

    Example:
        >>> CoshEntropy().inverse_hessian(torch.tensor([0.0, 1000.0]))
        tensor([1., 0.])
    """

    def __call__(self, theta: Tensor) -> Tensor:
        """The sum of the hyperbolic cosines."""
        return torch.cosh(theta).sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        """The hyperbolic sine."""
        return torch.sinh(theta)

    def inverse_hessian(self, theta: Tensor) -> Tensor:
        """The reciprocal of the hyperbolic cosine; zero where that overflows."""
        return 1 / torch.cosh(theta)

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The dual step, in logarithms where sinh would lose or overflow the step."""
        magnitude, shift = theta.abs(), lr * direction
        # sinh(t) = e^t / 2 to 1e-17 beyond 20; then arcsinh(sinh t - s) = t + log(1 - 2 s e^-t).
        relative = -2 * theta.sign() * shift * torch.exp(-magnitude)
        far = (magnitude > 20) & (relative.abs() < 0.5)
        near = torch.asinh(torch.sinh(torch.where(far, torch.zeros_like(theta), theta)) - shift)
        return torch.where(far, theta.sign() * (magnitude + torch.log1p(relative.clamp(-0.5, 0.5))), near)


@final
@dataclass(frozen=True)
class ElasticNet(SeparablePotential):
    r"""The elastic net, whose mirror descent is the linearised Bregman iteration: weights are zero until needed.

    .. math::
        R(\theta) = \lambda \|\theta\|_1 + \tfrac{1}{2 \delta} \|\theta\|_2^2, \quad
        \nabla R(\theta) = \theta / \delta + \lambda\, \mathrm{sign}(\theta), \quad
        \nabla R^*(v) = \delta\, \mathrm{sign}(v) \max(|v| - \lambda, 0)

    where :math:`\lambda, \delta` are ``l1``, ``delta``. R has a kink at zero: any :math:`|v| \le \lambda` belongs to a
    zero weight, and the mirror map gives 0. So a step forgets where inside the kink it was; an optimizer that is to
    leave it in several steps keeps :math:`v` (:meth:`inverse_gradient` gives its weights).

    Args:
        l1: Strength of the L1 term, at least 0; 0 is the Euclidean potential over ``delta``.
        delta: Inverse strength of the L2 term. Positive.

    Example:
        >>> ElasticNet(l1=0.5, delta=2.0).step(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-1.0, -1.0, 0.2]), lr=1.0)
        tensor([3., 1., -0.])
    """

    l1: float
    delta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.l1 < float("inf"):
            raise ValueError(f"l1 must be finite and at least 0, got {self.l1}. Use 0 for no L1 term.")
        if not 0 < self.delta < float("inf"):
            raise ValueError(f"delta must be positive and finite, got {self.delta}. 1 is the usual one.")

    def __call__(self, theta: Tensor) -> Tensor:
        """The weighted sum of both norms."""
        return (self.l1 * theta.abs() + theta.square() / (2 * self.delta)).sum(-1)

    def gradient(self, theta: Tensor) -> Tensor:
        """The gradient; at zero the subgradient 0."""
        return theta / self.delta + self.l1 * theta.sign()

    def inverse_gradient(self, dual: Tensor) -> Tensor:
        r"""The weight :math:`\nabla R^*(v)` of a dual variable: the soft threshold."""
        return self.delta * dual.sign() * (dual.abs() - self.l1).clamp(min=0)

    def inverse_hessian(self, theta: Tensor) -> Tensor:
        """Delta; zero at a zero weight, which a small step does not move."""
        return self.delta * (theta != 0).to(theta.dtype)

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The soft threshold of the moved dual variable."""
        return self.inverse_gradient(self.gradient(theta) - lr * direction)

    def interior(self, theta: Tensor) -> Tensor:
        """Everything but zero, where the kink is."""
        return torch.isfinite(theta) & (theta != 0)


@final
@dataclass(frozen=True)
class CustomPotential(Potential):
    r"""A potential of one's own: give R, and what is not given comes from autograd.

    For a separable R the inverse Hessian is the reciprocal of the diagonal second derivative, and a probe along a
    second direction raises if R turns out not to be separable. For ``separable=False`` the full Hessian of every vector
    is built and solved with (``D`` backward passes: for small D).

    Args:
        value: Function :math:`R`, from shape ``(..., D)`` to ``(...)``, differentiable by autograd.
        mirror_map: Gradient :math:`\nabla R`. None: by autograd.
        inverse_mirror_map: Inverse :math:`(\nabla R)^{-1}`, needed by the exact dual step alone.
        inverse_hessian: The diagonal of :math:`\nabla^2 R^{-1}`. None: by autograd. For separable R only.
        separable: Whether :math:`R(\theta) = \sum_i r(\theta_i)`.

    Example:
        >>> quartic = CustomPotential(lambda theta: (theta**4 / 12 + theta**2 / 2).sum(-1))
        >>> quartic.apply_inverse_hessian(torch.tensor([0.0, 1.0]), torch.ones(2))
        tensor([1.0000, 0.5000])
    """

    value: Callable[[Tensor], Tensor]
    mirror_map: Callable[[Tensor], Tensor] | None = None
    inverse_mirror_map: Callable[[Tensor], Tensor] | None = None
    inverse_hessian: Callable[[Tensor], Tensor] | None = None
    separable: bool = True  # type: ignore[assignment]  # a field here, a property of the interface

    def __post_init__(self) -> None:
        if self.inverse_hessian is not None and not self.separable:
            raise ValueError(
                "inverse_hessian gives the diagonal, which a non-separable potential does not have: "
                "leave it out (the full Hessian comes from autograd), or set separable=True."
            )

    def __call__(self, theta: Tensor) -> Tensor:
        """The value given."""
        return self.value(theta)

    def gradient(self, theta: Tensor) -> Tensor:
        """The mirror map given, or autograd's gradient."""
        if self.mirror_map is not None:
            return self.mirror_map(theta)
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            return torch.autograd.grad(self.value(theta).sum(), theta)[0]

    def apply_inverse_hessian(self, theta: Tensor, g: Tensor) -> Tensor:
        """The diagonal times ``g``, or the solution of a linear system with the full Hessian."""
        if self.inverse_hessian is not None:
            return self.inverse_hessian(theta) * g
        if self.separable:
            return g / self._hessian_diagonal(theta)
        flat = theta.reshape(-1, theta.shape[-1])
        # Reverse over reverse: forward mode warns of torch's own use of torch.jit.
        hessian = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(self.value)))(flat)
        return torch.linalg.solve(hessian, g.reshape_as(flat)).reshape_as(g)

    def step(self, theta: Tensor, direction: Tensor, lr: Rate) -> Tensor:
        """The dual step through the maps given."""
        if self.inverse_mirror_map is None:
            raise ValueError(
                "the exact dual step needs the inverse of the mirror map: give inverse_mirror_map=..., or take the "
                "first-order step theta - lr * Mirror(potential)(theta, g)."
            )
        return self.inverse_mirror_map(self.gradient(theta) - lr * direction)

    def _hessian_diagonal(self, theta: Tensor) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            gradient = torch.autograd.grad(self.value(theta).sum(), theta, create_graph=True)[0]
            if not gradient.requires_grad:
                raise ValueError("the potential has no second derivative: a linear function is not a mirror potential.")
            # A diagonal Hessian maps any v to diagonal * v; two generic v tell it from any other.
            probe = torch.cos(torch.arange(theta.shape[-1], dtype=theta.dtype, device=theta.device)).expand_as(theta)
            diagonal = torch.autograd.grad(gradient, theta, torch.ones_like(theta), retain_graph=True)[0]
            probed = torch.autograd.grad(gradient, theta, probe)[0]
        tolerance = torch.finfo(theta.dtype).eps ** 0.5
        if not torch.allclose(probed, probe * diagonal, rtol=tolerance, atol=tolerance * float(diagonal.abs().max())):
            raise ValueError("the potential is not separable: its Hessian is not diagonal. Pass separable=False.")
        return diagonal


def bregman_divergence(potential: Potential, theta: Tensor, xi: Tensor) -> Tensor:
    r"""Definition B.1: :math:`D_R(\theta, \xi) = R(\theta) - R(\xi) - \langle \nabla R(\xi), \theta - \xi \rangle`.

    Example:
        >>> bregman_divergence(Euclidean(), torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]))
        tensor(12.5000)
    """
    return potential(theta) - potential(xi) - (potential.gradient(xi) * (theta - xi)).sum(-1)
