"""One tensor as a file stores it: positions of the kept weights, their values or codes, and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from horst.export.bitmask import as_integers
from horst.export.positions import (
    choose_remainder_bits,
    decode_gaps,
    encode_gaps,
    gaps_between,
    pack_numbers,
    positions_of,
    unpack_numbers,
)
from horst.parameters.quantization import Grid, dequantize, quantize
from horst.sparsity.masks import pack, unpack

BITMASK, GAPS, REMAINDERS = "::bitmask", "::gaps", "::remainders"
VALUES, SCALES = "::values", "::scales"
Parts = dict[str, Tensor]
Spec = tuple[torch.dtype, tuple[int, ...]]
# What more than one entry costs in the header: a tensor that gains less is not split.
ENTRY_BYTES = 128


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored.

    Args:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        nnz: Number of its values; None where all are stored.
        values: Dtype of the values, or grid of their codes; None is the tensor's own dtype.
        view: The shape (outer, n, inner) that the tensor is seen in for a grid: groups run along n.
        gaps: Lowest bits of a gap, and bytes of the rest, where positions are stored as gaps; None is a bitmask.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nnz: int | None
    values: torch.dtype | Grid | None = None
    view: tuple[int, int, int] | None = None
    gaps: tuple[int, int] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is stored in its own dtype, with a bitmask or whole."""
        return self.values is None and self.gaps is None

    @property
    def weights(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    def entries(self, name: str) -> dict[str, Spec]:
        """The entries of the file that hold the tensor."""
        found: dict[str, Spec] = {}
        if self.gaps is not None:
            assert self.nnz is not None
            found[name + GAPS] = (torch.uint8, (self.gaps[1],))
            found[name + REMAINDERS] = (torch.uint8, (-(-(self.nnz + 1) * self.gaps[0] // 8),))
        elif self.nnz is not None:
            found[name + BITMASK] = (torch.uint8, (-(-self.weights // 8),))
        count = self.weights if self.nnz is None else self.nnz
        if isinstance(self.values, Grid):
            assert self.view is not None
            outer, n, inner = self.view
            bits = self.values.bits
            found[name + VALUES] = (torch.int8, (count,)) if bits == 8 else (torch.uint8, (-(-count * bits // 8),))
            found[name + SCALES] = (torch.bfloat16, (outer, -(-n // self.values.group_size), inner))
        elif self.nnz is None:
            found[name] = (self.values or self.dtype, self.shape)
        else:
            found[name + VALUES] = (self.values or self.dtype, (self.nnz,))
        return found

    @property
    def positions_as(self) -> str:
        """The code of the positions, in words."""
        if self.nnz is None:
            return "all"
        return "bitmask" if self.gaps is None else f"gaps, {self.gaps[0]} bits"

    @property
    def values_as(self) -> str:
        """The form of the values, in words."""
        if isinstance(self.values, Grid):
            return f"int{self.values.bits}, groups of {self.values.group_size}"
        return str(self.values or self.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """The parts of one tensor of a file, unpacked, for layers that are built without the dense tensor.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        kept: Booleans shaped like the tensor, True where a value is stored; None where all are.
        values: Stored values in row-major order: floating point, or int8 codes where there are scales.
        scales: Scales, outer x groups x inner, bfloat16; None without codes.
        group_size: Entries along n that share a scale; None without codes.
        view: The shape (outer, n, inner) that the tensor is seen in; groups run along n, the inputs. It is
            (out, in, 1) for the weight of ``nn.Linear``, and (1, in, out) for that of Hugging Face's ``Conv1D``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kept: Tensor | None
    values: Tensor
    scales: Tensor | None = None
    group_size: int | None = None
    view: tuple[int, int, int] | None = None

    def grouped(self) -> tuple[Tensor, Tensor]:
        """Codes (int8, rows x columns, 0 where nothing is stored) and scales (rows x groups): out x in for a layer."""
        if self.scales is None or self.view is None:
            raise ValueError("a tensor that is stored as floating-point values has no codes.")
        codes = self._filled().view(self.view).transpose(1, 2)
        return codes.reshape(-1, self.view[1]), self.scales.transpose(1, 2).reshape(-1, self.scales.shape[1])

    def dense(self) -> Tensor:
        """The tensor itself."""
        if self.scales is None:
            return self._filled().to(self.dtype).view(self.shape)
        assert self.view is not None
        assert self.group_size is not None
        outer, n, inner = self.view
        rows = dequantize(*self.grouped(), self.group_size, self.dtype)
        return rows.view(outer, inner, n).transpose(1, 2).reshape(self.shape)

    def _filled(self) -> Tensor:
        if self.kept is None:
            return self.values
        flat = torch.zeros(self.kept.numel(), dtype=self.values.dtype, device=self.values.device)
        as_integers(flat).masked_scatter_(self.kept.view(-1), as_integers(self.values))
        return flat


def encode(
    tensor: Tensor, values: torch.dtype | Grid, view: tuple[int, int, int], min_sparsity: float
) -> tuple[Stored, Parts]:
    """A tensor in the smallest of its forms, and the parts of that, by the ends of their names.

    Args:
        tensor: Weights, floating point, of two or more dimensions.
        values: Dtype of the values, or grid of their codes. A dtype that is no narrower than the tensor's is not used.
        view: The shape (outer, n, inner) that the tensor is seen in for a grid.
        min_sparsity: Share of zeros that must be exceeded for zeros to be left out.
    """
    tail: Parts = {}
    dtype, shape, n = tensor.dtype, tuple(tensor.shape), tensor.numel()
    if isinstance(values, Grid):
        codes, scales = quantize(tensor.reshape(view).transpose(1, 2), values.bits, values.group_size)
        flat, bits = codes.transpose(1, 2).reshape(-1), values.bits
        tail[SCALES] = scales.transpose(1, 2).contiguous()
        plain = Stored(dtype, shape, None, values, view)
    else:
        narrower = values if values.itemsize < dtype.itemsize else None
        flat = tensor.to(narrower or dtype).reshape(-1)
        bits = 8 * flat.itemsize
        plain = Stored(dtype, shape, None, narrower)
    kept = as_integers(flat) != 0  # a kept weight that was rounded to 0 is a zero from here on
    nnz = int(kept.count_nonzero())
    gaps = gaps_between(kept)
    k, gap_bytes = choose_remainder_bits(gaps)
    mask_bytes = -(-n // 8)
    saved = (n - nnz) * bits // 8 - min(gap_bytes, mask_bytes)
    if saved <= ENTRY_BYTES or n - nnz <= min_sparsity * n:
        stored, head, flat = plain, {}, flat.view(shape if "" in plain.entries("") else -1)
    else:
        flat = flat[kept]
        if gap_bytes + ENTRY_BYTES < mask_bytes:
            unary, remainders = encode_gaps(gaps, k)
            head = {GAPS: unary, REMAINDERS: remainders}
            stored = Stored(dtype, shape, nnz, plain.values, plain.view, (k, len(unary)))
        else:
            head = {BITMASK: pack(kept)}
            stored = Stored(dtype, shape, nnz, plain.values, plain.view)
    packed = pack_numbers(flat, bits) if isinstance(values, Grid) and bits < 8 else flat
    return stored, head | {VALUES if VALUES in stored.entries("") else "": packed} | tail


def decode(stored: Stored, parts: Mapping[str, Tensor]) -> StoredTensor:
    """Unpack the parts of a tensor, which :func:`find_problem` has passed."""
    kept = None
    if stored.gaps is not None:
        gaps = _gaps(stored, parts)
        assert gaps is not None
        kept = torch.zeros(stored.weights, dtype=torch.bool, device=gaps.device)
        kept[positions_of(gaps)[:-1]] = True
        kept = kept.view(stored.shape)
    elif stored.nnz is not None:
        kept = unpack(parts[BITMASK], stored.shape)
    values = parts[VALUES] if VALUES in parts else parts[""].reshape(-1)
    if not isinstance(stored.values, Grid):
        return StoredTensor(stored.shape, stored.dtype, kept, values)
    grid, count = stored.values, stored.weights if stored.nnz is None else stored.nnz
    codes = values if grid.bits == 8 else unpack_numbers(values, grid.bits, count, signed=True)
    return StoredTensor(stored.shape, stored.dtype, kept, codes, parts[SCALES], grid.group_size, stored.view)


def find_problem(stored: Stored, parts: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the parts of a tensor that is not plain; their dtypes and shapes are right already."""
    if stored.gaps is not None:
        gaps = _gaps(stored, parts)
        if gaps is None or int(positions_of(gaps)[-1]) != stored.weights:
            return f"its gaps do not lead through {stored.weights} weights with {stored.nnz} values"
        assert stored.nnz is not None
        if _has_bits_beyond(parts[REMAINDERS], (stored.nnz + 1) * stored.gaps[0]):
            return "bits are set beyond its last gap"
    if isinstance(stored.values, Grid):
        scales = parts[SCALES]
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            return "a scale is negative, infinite or NaN"
        bits, count = stored.values.bits, stored.weights if stored.nnz is None else stored.nnz
        if bits < 8 and _has_bits_beyond(parts[VALUES], count * bits):
            return "bits are set beyond its last code"
        codes = parts[VALUES] if bits == 8 else unpack_numbers(parts[VALUES], bits, count, signed=True)
        if count and int(codes.min()) < -stored.values.largest:
            return f"a code is below -{stored.values.largest}"
    return None


def _gaps(stored: Stored, parts: Mapping[str, Tensor]) -> Tensor | None:
    assert stored.gaps is not None
    assert stored.nnz is not None
    return decode_gaps(parts[GAPS], parts[REMAINDERS], stored.gaps[0], stored.nnz + 1)


def _has_bits_beyond(packed: Tensor, bits: int) -> bool:
    """Whether the last byte has a bit set that is no number's."""
    return bool(bits % 8) and int(packed[-1]) >> bits % 8 != 0
