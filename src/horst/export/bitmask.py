"""Tensors as bitmask and values, streamed to and from a file in pieces.

A value counts as zero if all its bits are zero: -0.0 and NaN are values. Bits are packed eight per byte, lowest first.
Each tensor goes through memory in pieces, so that no second copy of it exists.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from torch import Tensor

from horst.files import InvalidFileError
from horst.sparsity.masks import pack, unpack

# Weights per piece; a multiple of eight, so that a piece's bits are whole bytes.
PIECE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_values(tensor: Tensor) -> tuple[int, int]:
    """How many entries have a bit set, and how many of those are -0.0.

    Example:
        >>> count_values(torch.tensor([0.0, -0.0, torch.nan, 1.0]))
        (3, 1)
    """
    values = negative_zeros = 0
    for piece in _pieces(tensor):
        mask = as_integers(piece) != 0
        values += int(mask.count_nonzero())
        if piece.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            negative_zeros += int(mask.logical_and_(piece == 0).count_nonzero())
    return values, negative_zeros


def write_dense(file: BinaryIO, start: int, tensor: Tensor) -> int:
    """Write the tensor's bytes at ``start`` of the file; returns their CRC-32."""
    file.seek(start)
    crc32 = 0
    for piece in _pieces(tensor):
        file.write(_memory(piece))
        crc32 = zlib.crc32(_memory(piece), crc32)
    return crc32


def write_sparse(file: BinaryIO, mask_start: int, values_start: int, tensor: Tensor) -> tuple[int, int]:
    """Write the tensor's bits and values at their places in the file; returns the CRC-32 of both."""
    mask_crc32 = values_crc32 = 0
    for piece in _pieces(tensor):
        mask = as_integers(piece) != 0
        bits, values = pack(mask), as_integers(piece)[mask]
        file.seek(mask_start)
        mask_start += file.write(_memory(bits))
        file.seek(values_start)
        values_start += file.write(_memory(values))
        mask_crc32 = zlib.crc32(_memory(bits), mask_crc32)
        values_crc32 = zlib.crc32(_memory(values), values_crc32)
    return mask_crc32, values_crc32


def read_dense(file: BinaryIO, start: int, out: Tensor) -> None:
    """Fill ``out``, contiguous and on the CPU, with what :func:`write_dense` wrote."""
    file.seek(start)
    for piece in _pieces(out):
        _read_into(file, piece)


def read_sparse(file: BinaryIO, mask_start: int, values_start: int, out: Tensor) -> None:
    """Fill ``out``, contiguous and on the CPU, with what :func:`write_sparse` wrote."""
    for piece in _pieces(out):
        bits = torch.empty(-(-piece.numel() // 8), dtype=torch.uint8)
        file.seek(mask_start)
        mask_start += _read_into(file, bits)
        mask = unpack(bits, piece.shape)
        values = torch.empty(int(mask.count_nonzero()), dtype=_INTEGERS[piece.itemsize])
        file.seek(values_start)
        values_start += _read_into(file, values)
        as_integers(piece).zero_().masked_scatter_(mask, values)


def scan(file: BinaryIO, start: int, end: int) -> tuple[int, int]:
    """CRC-32 and number of set bits of a stretch of the file."""
    file.seek(start)
    crc32 = bits = 0
    while start < end:
        block = file.read(min(1 << 20, end - start))
        if not block:
            raise InvalidFileError("the file became shorter while it was read.")
        crc32 = zlib.crc32(block, crc32)
        bits += int.from_bytes(block, "little").bit_count()
        start += len(block)
    return crc32, bits


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor's entries in row-major order: views, where it is contiguous and on the CPU."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        yield flat[start : start + PIECE].cpu()


def as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers of the same width: comparing and moving these keeps every bit."""
    return tensor.view(_INTEGERS[tensor.itemsize])


def _memory(tensor: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a buffer of bytes, without NumPy; valid while the tensor lives."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.numel() else b""


def _read_into(file: BinaryIO, tensor: Tensor) -> int:
    view = memoryview(_memory(tensor)).cast("B") if tensor.numel() else memoryview(bytearray())
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise InvalidFileError("the file became shorter while it was read.")
        done += count
    return done
