"""Inputs times a sparse matrix, for a few tokens: the cost is per weight that is kept.

``layout.py`` says how the matrix is stored, ``reference.py`` holds the formula, ``triton.py`` one
kernel and ``staged.cu`` another, which is faster where it runs. ``operator.py`` is the product for
torch's compiler, ``direct.py`` the shorter way outside it, ``driver.py`` what launches ``staged.cu``.
"""

from __future__ import annotations

from torch import Tensor

from horst.kernels.backends import runs_kernels
from horst.kernels.sparse_matvec.layout import SparseRows, pack, unpack, why_not_packed
from horst.kernels.sparse_matvec.reference import sparse_matvec_reference
from horst.kernels.sparse_matvec.tuning import MOST_TOKENS, Launch, default_launch

__all__ = [
    "MOST_TOKENS",
    "Launch",
    "SparseRows",
    "default_launch",
    "expand",
    "pack",
    "sparse_matvec",
    "sparse_matvec_reference",
    "unpack",
    "why_not_packed",
]


def sparse_matvec(x: Tensor, matrix: SparseRows, bias: Tensor | None = None, launch: Launch | None = None) -> Tensor:
    """``x @ matrix.T + bias``, by the kernel where it runs and by the reference elsewhere.

    Args:
        x: Inputs of shape (tokens, inputs) in the dtype of the matrix. More than 16 tokens are taken 16 at a time.
        matrix: Matrix of outputs x inputs.
        bias: Vector of outputs.
        launch: Shape of the launch; None takes :func:`default_launch`.

    Example:
        >>> import torch
        >>> matrix = pack(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
        >>> sparse_matvec(torch.tensor([[1.0, 10.0, 100.0]]), matrix)
        tensor([[ 20., 301.]])
    """
    if x.dtype != matrix.dtype or x.dim() != 2 or x.shape[1] != matrix.shape[1]:
        raise ValueError(
            f"inputs must be of shape (tokens, {matrix.shape[1]}) in {matrix.dtype}, got {tuple(x.shape)} in {x.dtype}."
        )
    launch = launch or default_launch(matrix.shape[0], matrix.columns.numel(), len(x))
    if not (x.is_cuda if launch.staged else runs_kernels(x)) or not x.numel() or not matrix.shape[0]:
        return sparse_matvec_reference(x, matrix, bias)
    if launch.staged:
        from horst.kernels.sparse_matvec.staged import sparse_matvec_staged

        return sparse_matvec_staged(x, matrix, bias, launch)
    from horst.kernels.sparse_matvec.triton import sparse_matvec_triton

    return sparse_matvec_triton(x, matrix, bias, launch)


def expand(matrix: SparseRows) -> Tensor:
    """The dense matrix, by the kernel where it runs; equal to :func:`unpack`.

    Example:
        >>> import torch
        >>> expand(pack(torch.tensor([[0.0, 2.0], [1.0, 0.0]])))
        tensor([[0., 2.],
                [1., 0.]])
    """
    if not runs_kernels(matrix.columns) or 0 in matrix.shape:
        return unpack(matrix)
    from horst.kernels.sparse_matvec.triton import expand_triton

    return expand_triton(matrix)
