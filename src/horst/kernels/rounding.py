"""Stochastic rounding of float32 to bfloat16, with noise that every backend and every rank computes alike.

A bfloat16 number has 8 bits of precision, so a weight cannot take a step smaller than about 1/256 of itself: rounded to
nearest, steps of 1e-3 are lost, all of them. Rounded up or down at random, with the probability that makes it right on
average, they add up.

The noise is a hash of (step, tensor, element), not a draw from a generator: data-parallel replicas stay equal, a
resumed run repeats the one never stopped, and nothing is synchronised or saved for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def stochastic_round(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 ``x`` to one of its two bfloat16 neighbours, the nearer one with the greater probability.

    Args:
        x: Float32 tensor. NaN and infinities keep their value.
        noise: Integers in [0, 65536), one per element, such as from :func:`rounding_noise`.

    Example:
        >>> x = torch.full((2,), 1.0 + 2**-9)  # between the bfloat16 numbers 1 and 1 + 2**-7
        >>> stochastic_round(x, torch.tensor([0, 65535])).tolist()
        [1.0, 1.0078125]
    """
    # A bfloat16 number is the upper half of a float32 one: adding noise below the cut carries into the upper half with
    # the probability that the lower half stands for. The addition must not turn NaN into a number.
    bits = (x.view(torch.int32) + noise.to(torch.int32)) & -65536
    return torch.where(x.isnan(), x, bits.view(torch.float32)).to(torch.bfloat16)


def rounding_noise(shape: torch.Size, step: Tensor, salt: int, device: torch.device) -> Tensor:
    """32 bits of noise per element as int64, equal to what the Triton kernel computes for a contiguous tensor.

    Args:
        step: Step counter, a tensor with one element; it need not be on ``device`` and is not read on the host.
        salt: Number that tells the tensors of one step apart.
    """
    index = torch.arange(shape.numel(), dtype=torch.int64, device=device)
    key = _mix((step.to(device, torch.int64) + salt * 0x9E3779B9) & _MASK32)
    return _mix((index + (index >> 32)) & _MASK32 ^ key).view(shape)


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers that changes about half of the bits when one changes (multiply and xor-shift)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)
