"""Cache blocking for elementwise updates on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 2**18  # elements: 1 MiB of float32 per operand


def cache_sized_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors themselves or, where they are large and on a CPU, views that cover them piece by piece.

    An update of a dozen passes then finds its operands in the cache, and its temporaries need no fresh pages from the
    system, which is where most of the time of a plain for-loop goes.
    """
    if (
        tensors[0].numel() <= PIECE
        or torch.compiler.is_compiling()  # the compiler makes one pass of it anyway
        or not all(t.is_cpu and t.is_contiguous() for t in tensors)
    ):
        yield tensors
    else:
        yield from zip(*(t.view(-1).split(PIECE) for t in tensors), strict=True)
