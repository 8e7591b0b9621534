"""The product as one operator of torch: the compiler sees its shape and not what is inside.

Before each call, compiled code compares all that was read of a layer while it was made. What is not a tensor is
therefore one string: a list is compared number by number, and one list or dtype keeps torch 2.10 and 2.11 from
skipping the comparison for a layer that has not changed.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from horst.kernels.sparse_matvec import Launch, SparseRows, expand, sparse_matvec

_library = torch.library.Library("horst", "FRAGMENT")
_library.define(
    "sparse_linear(Tensor x, Tensor columns, Tensor? values, Tensor starts, Tensor order, Tensor? scales, Tensor? bias,"
    " str form) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def encode(matrix: SparseRows, launches: dict[int, Launch]) -> str:
    """Shape and dtype of a matrix, then in rising order the largest number of tokens and the launch for it.

    Example:
        >>> from horst.kernels.sparse_matvec import pack
        >>> encode(pack(torch.eye(2, 3)), {1: Launch(1, 512, 4), 16: Launch(4, 128, 4)})
        '2 3 float32; 1 1 512 4 0 0; 16 4 128 4 0 0'
    """
    steps = (
        f"; {most} {launch.rows} {launch.block} {launch.warps} {int(launch.overlap)} {int(launch.staged)}"
        for most, launch in sorted(launches.items())
    )
    rows, width = matrix.shape
    return f"{rows} {width} {str(matrix.dtype).removeprefix('torch.')}{''.join(steps)}"


@functools.cache
def _decode(form: str) -> tuple[tuple[int, int], torch.dtype, list[tuple[int, Launch]]]:
    kind, *steps = form.split(";")
    rows, width, dtype = kind.split()
    launches = []
    for step in steps:
        most, launch_rows, block, warps, overlap, staged = map(int, step.split())
        launches.append((most, Launch(launch_rows, block, warps, bool(overlap), bool(staged))))
    return (int(rows), int(width)), getattr(torch, dtype), launches


def launch_for(tokens: int, form: str) -> Launch | None:
    """The launch that a form has for a number of tokens, or None where the matrix is to be expanded."""
    return next((launch for most, launch in _decode(form)[2] if tokens <= most), None)


def check_inputs(x: Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise where ``x`` is not for a matrix of this shape and dtype on this device."""
    if not x.dim() or x.shape[-1] != shape[1]:
        raise ValueError(f"this SparseLinear takes {shape[1]} inputs, got a tensor of shape {tuple(x.shape)}.")
    if x.dtype != dtype or x.device != device:
        raise ValueError(
            f"this SparseLinear computes in {dtype} on {device}, got {x.dtype} on {x.device}. "
            "Move and convert the dense model, then make it sparse."
        )


def multiply(x: Tensor, matrix: SparseRows, bias: Tensor | None, form: str) -> Tensor:
    """What the operator does: ``x @ matrix.T + bias`` for inputs of any leading shape."""
    rows, width = matrix.shape
    tokens = x.reshape(-1, width)
    launch = launch_for(len(tokens), form)
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
    form: str,
) -> Tensor:
    shape, dtype, _ = _decode(form)
    check_inputs(x, shape, dtype, columns.device)
    return multiply(x, SparseRows(columns, values, starts, order, scales, shape, dtype), bias, form)


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
    form: str,
) -> Tensor:
    shape, dtype, _ = _decode(form)
    check_inputs(x, shape, dtype, columns.device)
    return x.new_empty(*x.shape[:-1], shape[0])


def sparse_linear(
    x: Tensor,
    columns: Tensor,
    values: Tensor | None,
    starts: Tensor,
    order: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    form: str,
) -> Tensor:
    """``x @ matrix.T + bias`` for inputs of any leading shape.

    Args:
        x: Inputs in the dtype of the matrix.
        columns: As in :class:`SparseRows`, like ``values``, ``starts``, ``order`` and ``scales``: a compiler that read
            them from a matrix would compare the rest of it too.
        bias: Vector of outputs.
        form: Shape, dtype and launches by number of tokens, from :func:`encode`. For more tokens than any launch has,
            the matrix is expanded to a dense one for this call.

    Example:
        >>> from horst.kernels.sparse_matvec import pack
        >>> matrix = pack(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]]))
        >>> tensors = (matrix.columns, matrix.values, matrix.starts, matrix.order, matrix.scales)
        >>> sparse_linear(torch.tensor([1.0, 10.0, 100.0]), *tensors, None, encode(matrix, {16: Launch(4, 128, 4)}))
        tensor([ 20., 301.])
    """
    y: Tensor = torch.ops.horst.sparse_linear(x, columns, values, starts, order, scales, bias, form)
    return y
