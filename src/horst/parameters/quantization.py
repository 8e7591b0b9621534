r"""Few bits per weight: integer codes, and one scale for each group of consecutive columns of a row.

A weight w becomes :math:`c\, s` with an integer code :math:`|c| \le q = 2^{b-1} - 1` for b bits, and the scale s of its
group. There is no zero point: 0 is stored as 0. Scales are bfloat16 numbers whose product with every code is exact in
the weights' own dtype, so their precision depends on it:

========  =====================  ==========================================
dtype     bits of precision      bits of a scale for int8, int4, int3, int2
========  =====================  ==========================================
float32   24                     8, 8, 8, 8
float16   11                     4, 8, 8, 8
bfloat16  8                      1, 5, 6, 7
========  =====================  ==========================================

What is rounded once is therefore found again: :func:`quantize` of weights that lie on such a grid returns codes and
scales that give exactly these weights, whoever rounded them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BITS", "GROUP_SIZE", "Grid", "choose_scales", "dequantize", "parse_values", "quantize"]

#: Bits per weight, by the name that options use.
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
GROUP_SIZE = 128
_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PRECISION = {torch.float64: 24, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
_PIECE = 1 << 22  # weights in work at once
# Largest code times scale, as a share of the group's largest weight. With 8 bits clipping never pays.
_CLIP_RATIOS = [1.0 - i / 32 for i in range(21)]


@dataclass(frozen=True)
class Grid:
    """What weights are rounded to: codes of ``bits`` bits with a scale per ``group_size`` columns.

    Args:
        bits: Bits of a code: 8, 4, 3 or 2.
        group_size: Columns that share a scale.

    Example:
        >>> Grid(4).largest
        7
    """

    bits: int
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        if self.bits not in BITS.values():
            raise ValueError(f"bits must be one of 8, 4, 3, 2, got {self.bits}.")
        if not (isinstance(self.group_size, int) and self.group_size >= 1):
            raise ValueError(f"group_size must be at least 1 column, got {self.group_size}. {GROUP_SIZE} is usual.")

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1) - 1)

    def round(self, W: Tensor) -> Tensor:
        """``W`` (any shape, groups along its last dimension) rounded to the nearest point of its grid."""
        codes, scales = quantize(W, self.bits, self.group_size)
        return dequantize(codes, scales, self.group_size, W.dtype)


def parse_values(values: str | None, group_size: int = GROUP_SIZE, name: str = "values") -> Grid | torch.dtype | None:
    """The grid or dtype that ``"int4"`` or ``"bfloat16"`` stands for; None for None.

    Example:
        >>> parse_values("int4"), parse_values("bfloat16")
        (Grid(bits=4, group_size=128), torch.bfloat16)
    """
    if values is None or values in _FLOATS:
        return None if values is None else _FLOATS[values]
    if values not in BITS:
        raise ValueError(f"{name} must be one of {', '.join([*_FLOATS, *BITS])}, or None, got {values!r}.")
    return Grid(BITS[values], group_size)


def quantize(W: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``W``, with one scale for each ``group_size`` consecutive entries of the last dimension.

    The scale of 8 bits is the least that clips nothing. With fewer bits it is the one of least squared error among 21
    that clip up to 5/8 of the largest weight.

    Args:
        W: Weights, rows x columns or of any other shape, floating point and finite.
        bits: Bits of a code: 8, 4, 3 or 2.
        group_size: Columns that share a scale; the last group of a row may be shorter.

    Returns:
        The codes (int8, shaped like ``W``), and the scales (bfloat16, ... x groups). A group of zeros has the scale 0.

    Example:
        >>> codes, scales = quantize(torch.tensor([[0.0, 1.0, -3.5, 2.0]]), bits=4, group_size=4)
        >>> codes, scales
        (tensor([[ 0,  2, -7,  4]], dtype=torch.int8), tensor([[0.5000]], dtype=torch.bfloat16))
    """
    grid = Grid(bits, group_size)
    if W.dtype not in _PRECISION:
        raise ValueError(f"quantize takes floating-point weights, got {W.dtype}.")
    if not W.dim():
        raise ValueError("quantize takes weights of at least one dimension, got a single number.")
    columns = W.shape[-1]
    groups = -(-columns // group_size)
    codes = torch.empty(W.shape, dtype=torch.int8, device=W.device)
    scales = torch.empty((*W.shape[:-1], groups), dtype=torch.bfloat16, device=W.device)
    if W.numel():
        rows, flat_codes, flat_scales = W.reshape(-1, columns), codes.view(-1, columns), scales.view(-1, groups)
        for own in _pieces(len(rows), columns):
            w = _grouped(rows[own], group_size)
            if not bool(w.isfinite().all()):
                raise ValueError(
                    "weights with NaN or infinity (in float32) cannot be quantized. values=None keeps them."
                )
            s = _scales(w, grid, W.dtype)
            c = _codes(w, s[:, None], grid).view(-1, groups * group_size)[:, :columns]
            flat_codes[own], flat_scales[own] = c.to(torch.int8), s.view(-1, groups).to(torch.bfloat16)
    return codes, scales


def dequantize(
    codes: Tensor, scales: Tensor, group_size: int = GROUP_SIZE, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The weights that :func:`quantize` stands for: exact in the dtype of the weights it was given.

    Example:
        >>> dequantize(torch.tensor([[2, -7]], dtype=torch.int8), torch.tensor([[0.5]], dtype=torch.bfloat16))
        tensor([[ 1.0000, -3.5000]])
    """
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        columns = codes.shape[-1]
        rows, s, flat = codes.reshape(-1, columns), scales.reshape(-1, scales.shape[-1]), out.view(-1, columns)
        for own in _pieces(len(rows), columns):
            wide = s[own].to(torch.float32).repeat_interleave(group_size, dim=1)[:, :columns]
            flat[own] = (rows[own] * wide).to(dtype)
    return out


def choose_scales(w: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The scale for each group of weights to round to: float32, never 0.

    Args:
        w: Weights, groups x entries, float32. Zeros do not matter.
        grid: Number of bits.
        dtype: Dtype that a code times its scale must be exact in.
    """
    largest = w.abs().amax(-1)
    codes = torch.full_like(largest, grid.largest)  # a tensor: some devices divide by a number inexactly
    best = _representable(largest / codes, grid, dtype)
    if grid.bits == 8:
        return best
    error = torch.full_like(best, math.inf)
    unit = torch.where(largest > 0, largest, 1.0)[:, None]  # squares of relative errors do not overflow
    for ratio in _CLIP_RATIOS:
        s = _representable(ratio * largest / codes, grid, dtype)
        found = ((_codes(w, s[:, None], grid) * s[:, None] - w) / unit).square_().sum(-1)
        best, error = torch.where(found < error, s, best), torch.minimum(found, error)
    return best


def _scales(w: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """For each group the scale of the grid that it lies on, and where there is none, of the one it is rounded to."""
    s, found = _exact_scales(w, grid, dtype)
    if not bool(found.all()):
        rest = w[~found]
        chosen = choose_scales(rest, grid, dtype)[:, None]
        # Several scales may give the same weights. Searching once more makes the choice depend on these alone.
        s[~found], _ = _exact_scales(_codes(rest, chosen, grid) * chosen, grid, dtype)
    return s


def _exact_scales(w: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For each group of ``w`` the largest scale whose multiples its weights are, and whether there is one.

    Such weights are whole multiples of a power of two, since a scale has at most 8 bits. The scale is their greatest
    common divisor, or the part of it that has few enough bits.
    """
    largest = w.abs().amax(-1)
    bits, least = _precision(grid, dtype)
    # Codes have at most 7 bits and scales 8: the last bit of a scale is not below the 15th of the largest weight.
    unit = _power_of_two((torch.frexp(largest)[1] - 15).clamp_min(least))
    multiples = w / unit[:, None]
    found = (multiples == multiples.round()).all(-1)
    s = torch.zeros_like(largest)
    if bool(found.any()):
        divisor = _greatest_common_divisor(multiples[found].abs().to(torch.int32))
        limit = (largest[found] / unit[found]).to(torch.int32)
        chosen = torch.zeros_like(divisor)
        for part in range(1, grid.largest + 1):
            candidate = divisor // part
            odd = candidate // (candidate & -candidate).clamp_min(1)
            fits = (candidate * part == divisor) & (odd < 2**bits) & (limit <= grid.largest * candidate)
            chosen = torch.where((chosen == 0) & fits, candidate, chosen)
            if bool(((chosen > 0) | (divisor == 0)).all()):
                break
        s[found] = chosen * unit[found]
        found[found.clone()] = (chosen > 0) | (divisor == 0)
    return s, found


def _greatest_common_divisor(numbers: Tensor) -> Tensor:
    """Of each row."""
    while (n := numbers.shape[1]) > 1:
        half = n // 2
        folded = torch.gcd(numbers[:, :half], numbers[:, half : 2 * half])
        numbers = torch.cat([folded, numbers[:, 2 * half :]], 1)
    return numbers[:, 0]


def _representable(s: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The least scale that is not below ``s`` and has few enough bits; where its products would overflow, the next."""
    bits, least = _precision(grid, dtype)
    step = _power_of_two((torch.frexp(s)[1] - bits).clamp_min(least))
    limit = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max
    above = (s / step).ceil() * step
    return torch.where(above * grid.largest > limit, (s / step).floor() * step, above).clamp_min(2.0**least)


def _precision(grid: Grid, dtype: torch.dtype) -> tuple[int, int]:
    """The bits of a scale, and the exponent of the least power of two that scales are multiples of."""
    bits = min(8, _PRECISION[dtype] - grid.bits + 1)
    return bits, -24 if dtype == torch.float16 else -126


def _power_of_two(exponent: Tensor) -> Tensor:
    """Two to the ``exponent`` (-126 to 127), float32: made of its bits, since pow is not exact on every device."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _codes(w: Tensor, s: Tensor, grid: Grid) -> Tensor:
    """The nearest codes, as float32; 0 where the scale is 0."""
    return (w / torch.where(s > 0, s, 1.0)).round_().clamp_(-grid.largest, grid.largest)


def _grouped(rows: Tensor, group_size: int) -> Tensor:
    """Rows cut into groups, one after the other, float32; the last group of each row is filled up with zeros."""
    padded = torch.nn.functional.pad(rows.to(torch.float32), (0, -rows.shape[1] % group_size))
    return padded.reshape(-1, group_size)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(_PIECE // columns, 1)
    return (slice(start, start + step) for start in range(0, rows, step))
