r"""SparseGPT: weights go one column after the other, and the columns to the right make up for them.

For one row w of a matrix and :math:`H = \tfrac{2}{n} X^T X` of the layer's inputs, removing entry j of those that are
not yet frozen raises the squared output error least if the entries to its right move by

.. math::
    \delta_{>j} = -\frac{w_j}{U_{jj}}\, U_{j,>j}, \qquad H^{-1} = U^T U \text{ with } U \text{ upper triangular},

and raises it by :math:`\tfrac12 (w_j / U_{jj})^2`: that is the score. One triangular factor serves all rows and all
columns. A weight that is rounded from :math:`w_j` to :math:`q_j` instead of removed is the same with
:math:`w_j - q_j` in the place of :math:`w_j`: with a grid, removing and rounding are one pass.

:math:`U` is found without ever inverting H: with J the reversal of the order and :math:`J H J = L L^T`, the
matrix :math:`R = J L J` is upper triangular, :math:`H = R R^T`, so :math:`U = R^{-1}`.

All of it runs in float32 with TF32 off.

References: Frantar and Alistarh, *SparseGPT* (2023); Frantar et al., *GPTQ* (2023), for rounding alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horst.parameters.quantization import Grid, choose_scales
from horst.pruning.method import Method, Prepared, Statistic
from horst.sparsity.masks import NM, Block
from horst.sparsity.selection import smallest

logger = logging.getLogger(__name__)

# 0.01 times 10^4 is a hundred times the mean diagonal: what is not positive definite by then is no sum of squares.
_TRIES = 5


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 and no bfloat16 inside float32 products; the global setting is put back afterwards.

    torch has two ways to say it, and refuses to read the older one where the newer one was used. Setting through the
    older sets both, so that is what happens inside; afterwards both are put back.

    Example:
        >>> with full_float32():
        ...     torch.get_float32_matmul_precision()
        'highest'
    """
    backends: Any = torch.backends
    newer = (backends.cuda.matmul, backends.mkldnn.matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of the older way
        try:
            older: str | None = torch.get_float32_matmul_precision()
        except RuntimeError:
            older = None
        before = [backend.fp32_precision for backend in newer]
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if older is not None:
                torch.set_float32_matmul_precision(older)
            for backend, precision in zip(newer, before, strict=True):
                backend.fp32_precision = precision


class Hessian(Statistic):
    r""":math:`H = \tfrac{2}{n} X^T X` over the n inputs of a layer, in float32, summed up batch after batch.

    Example:
        >>> hessian = Hessian(2)
        >>> hessian.add(torch.tensor([[1.0, 2.0]]))
        >>> hessian.matrix
        tensor([[2., 4.],
                [4., 8.]])
    """

    def __init__(self, inputs: int, device: torch.device | str = "cpu") -> None:
        super().__init__(inputs, device)
        self.matrix = torch.zeros(inputs, inputs, dtype=torch.float32, device=self.device)

    def _add(self, X: Tensor, share: float) -> None:
        with full_float32():
            self.matrix.addmm_(X.t(), X, beta=1.0 - share, alpha=2.0 * share / len(X))

    def norms(self) -> Tensor:
        """Root mean square of each column."""
        return (self.matrix.diagonal() / 2.0).sqrt()


def inverse_factor(H: Tensor, *, damping: float = 0.01, name: str = "the layer") -> tuple[Tensor, float]:
    """The upper triangular U with ``U.T @ U`` the inverse of ``H`` plus ``damping`` times its mean diagonal.

    Where that is not positive definite in float32, the damping is multiplied by 10 (from 0, it becomes
    0.01), with a warning, up to four times.

    Args:
        H: Matrix, symmetric and positive semidefinite. A zero on its diagonal is an input that never fired: it is left
            out of the mean, and replaced by it.
        damping: Share of the mean diagonal.
        name: Name of the layer, for messages.

    Returns:
        U, and the number that was added to the diagonal.

    Example:
        >>> U, added = inverse_factor(torch.diag(torch.tensor([4.0, 16.0])), damping=0.0)
        >>> U.tolist(), added
        ([[0.5, 0.0], [0.0, 0.25]], 0.0)
    """
    diagonal = H.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    share = damping
    for tried in range(_TRIES):
        if tried:
            share = 10.0 * share or 0.01
            logger.warning("%s: H is not positive definite in float32; damping raised to %g.", name, share)
        reversed_order = H.flip(0, 1)
        reversed_order.diagonal().add_(share * mean + mean * dead.flip(0))
        L, info = torch.linalg.cholesky_ex(reversed_order)
        if int(info) == 0:
            one = torch.eye(len(H), dtype=H.dtype, device=H.device)
            U = torch.linalg.solve_triangular(L.flip(0, 1), one, upper=True)
            if bool(U.isfinite().all()):
                return U, share * mean
    raise ValueError(
        f"H of {name} is not positive definite even with damping {share:g} (it began with {damping:g}). Give more "
        "calibration data, or exclude this layer."
    )


def compensate(
    W: Tensor,
    U: Tensor,
    dead: Tensor,
    *,
    pattern: Block | NM | None = None,
    count: int = 0,
    block: int = 128,
    grid: Grid | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, float]:
    """Prune a matrix column after column, the columns to the right making up for what goes.

    Which weights go is decided ``block`` columns at a time, by score over all rows. Each block loses its share of
    ``count`` by its number of columns, so that the total is exact. Columns whose input never fired (``dead``) go whole
    and count; where they alone are more than ``count``, more than ``count`` weights go.

    Args:
        W: Weights, out x in, float32; left as it is.
        U: Factor of the inverse, see :func:`inverse_factor`.
        dead: Booleans, one per column: whether its input never fired.
        pattern: Pattern of the mask; None is single weights; N:M decides for each group just before its columns are
            frozen.
        count: Number of single weights to remove; not read for N:M.
        block: Columns whose updates the rest of the matrix receives in one product.
        grid: Grid to round the kept weights to, each when its column is reached; None does not round. The scale of a
            group is chosen when its first column is reached. A block is then at least a group, and weights that are 0
            at the start stay 0, beyond ``count``.
        dtype: Dtype that the rounded weights must be exact in.

    Returns:
        The pruned matrix, and the sum of all squared errors ``((w_j - q_j) / U_jj)^2``, q_j being 0 or the rounded
        weight: the trace of ``D @ H @ D.T`` with D the change of the live columns and H with its damping.

    Example:
        >>> W, U = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -0.5], [0.0, 1.0]])
        >>> compensate(W, U, torch.tensor([False, False]), count=1, block=1)
        (tensor([[1., 0.]]), 4.0)
    """
    columns, rows = W.shape[1], W.shape[0]
    Wt = W.t().clone(memory_format=torch.contiguous_format)  # a column of W is a contiguous row here
    Wt[dead] = 0.0
    group = pattern.m if isinstance(pattern, NM) else 1
    unit = group if grid is None else math.lcm(group, grid.group_size)
    block = max(block // unit, 1) * unit  # no group lies across two blocks
    zeros = torch.zeros_like(Wt, dtype=torch.bool) if grid is None else Wt == 0  # what stays 0
    live = (~dead).cumsum(0).tolist()  # live columns up to and with each
    budget = max(count - (columns - live[-1]) * rows, 0)
    total = W.new_zeros(())
    done = 0
    for start in range(0, columns, block):
        end = min(start + block, columns)
        w, u = Wt[start:end], U[start:end, start:end]
        d = u.diagonal()[:, None]
        stay = zeros[start:end]
        if isinstance(pattern, NM):
            pruned = torch.empty(w.shape, dtype=torch.bool, device=w.device)
        else:
            goal = budget * live[end - 1] // max(live[-1], 1)
            has_dead = live[end - 1] - (live[start - 1] if start else 0) < end - start
            among = [(~dead[start:end, None]).expand(w.shape)] if has_dead else None
            pruned = smallest([w / d], goal - done, among=among)[0] | stay
            done = goal
        weight = torch.empty_like(w) if isinstance(pattern, NM) else pruned / d
        errors = torch.empty_like(w)
        for i in range(end - start):
            if isinstance(pattern, NM) and i % group == 0:
                own = slice(i, i + group)
                pruned[own] = ~pattern.mask(w[own] / d[own], input_dim=0) | stay[own]
                torch.div(pruned[own], d[own], out=weight[own])
            if grid is None:
                # Two kernels per column: on a GPU the launches are the cost.
                torch.mul(w[i], weight[i], out=errors[i])
            else:
                if i % grid.group_size == 0:
                    own, going = slice(i, i + grid.group_size), pruned[i : i + grid.group_size]
                    if isinstance(pattern, NM):  # not known yet: the mask as it would be now
                        going = ~pattern.mask(w[own] / d[own], input_dim=0) | stay[own]
                    scales = choose_scales(w[own].masked_fill(going, 0.0).t().float(), grid, dtype).to(w.dtype)
                rounded = (w[i] / scales).round_().clamp_(-grid.largest, grid.largest).mul_(scales)
                rounded.masked_fill_(pruned[i], 0.0)
                torch.div(w[i] - rounded, d[i], out=errors[i])
                w[i] = rounded
            w[i + 1 :].addr_(u[i, i + 1 :], errors[i], alpha=-1.0)
        w.masked_fill_(pruned, 0.0)
        total += errors.square().sum()
        Wt[end:].addmm_(U[start:end, end:].t(), errors, alpha=-1.0)
    return Wt.t(), float(total)


@dataclass(frozen=True)
class SparseGPT(Method):
    """Remove the weights of least effect on the output, and let the others of their row make up for them.

    Args:
        damping: Number added to the diagonal of H, as a share of its mean.
        block: Columns that are chosen together.
        grid: Grid to round the kept weights to in the same pass; None leaves them as they are.

    Example:
        >>> X = torch.randn(64, 8)
        >>> hessian = Hessian(8)
        >>> hessian.add(X)
        >>> W, method = torch.randn(4, 8), SparseGPT()
        >>> error = method.prune(W, method.prepare(W, hessian, "fc.weight"), Block(), count=16)
        >>> int((W == 0).sum()), 0 < error < 1
        (16, True)
    """

    damping: float = 0.01
    block: int = 128
    grid: Grid | None = None
    name = "sparsegpt"
    statistic = Hessian
    removes_blocks = False  # it freezes one column at a time

    def __post_init__(self) -> None:
        if not self.damping >= 0.0:
            raise ValueError(f"damping must be at least 0, got {self.damping}. The reference uses 0.01.")
        if self.block < 1:
            raise ValueError(f"block must be at least 1 column, got {self.block}. The reference uses 128.")

    def prepare(self, W: Tensor, statistic: Statistic | None, name: str) -> Prepared:
        """The factor of the inverse of H, what was added to its diagonal, and the energy of the dense output."""
        assert isinstance(statistic, Hessian)
        statistic.check(name)
        H = statistic.matrix
        dead = H.diagonal() == 0
        if bool(dead.any()):
            logger.warning("%s: %d of %d inputs are always 0; their columns go first.", name, int(dead.sum()), len(H))
        with full_float32():
            U, added = inverse_factor(H, damping=self.damping, name=name)
            dense = W.to(torch.float32)
            energy = (dense @ H).mul_(dense).sum()
        return {"factor": U, "dead": dead, "added": torch.tensor(added), "energy": energy}

    def prune(self, W: Tensor, prepared: Prepared, pattern: Block | NM, count: int) -> float:
        """Replace ``W`` by the pruned and compensated matrix."""
        dead, dense = prepared["dead"], W.to(torch.float32)
        with full_float32():
            pruned, loss = compensate(
                dense, prepared["factor"], dead, pattern=pattern, count=count, block=self.block, grid=self.grid,
                dtype=W.dtype,
            )  # fmt: skip
        # The loss counts the damping; dead columns have no output to lose.
        change = float((pruned - dense)[:, ~dead].square().sum())
        W.copy_(pruned)
        energy = float(prepared["energy"])
        return max(loss - float(prepared["added"]) * change, 0.0) / energy if energy > 0.0 else 0.0
