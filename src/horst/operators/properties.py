r"""Definitions 3.1, 3.2, 3.3 and 3.7 as numerical probes: linear, bounded, commuting, inversely coercive.

A probe evaluates an operator at many points of many magnitudes and returns a :class:`Verdict` that carries what it
found: the counter-example when the property fails, the constant when it holds. A counter-example is a proof; "holds"
means that none was found in the range searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from horst.operators.base import Operator, bracket
from horst.operators.potentials import Potential


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a probe found.

    Args:
        statement: The property probed, in words.
        holds: Whether no counter-example was found.
        constant: The constant of the property: C of Definition 3.2, mu of Definition 3.7, the largest relative
            violation for the two identities (Definitions 3.1 and 3.3).
        witness: The point that decided: the counter-example, or the point where the constant is attained.

    A verdict is not a truth value: ``if is_linear(A)`` would drop the witness and read "not refuted" as "proved".
    """

    statement: str
    holds: bool
    constant: float
    witness: dict[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the verdict on '{self.statement}' is not a bool. Read verdict.holds, with verdict.constant and "
            "verdict.witness beside it."
        )


def is_linear(operator: Operator, *, shape: tuple[int, ...] = (6,), samples: int = 256, seed: int = 0) -> Verdict:
    r"""Probe Definition 3.1, linearity in the gradient.

    .. math::
        A(\theta, g + h) = A(\theta, g) + A(\theta, h), \quad A(\theta, c\, g) = c\, A(\theta, g)

    An operator with memory is probed at its first step.

    Args:
        shape: Shape of one parameter.
        samples: Number of points tried, with magnitudes from 1e-6 to 1e6.

    Returns:
        A verdict whose witness holds ``theta``, ``g``, ``h`` and ``c``; its constant is the violation relative to the
        sizes of the terms.

    Example:
        >>> from horst.operators import Entropy, LInf, Mirror, Steepest
        >>> is_linear(Mirror(Entropy())).holds, is_linear(Steepest(LInf())).holds
        (True, False)
    """
    generator = torch.Generator().manual_seed(seed)
    theta, g = (_points(shape, samples, generator) for _ in range(2))
    # h of g's own magnitude: a sum in which one term vanishes would hide the violation.
    h = g.abs().amax(tuple(range(-len(shape), 0)), keepdim=True) * _points(shape, samples, generator, decades=0)
    c = _points((1,) * len(shape), samples, generator, decades=2)
    at_g, at_h, at_sum, at_multiple = (_first(operator, theta, x) for x in (g, h, g + h, c * g))
    additive = _relative(at_sum - at_g - at_h, at_sum, at_g, at_h, dims=len(shape))
    homogeneous = _relative(at_multiple - c * at_g, at_multiple, c * at_g, dims=len(shape))
    violation = torch.maximum(additive, homogeneous)
    worst = int(violation.argmax())
    witness = {"theta": theta[worst], "g": g[worst], "h": h[worst], "c": c[worst].reshape(())}
    constant = float(violation[worst])
    return Verdict(statement="linear", holds=constant <= _ROUNDING, constant=constant, witness=witness)


def is_bounded(
    operator: Operator, *, shape: tuple[int, ...] = (6,), samples: int = 32, history: int = 2000, seed: int = 0
) -> Verdict:
    r"""Probe Definition 3.2: :math:`\|A(\theta, g)\|_2 \le C (1 + \|\theta\|_2)` for all :math:`\theta, g`.

    The largest ratio is sought with both magnitudes within 1e±4, then within 1e±8. The property holds if the second
    search finds no more than 1 % above the first.

    Args:
        shape: Shape of one parameter.
        samples: Number of points tried at every pair of magnitudes.
        history: Number of gradients a millionth as large, after which an operator with memory is probed again: the
            quiet spell after which Adam's direction exceeds 1, up to (1 - beta1) / sqrt(1 - beta2).

    Returns:
        A verdict with the constant C and the ``theta`` and ``g`` that attain it.

    Example:
        >>> from horst.operators import Entropy, L2, Mirror, Steepest
        >>> is_bounded(Mirror(Entropy()) @ Steepest(L2())).holds, is_bounded(Mirror(Entropy())).holds
        (True, False)
    """
    generator = torch.Generator().manual_seed(seed)
    # The same points at every scale: a ratio that grows then grows with the scale, not by the luck of the draw.
    unit_theta, unit_g = (_points(shape, samples, generator, 0) for _ in range(2))
    scales = _scales(8)
    pairs = [(theta_scale, g_scale) for theta_scale in scales for g_scale in scales]
    theta = torch.cat([theta_scale * unit_theta for theta_scale, _ in pairs])
    g = torch.cat([g_scale * unit_g for _, g_scale in pairs])
    inner = torch.tensor([max(abs(math.log10(scale)) for scale in pair) < 4.5 for pair in pairs])
    ratios = [
        _length(direction, len(shape)) / (1 + _length(theta, len(shape)))
        for direction in _with_history(operator, theta, g, history)
    ]
    ratio = torch.stack(ratios).amax(0)
    worst = int(ratio.argmax())
    constant, narrow = float(ratio[worst]), float(ratio[inner.repeat_interleave(samples)].max())
    witness = {"theta": theta[worst], "g": g[worst]}
    return Verdict(statement="bounded", holds=constant <= 1.01 * narrow, constant=constant, witness=witness)


