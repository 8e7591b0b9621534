r"""What half precision changes in a model: the residual stream under autocast, and a GELU of fewer instructions.

:math:`\mathrm{GELU}(x) = x\,\Phi(x)`. In bfloat16 there are two bytes to read and two to write for each ``erf``, which
in float32 is dozens of instructions. Formula 7.1.26 of Abramowitz and Stegun, *Handbook of Mathematical Functions*,
1964,

.. math::
    1 - \mathrm{erf}(z) \approx (a_1 t + a_2 t^2 + a_3 t^3 + a_4 t^4 + a_5 t^5)\, e^{-z^2},
    \qquad t = \frac{1}{1 + p z}, \quad z \ge 0,

is off by at most 1.5e-7, and its exponential at :math:`z = |x| / \sqrt 2` is also that of the derivative
:math:`\Phi(x) + x\,\varphi(x)`.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_P = 0.3275911
_A = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_HALF = (torch.bfloat16, torch.float16)
Residual = Literal["float32", "autocast"]


class AutocastPrecision(nn.Module):
    """Casts to autocast's dtype where autocast is on, and changes nothing elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``, in the precision that the layers around it compute in."""
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class GELU(nn.Module):
    """``nn.GELU()``; in half precision under ``torch.compile`` by :func:`short_gelu`.

    Example:
        >>> GELU()(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([-0.1587,  0.0000,  0.8413])
    """

    def forward(self, x: Tensor) -> Tensor:
        """Of the same shape and dtype."""
        if x.dtype in _HALF and torch.compiler.is_compiling():  # uncompiled it would be a dozen passes
            return short_gelu(x)
        return F.gelu(x)


def short_gelu(x: Tensor) -> Tensor:
    """GELU by the formula above, computed in float32 at least. Differentiable once.

    Args:
        x: Tensor of any floating dtype.

    Example:
        >>> x = torch.tensor([-3.0, 0.5])
        >>> bool((short_gelu(x) - F.gelu(x)).abs().max() < 1e-6)
        True
    """
    out: Tensor = _ShortGELU.apply(x)
    return out


class _ShortGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * _normal_cdf(wide)[0]).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        cdf, bell = _normal_cdf(wide)
        slope = cdf + wide * bell / math.sqrt(2 * math.pi)
        return (grad_output * slope).to(x.dtype)


def _normal_cdf(x: Tensor) -> tuple[Tensor, Tensor]:
    """The distribution function of the standard normal law, and ``exp(-x^2 / 2)``."""
    t = 1 / (1 + (_P / math.sqrt(2)) * x.abs())
    bell = torch.exp(-0.5 * x * x)
    polynomial = t * (_A[0] + t * (_A[1] + t * (_A[2] + t * (_A[3] + t * _A[4]))))
    tail = 0.5 * polynomial * bell  # beyond |x|
    return torch.where(x > 0, 1 - tail, tail), bell
