"""The product as one operator of torch: the compiler sees its shape and not what is inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.kernels.sparse_matvec import Launch, SparseRows, expand, sparse_matvec

_library = torch.library.Library("horst", "FRAGMENT")
_library.define(
    "sparse_linear(Tensor x, Tensor columns, Tensor? values, Tensor starts, Tensor order, Tensor? scales, Tensor? bias,"
    " int[] steps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def encode(launches: dict[int, Launch]) -> list[int]:
    """Largest number of tokens and launch for it, as the operator takes them: plain numbers, in rising order.

    Example:
        >>> encode({1: Launch(1, 512, 4), 16: Launch(4, 128, 4)})
        [1, 1, 512, 4, 0, 0, 16, 4, 128, 4, 0, 0]
    """
    return [
        number
        for most, launch in sorted(launches.items())
        for number in (most, launch.rows, launch.block, launch.warps, int(launch.overlap), int(launch.staged))
    ]


def launch_for(tokens: int, steps: Sequence[int]) -> Launch | None:
    """The launch that encoded steps have for a number of tokens, or None where the matrix is to be expanded."""
    for k in range(0, len(steps), 6):
        most, rows, block, warps, overlap, staged = steps[k : k + 6]
        if tokens <= most:
            return Launch(rows, block, warps, bool(overlap), bool(staged))
    return None


def multiply(x: Tensor, matrix: SparseRows, bias: Tensor | None, steps: Sequence[int]) -> Tensor:
    """What the operator does: ``x @ matrix.T + bias`` for inputs of any leading shape."""
    rows, width = matrix.shape
    tokens = x.reshape(-1, width)
    launch = launch_for(len(tokens), steps)
    y = F.linear(tokens, expand(matrix), bias) if launch is None else sparse_matvec(tokens, matrix, bias, launch)
    return y.view(*x.shape[:-1], rows)


def _sparse_linear(
    x: Tensor,
    columns: Tensor,
    values: Tensor | None,
    starts: Tensor,
    order: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    steps: Sequence[int],
) -> Tensor:
    shape = (order.shape[0], x.shape[-1])
    return multiply(x, SparseRows(columns, values, starts, order, scales, shape, x.dtype), bias, steps)


for _device in ("CPU", "CUDA"):
    _library.impl("sparse_linear", _sparse_linear, _device)


@torch.library.register_fake("horst::sparse_linear", lib=_library)
def _sparse_linear_shape(
    x: Tensor,
    columns: Tensor,
    values: Tensor | None,
    starts: Tensor,
    order: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    steps: Sequence[int],
) -> Tensor:
    return x.new_empty(*x.shape[:-1], order.shape[0])


def sparse_linear(x: Tensor, matrix: SparseRows, bias: Tensor | None, steps: list[int]) -> Tensor:
    """``x @ matrix.T + bias`` for inputs of any leading shape.

    Args:
        x: Inputs in the dtype of the matrix.
        matrix: Matrix of outputs x inputs.
        bias: Vector of outputs.
        steps: Launches by number of tokens, from :func:`encode`. For more tokens than any of them has, the matrix is
            expanded to a dense one for this call.

    Example:
        >>> from horst.kernels.sparse_matvec import pack
        >>> matrix = pack(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
        >>> sparse_linear(torch.tensor([1.0, 10.0, 100.0]), matrix, None, encode({16: Launch(4, 128, 4)}))
        tensor([ 20., 301.])
    """
    y: Tensor = torch.ops.horst.sparse_linear(
        x, matrix.columns, matrix.values, matrix.starts, matrix.order, matrix.scales, bias, steps
    )
    return y
