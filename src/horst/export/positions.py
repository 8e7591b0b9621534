"""Where the kept weights of a tensor are, in the fewest bits: one bit per weight, or the gaps between them.

A gap is the number of zeros before a kept weight, in row-major order; the last one is that after the last kept weight.
It is cut into its lowest k bits, stored as they are, and the rest, stored as that many zeros and a one (Rice's code).
With k = 0 that would be the bitmask. Bits per weight, with the zeros spread evenly:

=========  =====  =====  =====  =====  =====
zeros      50 %   70 %   80 %   90 %   95 %
=========  =====  =====  =====  =====  =====
bitmask    1      1      1      1      1
k = 1      1.167  0.888  0.756  0.626  0.563
k = 2      1.533  0.995  0.739  0.491  0.370
k = 3      2.002  1.218  0.840  0.476  0.299
entropy    1      0.881  0.722  0.469  0.286
=========  =====  =====  =====  =====  =====

A larger k gains little below 97 %, and would let a small file ask for much memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horst.sparsity.masks import pack, unpack

MAX_REMAINDER_BITS = 3
_PIECE = 1 << 22  # numbers in work at once; a multiple of eight, so that a piece is whole bytes


def gaps_between(kept: Tensor) -> Tensor:
    """The zeros before each True of a flat mask, and those after the last.

    Example:
        >>> gaps_between(torch.tensor([False, True, True, False, False]))
        tensor([1, 0, 2])
    """
    ends = torch.tensor([-1, kept.numel()], device=kept.device)
    positions = torch.cat([ends[:1], kept.nonzero().squeeze(1), ends[1:]])
    return positions.diff() - 1


def choose_remainder_bits(gaps: Tensor) -> tuple[int, int]:
    """The number of lowest bits with the shortest code, and the bytes of that code.

    Example:
        >>> choose_remainder_bits(torch.full((80,), 12))
        (3, 50)
    """
    sizes = {}
    for k in range(1, MAX_REMAINDER_BITS + 1):
        unary = int((gaps >> k).sum()) + len(gaps)
        sizes[k] = -(-unary // 8) + -(-len(gaps) * k // 8)
    best = min(sizes, key=lambda k: sizes[k])
    return best, sizes[best]


def encode_gaps(gaps: Tensor, remainder_bits: int) -> tuple[Tensor, Tensor]:
    """The bytes of the zeros and ones, and those of the lowest bits.

    Example:
        >>> encode_gaps(torch.tensor([5, 2]), 1)  # 5 = 2 * 2 + 1: 001 and 1; 2 = 2 * 1 + 0: 01 and 0
        (tensor([20], dtype=torch.uint8), tensor([1], dtype=torch.uint8))
    """
    ones = ((gaps >> remainder_bits) + 1).cumsum(0) - 1
    bits = torch.zeros(int(ones[-1]) + 1, dtype=torch.bool, device=gaps.device)
    bits[ones] = True
    return pack(bits), pack_numbers(gaps & ((1 << remainder_bits) - 1), remainder_bits)


def decode_gaps(unary: Tensor, remainders: Tensor, remainder_bits: int, count: int) -> Tensor | None:
    """The ``count`` gaps that :func:`encode_gaps` was given; None where the bytes are not such a code."""
    ones = unpack(unary, (8 * len(unary),)).nonzero().squeeze(1)
    if len(ones) != count or int(ones[-1]) // 8 + 1 != len(unary):
        return None
    quotients = torch.cat([ones[:1], ones.diff() - 1])
    return (quotients << remainder_bits) + unpack_numbers(remainders, remainder_bits, count)


def positions_of(gaps: Tensor) -> Tensor:
    """The flat positions of the kept weights, and after them the number of all weights.

    Example:
        >>> positions_of(torch.tensor([1, 0, 2]))
        tensor([1, 2, 5])
    """
    return (gaps + 1).cumsum(0) - 1


def pack_numbers(numbers: Tensor, bits: int) -> Tensor:
    """Integers in ``bits`` bits each, one after the other, lowest bit first; negative ones in two's complement.

    Example:
        >>> pack_numbers(torch.tensor([1, -1]), 4)
        tensor([241], dtype=torch.uint8)
    """
    places = torch.arange(bits, dtype=numbers.dtype, device=numbers.device)
    packed = [pack(((part[:, None] >> places) & 1).bool()) for part in numbers.split(_PIECE)]
    return torch.cat(packed) if packed else torch.empty(0, dtype=torch.uint8, device=numbers.device)


def unpack_numbers(packed: Tensor, bits: int, count: int, *, signed: bool = False) -> Tensor:
    """The ``count`` integers that :func:`pack_numbers` was given: int64, or with ``signed`` int8.

    Example:
        >>> unpack_numbers(torch.tensor([241], dtype=torch.uint8), 4, 2, signed=True)
        tensor([ 1, -1], dtype=torch.int8)
    """
    numbers = torch.empty(count, dtype=torch.int8 if signed else torch.int64, device=packed.device)
    for start in range(0, count, _PIECE):
        part = numbers[start : start + _PIECE]
        own = packed[start * bits // 8 : -(-(start + len(part)) * bits // 8)]
        lanes = unpack(own, (len(part), bits))
        part.zero_()
        for place in range(bits):
            part |= lanes[:, place].to(part.dtype) << place
        if signed:
            part -= (part >> (bits - 1)) << bits
    return numbers
