r"""The max-margin solutions that Section 3 and Theorem 4.7 speak of, from a solver instead of a limit.

.. math::
    \min \|\theta\| \quad \text{such that} \quad \langle \theta, z_i \rangle \ge 1 \text{ for all } i,
    \qquad z_i = y_i x_i

L1 and L-infinity are linear programs (HiGHS); L2 is a least-distance problem, solved through non-negative least squares
and polished on its active set. Every solution is checked against its constraints before it is returned.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from horst.extras import load_extra

Geometry = Literal["l1", "l2", "linf"]


class NotSeparableError(ValueError):
    """No theta (of the sign pattern asked for) separates the data."""


def max_margin(z: Tensor, geometry: Geometry, *, signs: Tensor | None = None) -> Tensor:
    """The max-margin solution of one data set, scaled so that the smallest margin is 1.

    Args:
        z: Inputs times labels, ``(samples, features)``.
        geometry: ``"l1"``, ``"l2"`` or ``"linf"``: the norm that is minimised.
        signs: Plus or minus 1 per feature, ``(features,)``: only solutions with these signs (or zeros) are sought, as
            an update that cannot change a sign must. For ``"l1"`` only.

    Raises:
        NotSeparableError: There is no solution.

    Example:
        >>> z = torch.tensor([[2.0, 1.0], [2.0, -1.0]], dtype=torch.float64)
        >>> max_margin(z, "l1")
        tensor([0.5000, 0.0000], dtype=torch.float64)
    """
    if z.dim() != 2:
        raise ValueError(f"z must be one data set, (samples, features), got shape {tuple(z.shape)}. Loop over seeds.")
    if signs is not None and geometry != "l1":
        raise ValueError(f"signs restrict the L1 problem alone, got geometry={geometry!r}. Leave signs out.")
    matrix = _matrix(z)
    solvers = {"l1": lambda: _l1(matrix, signs), "l2": lambda: _l2(matrix), "linf": lambda: _linf(matrix)}
    if geometry not in solvers:
        raise ValueError(f"geometry must be one of {sorted(solvers)}, got {geometry!r}.")
    theta = solvers[geometry]()
    smallest = float((matrix @ theta).min())
    assert smallest > 1 - 1e-7, f"the {geometry} solver left a margin of {smallest}"
    return torch.from_numpy(theta / smallest)


def norm_of(theta: Tensor, geometry: Geometry) -> Tensor:
    """The norm that ``geometry`` names, over the last dimension."""
    order = {"l1": 1.0, "l2": 2.0, "linf": float("inf")}[geometry]
    return torch.linalg.vector_norm(theta, ord=order, dim=-1)


def l1_dual_correlations(z: Tensor, *, signs: Tensor | None = None) -> Tensor:
    r"""The vector :math:`c = Z^\top \lambda`, with :math:`\lambda` the multipliers of the L1 problem.

    By the KKT conditions :math:`s_j c_j = 1` on the support of the solution and at most 1 off it, where s is the sign
    of theta: what the negative gradient of a flow tends to (up to its size) when the flow tends to the L1 max-margin
    direction.

    Args:
        z: Inputs times labels, ``(samples, features)``.
        signs: Signs of the solution, as for :func:`max_margin`.
    """
    matrix = _matrix(z)
    result = _solve_l1(matrix, signs)
    weights = -result.ineqlin.marginals
    return torch.from_numpy(matrix.T @ weights)


def _matrix(z: Tensor) -> Any:
    load_extra("numpy")  # for the message that names the extra: torch's own does not
    return z.detach().to("cpu", torch.float64).numpy()


def _solve_l1(matrix: Any, signs: Tensor | None) -> Any:
    numpy = load_extra("numpy")
    split = numpy.hstack([matrix, -matrix]) if signs is None else matrix * signs.double().numpy()
    costs, limits = numpy.ones(split.shape[1]), -numpy.ones(split.shape[0])
    return _linprog(costs, A_ub=-split, b_ub=limits, bounds=(0, None))


def _l1(matrix: Any, signs: Tensor | None) -> Any:
    x = _solve_l1(matrix, signs).x
    features = matrix.shape[1]
    return x[:features] - x[features:] if signs is None else x * signs.double().numpy()


def _linf(matrix: Any) -> Any:
    """min t such that |theta_j| <= t: theta shifted by t is non-negative, and t is the last variable."""
    numpy = load_extra("numpy")
    samples, features = matrix.shape
    costs = numpy.zeros(features + 1)
    costs[-1] = 1.0
    eye, ones = numpy.eye(features), numpy.ones((features, 1))
    inequalities = numpy.vstack(
        [numpy.hstack([-matrix, numpy.zeros((samples, 1))]), numpy.hstack([eye, -ones]), numpy.hstack([-eye, -ones])]
    )
    limits = numpy.concatenate([-numpy.ones(samples), numpy.zeros(2 * features)])
    bounds = [(None, None)] * features + [(0, None)]
    return _linprog(costs, A_ub=inequalities, b_ub=limits, bounds=bounds).x[:features]


def _l2(matrix: Any) -> Any:
    """Lawson and Hanson's least-distance programming, then the exact solution on the active set it found."""
    numpy = load_extra("numpy")
    samples, features = matrix.shape
    stacked = numpy.vstack([matrix.T, numpy.ones((1, samples))])
    target = numpy.zeros(features + 1)
    target[-1] = 1.0
    weights, residual = load_extra("scipy.optimize").nnls(stacked, target)
    if residual < 1e-9:
        raise NotSeparableError("no theta separates the data: a max-margin solution does not exist.")
    active = weights > 0
    support = matrix[active]
    multipliers = numpy.linalg.solve(support @ support.T, numpy.ones(len(support)))
    assert (multipliers > 0).all(), "the active set of the L2 problem is not optimal"
    return support.T @ multipliers


def _linprog(costs: Any, **problem: Any) -> Any:
    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = load_extra("scipy.optimize").linprog(costs, method="highs", options=options, **problem)
    if result.status == 2:
        raise NotSeparableError("no theta of this sign pattern separates the data: there is no max-margin solution.")
    if result.status != 0:
        raise RuntimeError(f"the linear program was not solved: {result.message}")
    return result
