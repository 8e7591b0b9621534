"""The product of inputs with a sparse matrix, as the formula has it."""

from __future__ import annotations

import torch
from torch import Tensor

from horst.kernels.sparse_matvec.layout import SparseRows, entries


def sparse_matvec_reference(x: Tensor, matrix: SparseRows, bias: Tensor | None = None) -> Tensor:
    r"""Inputs times a sparse matrix, plus a bias: summed over the weights that are kept.

    .. math::
        y_{ti} = \sum_{j : W_{ij} \ne 0} W_{ij} x_{tj} + b_i

    where :math:`x, W, b` are ``x``, ``matrix`` and ``bias``. Sums are in float32, or in float64 for inputs in float64;
    a zero weight ignores its input, also where that is infinite or NaN.
    """
    row, column, value = entries(matrix)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    if matrix.scales is not None:  # the factors themselves, not values rounded to the dtype after them
        assert matrix.values is not None
        value = matrix.values.to(wide) * matrix.scales[row].to(wide)
    products = torch.where(value != 0, value.to(wide) * x.to(wide)[:, column], 0)
    y = torch.zeros(len(x), matrix.shape[0], dtype=wide, device=x.device).index_add_(1, row, products)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
