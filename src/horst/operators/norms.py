r"""The norms of Definition 3.4 and Examples 3.5 and 3.6: their values, their duals, their unit-ball argmax.

Where the maximiser of :math:`\langle g, d \rangle` over the unit ball is not unique, one is chosen and named: a zero
gradient (or singular value) gives zero, :math:`\mathrm{sign}(0) = 0`, and a tie in the L1 norm goes to the first index.
Every formula divides by the largest magnitude first, so that nothing overflows for large p or large gradients.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


class Norm(abc.ABC):
    """A norm on the last dimension (vectors) or the last two (matrices), batched over the others."""

    @property
    def coupled_dims(self) -> int:
        """How many trailing dimensions make one object: 0 if the argmax is elementwise, 1 vectors, 2 matrices."""
        return 1

    @property
    @abc.abstractmethod
    def dual(self) -> Norm:
        r"""The dual norm :math:`\|g\|_* = \max_{\|d\| \le 1} \langle g, d \rangle`."""

    @abc.abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The norm of ``x``, its trailing dimensions reduced."""

    @abc.abstractmethod
    def argmax(self, g: Tensor) -> Tensor:
        r"""A maximiser of :math:`\langle g, d \rangle` over :math:`\|d\| \le 1`, zero where ``g`` is zero."""