def commutes(a: Operator, b: Operator, *, shape: tuple[int, ...] = (6,), samples: int = 256, seed: int = 0) -> Verdict:
    r"""Probe Definition 3.3: :math:`[A, B] = AB - BA = 0`. An operator with memory is probed at its first step.

    Returns:
        A verdict with the largest relative violation and the ``theta`` and ``g`` where it occurs.

    Example:
        >>> from horst.operators import Euclidean, HyperbolicEntropy, LInf, Mirror, Steepest
        >>> S = Steepest(LInf())
        >>> commutes(S, Mirror(Euclidean())).holds, commutes(S, Mirror(HyperbolicEntropy(0.1))).holds
        (True, False)
    """
    generator = torch.Generator().manual_seed(seed)
    theta, g = (_points(shape, samples, generator) for _ in range(2))
    difference, ab, ba = (_first(operator, theta, g) for operator in (bracket(a, b), a @ b, b @ a))
    violation = _relative(difference, ab, ba, dims=len(shape))
    worst = int(violation.argmax())
    constant = float(violation[worst])
    witness = {"theta": theta[worst], "g": g[worst]}
    return Verdict(statement="commuting", holds=constant <= _ROUNDING, constant=constant, witness=witness)


def inverse_coercivity(potential: Potential, *, n: int = 4, samples: int = 64, seed: int = 0) -> Verdict:
    r"""Probe Definition 3.7: :math:`\xi^\top \nabla^2 R(\theta)^{-1} \xi \ge \mu \|\xi\|_2^2` with one :math:`\mu > 0`.

    The smallest eigenvalue of the inverse Hessian is sought over points of the domain with magnitudes within 1e±4, zero
    included, then within 1e±8. The property holds if the smallest value is positive and the wider search finds no more
    than 1 % below it.

    Args:
        n: Dimension.

    Returns:
        A verdict with the constant mu and the ``theta`` and unit ``xi`` that attain it.

    Example:
        >>> from horst.operators import CoshEntropy, HyperbolicEntropy
        >>> verdict = inverse_coercivity(HyperbolicEntropy(gamma=0.25))
        >>> verdict.holds, round(verdict.constant, 12)
        (True, 0.25)
        >>> inverse_coercivity(CoshEntropy()).holds
        False
    """
    unit = _points((n,), samples, torch.Generator().manual_seed(seed), 0)
    best: dict[int, tuple[float, dict[str, Tensor]]] = {}
    for decades in (4, 8):
        theta = torch.cat([torch.zeros(1, n, dtype=torch.float64), *(scale * unit for scale in _scales(decades))])
        theta = theta[potential.interior(theta).all(-1)]
        basis = torch.eye(n, dtype=torch.float64)
        columns = [potential.apply_inverse_hessian(theta, e.expand_as(theta)) for e in basis]
        eigenvalues, eigenvectors = torch.linalg.eigh(torch.stack(columns, dim=-1))
        worst = int(eigenvalues[:, 0].argmin())
        best[decades] = (float(eigenvalues[worst, 0]), {"theta": theta[worst], "xi": eigenvectors[worst, :, 0]})
    mu, witness = best[8]
    holds = mu > 0 and mu >= 0.99 * best[4][0]
    return Verdict(statement="inversely coercive", holds=holds, constant=mu, witness=witness)


# Identities are checked in float64 on well-scaled terms; operators are a handful of operations.
_ROUNDING = 1e-9


def _points(shape: tuple[int, ...], samples: int, generator: torch.Generator, decades: float = 6) -> Tensor:
    """Random signs and magnitudes, log-uniform within 10**±decades around a standard normal."""
    batch = (samples, *shape)
    exponent = decades * (2 * torch.rand((samples, *(1,) * len(shape)), generator=generator, dtype=torch.float64) - 1)
    return torch.randn(batch, generator=generator, dtype=torch.float64) * 10.0**exponent


def _scales(decades: int) -> list[float]:
    return [10.0**exponent for exponent in range(-decades, decades + 1, 2)]


def _first(operator: Operator, theta: Tensor, g: Tensor) -> Tensor:
    return operator.update(theta, g, operator.init(theta))[0]


def _with_history(operator: Operator, theta: Tensor, g: Tensor, history: int) -> Iterator[Tensor]:
    """The direction at the first step and, with memory, after ``history`` gradients a millionth as large."""
    yield _first(operator, theta, g)
    if operator.is_stateful:
        state = operator.init(theta)
        for _ in range(history):
            _, state = operator.update(theta, 1e-6 * g, state)
        yield operator.update(theta, g, state)[0]


def _length(x: Tensor, dims: int) -> Tensor:
    return torch.linalg.vector_norm(x, dim=tuple(range(-dims, 0)))


def _relative(difference: Tensor, *terms: Tensor, dims: int) -> Tensor:
    """The length of ``difference`` beside the summed lengths of the terms; zero where all terms vanish."""
    total = torch.stack([_length(term, dims) for term in terms]).sum(0)
    return _length(difference, dims) / torch.where(total == 0, torch.ones_like(total), total)
