"""How a sparse matrix is stored for a GPU: rows by length, 16-bit columns beside their values.

A 16-bit value and its column share one 32-bit word: the value in the upper half, so that a bfloat16 is a float32 after
one mask, the column in the lower. Wider and narrower values (float32, int8) have an array of their own beside 16-bit
columns. Every row begins at a multiple of :data:`ALIGN` entries, for loads of 16 bytes; what fills it up is value 0,
in words with a column one past the last.

Entries are not in the order of their columns. In a chunk of :data:`CHUNK` entries, neighbouring threads load four
neighbouring entries each, and the first of the four is gathered by all of a warp at once: those 32 are neighbours in
the row, so that their inputs lie in a few cache lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

# Rows begin at multiples of this many entries: 16 bytes of words, or of int8 values.
ALIGN = {"words": 4, "arrays": 16}
# Entries of one warp's widest load: 32 threads with four words each.
CHUNK = 128
MOST_COLUMNS = (1 << 16) - 1
_PACKED_DTYPES = (torch.bfloat16, torch.float16)
_SEPARATE_DTYPES = (torch.float32, torch.int8)


@dataclass(frozen=True)
class SparseRows:
    """A matrix in the storage of this module.

    Attributes:
        columns: Words of value and column (int32), or columns alone (int16, read as unsigned).
        values: Values where they are not in the words: float32 or int8.
        starts: Position of each stored row and of the end, in units of the alignment (int32).
        order: Number in the matrix of each stored row (int32): the longest is stored first.
        scales: Factors of the matrix's rows (float32), for int8 values.
        shape: Rows and columns of the matrix.
        dtype: Type of the values before quantization, which is that of inputs and outputs.
    """

    columns: Tensor
    values: Tensor | None
    starts: Tensor
    order: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def align(self) -> int:
        """Entries per unit of ``starts``."""
        return ALIGN["words"] if self.values is None else ALIGN["arrays"]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of their fields."""
        return {f.name: t for f in fields(self) if isinstance(t := getattr(self, f.name), Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, fn: Any) -> SparseRows:
        """The same with ``fn`` applied to every tensor, such as a move to a device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        result = SparseRows(**(own | {name: fn(tensor) for name, tensor in self.tensors.items()}))
        settle(result.columns)
        return result


def settle(tensor: Tensor) -> None:
    """Wait until a tensor is written. A kernel may read a matrix before it waits for what came before on the stream."""
    if tensor.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(tensor.device).synchronize()


def why_not_packed(weight: Tensor) -> str | None:
    """The reason why a weight has no such form, or None where it has one."""
    if weight.shape[1] > MOST_COLUMNS:
        return f"{weight.shape[1]} inputs are more than 16-bit columns can tell apart ({MOST_COLUMNS})"
    if weight.dtype not in (*_PACKED_DTYPES, torch.float32):
        return f"{weight.dtype} has no sparse form on a GPU: bfloat16, float16 and float32 have"
    if weight.numel() >= 1 << 31:
        return f"a matrix of {tuple(weight.shape)} has more entries than 32-bit positions can count"
    return None


def pack(weight: Tensor, *, int8: bool = False) -> SparseRows:
    """A matrix as :class:`SparseRows`, on its device.

    Args:
        weight: Matrix of outputs x inputs in bfloat16, float16 or float32.
        int8: Whether to round the values to 8 bits, with one factor per row: 3 bytes per kept weight.

    Example:
        >>> rows = pack(torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]], dtype=torch.bfloat16))
        >>> rows.order.tolist(), rows.starts.tolist()
        ([1, 0], [0, 1, 2])
        >>> unpack(rows)
        tensor([[0., 2., 0.],
                [1., 0., 3.]], dtype=torch.bfloat16)
    """
    if (reason := why_not_packed(weight)) is not None:
        raise ValueError(f"the matrix cannot be stored sparse: {reason}. Keep it dense.")
    rows, width = weight.shape
    in_words = not int8 and weight.dtype in _PACKED_DTYPES
    align = ALIGN["words" if in_words else "arrays"]
    lengths = (weight != 0).sum(dim=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    padded = (lengths[order] + align - 1) // align
    starts = torch.zeros(rows + 1, dtype=torch.int64, device=weight.device)
    starts[1:] = padded.cumsum(0)
    where = (weight[order] != 0).nonzero()
    row, column = where[:, 0], where[:, 1]
    nonzero = weight[order[row], column]
    first = torch.zeros(rows + 1, dtype=torch.int64, device=weight.device)
    first[1:] = lengths[order].cumsum(0)
    place = starts[row] * align + _interleaved(
        torch.arange(len(row), device=row.device) - first[row], padded[row], align
    )
    size = int(starts[-1]) * align
    scales = None
    if in_words:
        words = column.int() | (nonzero.view(torch.int16).int() << 16)
        columns, values = torch.full((size,), width, dtype=torch.int32, device=weight.device), None
        columns[place] = words
    else:
        columns = torch.zeros(size, dtype=torch.int16, device=weight.device)
        columns[place] = (column - ((column >> 15) << 16)).to(torch.int16)  # 40000 is stored as -25536
        if int8:
            largest = weight.abs().amax(dim=1).float() if width else weight.new_zeros(rows).float()
            scales = torch.where(largest > 0, largest / 127, 1.0)
            nonzero = (nonzero.float() / scales[order[row]]).round().to(torch.int8)
        values = torch.zeros(size, dtype=nonzero.dtype, device=weight.device)
        values[place] = nonzero
    matrix = SparseRows(columns, values, starts.int(), order.int(), scales, (rows, width), weight.dtype)
    settle(matrix.columns)
    return matrix


def _interleaved(position: Tensor, units: Tensor, align: int) -> Tensor:
    """Where the entry at ``position`` of a row of ``units`` * ``align`` entries is stored; see the module's text."""
    chunk, within = position // CHUNK, position % CHUNK
    lanes = torch.clamp(units * align - chunk * CHUNK, max=CHUNK) // 4
    return chunk * CHUNK + (within % lanes) * 4 + within // lanes


def entries(matrix: SparseRows) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and value of every stored entry; values that only fill up are 0."""
    starts = matrix.starts.long()
    size = matrix.columns.numel()
    row = torch.repeat_interleave(matrix.order.long(), starts.diff() * matrix.align, output_size=size)
    if matrix.values is None:
        column = (matrix.columns & 0xFFFF).long()
        value = (matrix.columns >> 16).to(torch.int16).view(matrix.dtype)
    else:
        column = matrix.columns.long() & 0xFFFF
        value = matrix.values
        if matrix.scales is not None:
            value = (value.float() * matrix.scales[row]).to(matrix.dtype)
    return row, torch.where(value != 0, column, 0), value


def unpack(matrix: SparseRows) -> Tensor:
    """The dense matrix. Entries of value 0 are left out: they all name column 0, which may hold a weight."""
    row, column, value = entries(matrix)
    return _scatter(row, column, value, matrix.shape)


def _scatter(row: Tensor, column: Tensor, value: Tensor, shape: Sequence[int]) -> Tensor:
    rows, width = shape
    # One place more than the matrix has, for entries that only fill up: no host is asked how many there are.
    dense = value.new_zeros(rows * width + 1)
    dense[torch.where(value != 0, row * width + column, rows * width)] = value
    return dense[:-1].view(rows, width)
