r"""Equation 1, the steepest-mirror flow of the entropy and the Lp norm, integrated into its late phase.

With :math:`\theta = e^\rho` (signs are folded into the data) the flow is, up to a change of time,

.. math::
    \frac{d\rho}{dt} = \mathrm{sign}(c) \odot |c|^{1/(p-1)}, \qquad
    c = Z^\top w, \quad w = \mathrm{softmax}(-Z \theta)

where c is the negative gradient divided by the loss. The paper divides by a norm of the gradient instead, another
positive scalar: the path is the same, and nothing underflows, since the max-margin property bounds c away from zero.
The norm of theta grows exponentially in this time, so the late phase is near; the equations are stiff there (a margin
of size :math:`\|\theta\|` moves the softmax over a distance of 1), hence an implicit method with the exact Jacobian.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from horst.extras import load_extra


@dataclasses.dataclass(frozen=True)
class Flow:
    """A path of the flow.

    Args:
        log_norm: The logarithm of the L1 norm of theta, ascending.
        theta: The direction at each of them, L1 norm 1, ``(times, features)``.
    """

    log_norm: Tensor
    theta: Tensor

    def at(self, log_norm: float) -> Tensor:
        """The first recorded direction whose log norm is at least ``log_norm``; the last where the path ends before."""
        index = int(torch.searchsorted(self.log_norm, log_norm))
        return self.theta[min(index, len(self.theta) - 1)]


def integrate(
    z: Tensor, p: float, start: Tensor, *, log_norm_end: float = 14.0, smoothing: float = 1e-3, rtol: float = 1e-9
) -> Flow:
    r"""Follow the flow from ``start`` until the L1 norm of theta reaches ``exp(log_norm_end)``.

    Args:
        z: Inputs times labels, ``(samples, features)``.
        p: Exponent of the norm, at least 2; ``math.inf`` is the sign flow.
        start: Theta at the start, ``(features,)``, without zeros. Its signs are kept for ever.
        log_norm_end: Log of the norm at which to stop. Beyond about 16 (a norm of 1e7) rounding in the
            margins slows the solver down.
        smoothing: For p > 2 the right-hand side is not Lipschitz where an entry of c changes sign, and for p = infinity
            it jumps. It is replaced by :math:`c\, (c^2 + \delta^2)^{(1/(p-1) - 1)/2}` with :math:`\delta` = smoothing,
            which differs only for entries within :math:`\delta` of zero (as Adam's eps does). Unused for p = 2.
        rtol: The solver's relative tolerance on :math:`\rho`; it must stay below ``exp(-log_norm_end)`` times a few.

    Raises:
        RuntimeError: The norm does not reach the end, as when no theta of the start's signs separates the data.
    """
    if not p >= 2:
        raise ValueError(f"p must be at least 2 as in Theorem 4.7, got {p}.")
    if bool((start == 0).any()):
        raise ValueError("start must have no zeros: a multiplicative flow never leaves zero.")
    numpy, integrate_module = load_extra("numpy"), load_extra("scipy.integrate")
    signs = start.sign().double()
    matrix = (z.double() * signs).numpy()
    rho = start.abs().double().log().numpy()
    exponent = 0.0 if math.isinf(p) else 1 / (p - 1)
    delta = 0.0 if p == 2 else smoothing

    def gradient(rho: Any) -> tuple[Any, Any, Any]:
        # A rejected trial step may lie far out; exp must not overflow there.
        theta = numpy.exp(numpy.minimum(rho, log_norm_end + 10))
        margins = matrix @ theta
        weights = numpy.exp(margins.min() - margins)
        weights /= weights.sum()
        return theta, weights, matrix.T @ weights

    def velocity(_: float, rho: Any) -> Any:
        c = gradient(rho)[2]
        return c if p == 2 else c * (c * c + delta**2) ** ((exponent - 1) / 2)

    def jacobian(_: float, rho: Any) -> Any:
        theta, weights, c = gradient(rho)
        size = c * c + delta**2
        slope = 1.0 if p == 2 else size ** ((exponent - 3) / 2) * (delta**2 + exponent * c * c)
        covariance = matrix.T @ (matrix * weights[:, None]) - numpy.outer(c, c)
        return -(numpy.broadcast_to(slope, c.shape)[:, None] * covariance) * theta

    def log_norm(rho: Any) -> Any:
        largest = rho.max(axis=0)
        return largest + numpy.log(numpy.exp(rho - largest).sum(axis=0))

    def reached(_: float, rho: Any) -> float:
        return float(log_norm(rho) - log_norm_end)

    reached.terminal = True  # type: ignore[attr-defined]
    longest = 100.0 * (log_norm_end - float(rho.min()))
    # The solver's difference table begins as uninitialised memory, which may hold anything.
    with numpy.errstate(invalid="ignore", over="ignore"):
        path = integrate_module.solve_ivp(
            velocity, (0.0, longest), rho, method="BDF", jac=jacobian, rtol=rtol, atol=1e-10, events=reached
        )
    if path.status != 1:
        raise RuntimeError(
            f"the flow did not reach a norm of exp({log_norm_end}): {path.message} Is there a theta with the signs of "
            "start that separates the data? max_margin(z, 'l1', signs=start.sign()) tells."
        )
    norms = numpy.maximum.accumulate(log_norm(path.y))
    directions = numpy.exp(path.y - log_norm(path.y)) * signs.numpy()[:, None]
    return Flow(torch.from_numpy(norms), torch.from_numpy(directions.T.copy()))


def predicted_exponent(correlations: Tensor, p: float) -> float:
    r"""How fast the slowest feature off the support is left behind: its share falls as :math:`\|\theta\|^{-\kappa_p}`.

    Near the L1 max-margin direction c tends to the vector of the problem's multipliers, 1 on the support (scaled) and
    smaller off it, so :math:`\rho_j` grows at the rate :math:`c_j^{1/(p-1)}` beside 1 and

    .. math::
        \kappa_p = 1 - \max_{j \text{ off support}} \max(c_j, 0)^{1/(p-1)} \approx \frac{\min_j \log(1 / c_j)}{p - 1}

    for large p: zero at p = infinity, where every feature with the right sign of c grows alike.

    Args:
        correlations: The vector c in the orientation of theta's signs, scaled to 1 on the support.
        p: Exponent of the norm.

    Example:
        >>> c = torch.tensor([1.0, 0.25, -3.0])
        >>> predicted_exponent(c, 2), predicted_exponent(c, 3), predicted_exponent(c, math.inf)
        (0.75, 0.5, 0.0)
    """
    off = correlations[correlations < 1 - 1e-7].clamp(min=0)
    if math.isinf(p):
        return 0.0 if bool((off > 0).any()) else 1.0
    return 1.0 - float(off.max()) ** (1 / (p - 1))
