"""Definition 3.4: the steepest operator, with sign descent (Example 3.5) and coordinate descent (Example 3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from horst.operators.base import Memoryless, check_shapes
from horst.operators.norms import Norm


@final
@dataclass(frozen=True)
class Steepest(Memoryless):
    r"""Steepest descent in a norm: bounded, scale-invariant, not linear (Lemma 4.1).

    .. math::
        S_{\|\cdot\|}(\theta, g) = \arg\max_{\|d\| \le 1} \langle g, d \rangle

    where :math:`\|\cdot\|` is ``norm``. ``Steepest(LInf())`` is sign descent, ``Steepest(L1())`` coordinate descent,
    ``Steepest(Spectral())`` the direction of Muon. A zero gradient gives a zero direction; see
    :mod:`horst.operators.norms` for ties.

    Args:
        norm: Norm, one of ``L1``, ``L2``, ``Lp(p)``, ``LInf``, ``Spectral``, ``Nuclear``.

    Example:
        >>> import torch
        >>> from horst.operators import LInf
        >>> Steepest(LInf())(torch.zeros(3), torch.tensor([0.3, -5.0, 0.0]))
        tensor([ 1., -1.,  0.])
    """

    norm: Norm

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Norm):
            raise TypeError(
                f"norm must be a Norm such as LInf() or Lp(3), got {self.norm!r}. "
                "Give an instance, not the class: Steepest(LInf()), not Steepest(LInf)."
            )

    @property
    def coupled_dims(self) -> int:
        """What the norm couples."""
        return self.norm.coupled_dims

    def __call__(self, theta: Tensor, g: Tensor) -> Tensor:
        """The unit-ball maximiser."""
        check_shapes(theta, g, self.coupled_dims)
        return self.norm.argmax(g)