@final
@dataclass(frozen=True)
class L1(Norm):
    r""":math:`\|x\|_1 = \sum_i |x_i|`. Its argmax is coordinate descent: :math:`\mathrm{sign}(g_i)\, e_i` for the first
    :math:`i` of largest :math:`|g_i|`.

    Example:
        >>> L1().argmax(torch.tensor([1.0, -3.0, 3.0]))
        tensor([ 0., -1.,  0.])
    """

    @property
    def dual(self) -> Norm:
        """LInf."""
        return LInf()

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of the magnitudes."""
        return x.abs().sum(-1)

    def argmax(self, g: Tensor) -> Tensor:
        """The signed basis vector of the largest magnitude."""
        # torch.argmax promises the first of the largest, and a NaN counts as largest, so it is not lost.
        first = g.abs().argmax(-1, keepdim=True)
        largest = g.gather(-1, first)
        sign = torch.where(largest.isnan(), largest, largest.sign())
        return torch.zeros_like(g).scatter(-1, first, sign)


@final
@dataclass(frozen=True)
class L2(Norm):
    r""":math:`\|x\|_2 = (\sum_i x_i^2)^{1/2}`. Its argmax is normalised gradient descent, :math:`g / \|g\|_2`.

    Example:
        >>> L2().argmax(torch.tensor([3.0, -4.0]))
        tensor([ 0.6000, -0.8000])
    """

    @property
    def dual(self) -> Norm:
        """L2 is its own dual."""
        return L2()

    def __call__(self, x: Tensor) -> Tensor:
        """The Euclidean length."""
        scaled, largest = _divide_by_largest(x, dims=1)
        return largest.squeeze(-1) * scaled.square().sum(-1).sqrt()

    def argmax(self, g: Tensor) -> Tensor:
        """The unit vector along ``g``."""
        scaled, _ = _divide_by_largest(g, dims=1)
        return scaled / _nonzero(scaled.square().sum(-1, keepdim=True).sqrt())


@final
@dataclass(frozen=True)
class LInf(Norm):
    r""":math:`\|x\|_\infty = \max_i |x_i|`. Its argmax is sign descent, :math:`\mathrm{sign}(g)`.

    Example:
        >>> LInf().argmax(torch.tensor([0.1, -3.0, 0.0]))
        tensor([ 1., -1.,  0.])
    """

    coupled_dims = 0  # the sign is taken entry by entry

    @property
    def dual(self) -> Norm:
        """L1."""
        return L1()

    def __call__(self, x: Tensor) -> Tensor:
        """The largest magnitude."""
        return x.abs().amax(-1)

    def argmax(self, g: Tensor) -> Tensor:
        """The sign."""
        return g.sign()


@final
@dataclass(frozen=True)
class Lp(Norm):
    r""":math:`\|x\|_p = (\sum_i |x_i|^p)^{1/p}`, with dual exponent :math:`q = p / (p - 1)`.

    .. math::
        \arg\max_{\|d\|_p \le 1} \langle g, d \rangle
            = \mathrm{sign}(g) \odot |g|^{q-1} / \|g\|_q^{q-1}

    (the paper's Equation 1 divides by :math:`\|g\|_q`, which agrees for p = 2 alone; the difference is a change of
    time). ``p=1`` and ``p=math.inf`` are :class:`L1` and :class:`LInf`.

    Args:
        p: The exponent, at least 1.

    Example:
        >>> Lp(3).argmax(torch.tensor([4.0, -1.0]))
        tensor([ 0.9615, -0.4807])
    """

    p: float

    def __post_init__(self) -> None:
        if not self.p >= 1:  # this form refuses NaN too
            raise ValueError(f"p must be at least 1, got {self.p}. Below 1 it is not a norm; LInf() is p = infinity.")

    @property
    def coupled_dims(self) -> int:
        """1, or 0 at p = infinity, where the argmax is the sign."""
        return 0 if math.isinf(self.p) else 1

    @property
    def dual(self) -> Norm:
        """Lq with 1/p + 1/q = 1."""
        if self.p == 1:
            return LInf()
        return L1() if math.isinf(self.p) else Lp(self.p / (self.p - 1))

    def __call__(self, x: Tensor) -> Tensor:
        """The p-norm."""
        if math.isinf(self.p):
            return LInf()(x)
        scaled, largest = _divide_by_largest(x, dims=1)
        return largest.squeeze(-1) * scaled.abs().pow(self.p).sum(-1).pow(1 / self.p)

    def argmax(self, g: Tensor) -> Tensor:
        """The unit-ball maximiser."""
        if self.p == 1:
            return L1().argmax(g)
        if math.isinf(self.p):
            return LInf().argmax(g)
        scaled, _ = _divide_by_largest(g, dims=1)
        magnitude = scaled.abs()
        # q - 1 = 1 / (p - 1) and ||.||_q^(q-1) = (sum |.|^q)^(1/p): both stay exact as p grows.
        total = magnitude.pow(self.p / (self.p - 1)).sum(-1, keepdim=True)
        return scaled.sign() * magnitude.pow(1 / (self.p - 1)) / _nonzero(total.pow(1 / self.p))


@final
@dataclass(frozen=True)
class Spectral(Norm):
    r"""The largest singular value of a matrix. With :math:`G = U \Sigma V^\top`, its argmax is the polar factor
    :math:`U V^\top`, from the singular value decomposition.

    Singular values that are zero to working precision give zero, as :math:`\mathrm{sign}(0) = 0` does for
    :class:`LInf`: a zero gradient gives a zero direction.

    Example:
        >>> Spectral().argmax(torch.tensor([[3.0, 0.0], [0.0, -0.5]])).round(decimals=6) + 0.0
        tensor([[ 1.,  0.],
                [ 0., -1.]])
    """

    coupled_dims = 2

    @property
    def dual(self) -> Norm:
        """The nuclear norm."""
        return Nuclear()

    def __call__(self, x: Tensor) -> Tensor:
        """The largest singular value."""
        return _singular_values(x)[..., 0]

    def argmax(self, g: Tensor) -> Tensor:
        """The polar factor."""
        u, keep, vh = _svd(g)
        return (u * keep.unsqueeze(-2)) @ vh


@final
@dataclass(frozen=True)
class Nuclear(Norm):
    r"""The sum of the singular values, dual to :class:`Spectral`. Its argmax is :math:`u_1 v_1^\top`, the first pair.

    Example:
        >>> Nuclear()(torch.tensor([[3.0, 0.0], [0.0, -0.5]]))
        tensor(3.5000)
    """

    coupled_dims = 2

    @property
    def dual(self) -> Norm:
        """The spectral norm."""
        return Spectral()

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of the singular values."""
        return _singular_values(x).sum(-1)

    def argmax(self, g: Tensor) -> Tensor:
        """The outer product of the first singular vectors."""
        u, keep, vh = _svd(g)
        return (u[..., :, :1] * keep[..., None, :1]) @ vh[..., :1, :]


def _singular_values(x: Tensor) -> Tensor:
    scaled, largest = _divide_by_largest(x, dims=2)
    return largest.squeeze(-1) * torch.linalg.svdvals(scaled)


def _svd(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, a 0/1 vector of the singular values that are not zero to working precision, and V^T."""
    scaled, _ = _divide_by_largest(g, dims=2)
    u, sigma, vh = torch.linalg.svd(scaled, full_matrices=False)
    tolerance = max(g.shape[-2:]) * torch.finfo(g.dtype).eps * sigma[..., :1]
    return u, (sigma > tolerance).to(g.dtype), vh


def _divide_by_largest(x: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """``x`` over its largest magnitude in the last ``dims`` dimensions (zero stays zero), and that magnitude."""
    if x.dim() < dims == 2:
        raise ValueError(f"Spectral and Nuclear act on matrices, got shape {tuple(x.shape)}. Use L2 for vectors.")
    largest = x.abs().amax(tuple(range(-dims, 0)), keepdim=True)
    return x / _nonzero(largest), largest


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)
