"""One launch over many tensors: tables in device memory that tell each program of a Triton kernel what to work on.

A kernel gets a table of addresses (one row per tensor) and a table of chunks (tensor, and the chunk's first block).
Program ``i`` belongs to chunk ``i // BLOCKS_PER_CHUNK``; the last chunk of a tensor may reach past its end, where
programs return at once. The chunk table makes the look-up one load, and chunks of many blocks keep it small: 16 k rows
for a billion weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Elements per program and warps per program: measured on an H200 against 512 and 2048 elements, 2 and 8 warps.
BLOCK = 1024
NUM_WARPS = 4
BLOCKS_PER_CHUNK = 64

_ADDRESS, _IS_CONTIGUOUS, _DTYPE = Tensor.data_ptr, Tensor.is_contiguous, operator.attrgetter("dtype")


@dataclasses.dataclass
class Launch:
    """What one launch needs, for tensors of equal dtypes on one device; kept from step to step.

    Attributes:
        table: int64, one row per tensor: the addresses of the fixed operands, the number of elements, the position in
            the caller's list.
        moving_table: int64, the addresses of the operand that moves.
        chunks: int32, rows (tensor, first block).
        tickets: int32, zeros, one per tensor, for kernels whose programs count themselves.
        dtypes: Dtypes of the fixed operands, then of the moving one.
        aligned: Whether all addresses allow 16-byte accesses.
    """

    table: Tensor
    chunks: Tensor
    tickets: Tensor
    dtypes: tuple[torch.dtype, ...]
    positions: list[int]
    fixed_aligned: bool
    moving_table: Tensor
    moving_addresses: list[int] = dataclasses.field(default_factory=list)
    aligned: bool = False
    # Pinned memory cannot be taken while a CUDA graph is captured, so a buffer for that moment is kept ready.
    spare: Tensor | None = None

    # By compile-time constants: what Triton compiled for them. Triton's own look-up by all arguments would take longer
    # than anything else the host does in a step of a small model.
    compiled: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)

    def run(self, kernel: Any, arguments: tuple[Any, ...], constants: tuple[Any, ...], *, may_reuse: bool) -> None:
        """Launch as many programs as there are blocks in all chunks.

        Args:
            kernel: Function of the arguments, the constants, and ALIGNED, BLOCK, BLOCKS_PER_CHUNK.
            may_reuse: Whether the types of the arguments, and the alignment of pointers, are those of every other call
                with this and equal constants.
        """
        device = self.table.device
        grid = (self.chunks.shape[0] * BLOCKS_PER_CHUNK, 1, 1)
        constants = (*constants, self.aligned, BLOCK, BLOCKS_PER_CHUNK)
        known = self.compiled.get(constants) if may_reuse else None
        here = device.type != "cuda" or device.index == torch.cuda.current_device()
        with contextlib.nullcontext() if here else torch.cuda.device(device):  # the guard takes as long as a launch
            if known is not None:
                known(*arguments, *constants)
                return
            compiled = kernel[grid](*arguments, *constants, num_warps=NUM_WARPS)
        if may_reuse and compiled is not None:  # None in Triton's interpreter
            self.compiled[constants] = compiled[grid]


class LaunchCache:
    """The tables of the last step, used again as long as no tensor has moved.

    Fixed operands (weights, moments) rarely move. The moving one does (``zero_grad`` frees gradients, the next backward
    takes others); then only its addresses are sent again.

    Attributes:
        empty: The positions of tensors without elements, which no launch visits.
    """

    def __init__(self) -> None:
        self.empty: list[int] = []
        self._signature: tuple[Any, ...] | None = None
        self._launches: list[Launch] = []
        self._captured: list[tuple[Tensor, Tensor]] = []  # a CUDA graph reads these at each replay

    def reuse(self, fixed: Sequence[Sequence[Tensor]], moving: Sequence[Tensor]) -> list[Launch] | None:
        """The last step's launches if they fit these tensors (parallel lists), else None: then :meth:`plan`."""
        if _signature(fixed, moving) != self._signature:
            return None
        self._send_moved(moving)
        return self._launches

    def plan(self, fixed: Sequence[Sequence[Tensor]], moving: Sequence[Tensor], *, keep: bool = True) -> list[Launch]:
        """New launches. The operands of one position must share one dense layout.

        Args:
            keep: Whether the tensors will be there at the next step, and not stand-ins for others.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the parameters or the optimizer's state changed since the last step outside of CUDA graph capture. "
                "Take at least one step with the same tensors before capturing."
            )
        self._launches = _plan(fixed, moving)
        self.empty = [i for i, t in enumerate(fixed[0]) if not t.numel()]
        self._signature = _signature(fixed, moving) if keep else None
        self._send_moved(moving)
        return self._launches

    def _send_moved(self, moving: Sequence[Tensor]) -> None:
        addresses = list(map(_ADDRESS, moving))
        for launch in self._launches:
            own = addresses
            if len(launch.positions) != len(addresses):
                own = [addresses[i] for i in launch.positions]
            if own != launch.moving_addresses:
                self._send(launch, own)

    def _send(self, launch: Launch, addresses: list[int]) -> None:
        device = launch.table.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if launch.spare is None:
                raise RuntimeError(
                    "a CUDA graph of this optimizer's step was captured already and gradients have moved since. "
                    "Take one step outside of capture before capturing again."
                )
            pinned, launch.spare = launch.spare, None
            pinned.copy_(torch.tensor(addresses, dtype=torch.int64))
            launch.moving_table = torch.empty_like(launch.moving_table).copy_(pinned, non_blocking=True)
            self._captured.append((pinned, launch.moving_table))
        else:
            launch.moving_table = _upload(addresses, device, torch.int64)
            if device.type == "cuda" and launch.spare is None:
                launch.spare = torch.empty(len(addresses), dtype=torch.int64, pin_memory=True)
        launch.moving_addresses = addresses
        launch.aligned = launch.fixed_aligned and _are_aligned(addresses)


def _signature(fixed: Sequence[Sequence[Tensor]], moving: Sequence[Tensor]) -> tuple[Any, ...]:
    """What must not change for tables to be used again. Read at each step for each tensor, so made by C functions."""
    dense = list(map(_IS_CONTIGUOUS, moving))
    return (
        [list(map(_ADDRESS, column)) for column in fixed],
        list(map(_DTYPE, moving)),  # a gradient has its parameter's, which torch sees to
        dense if all(dense) else [t.stride() for t in moving],
    )


def _plan(fixed: Sequence[Sequence[Tensor]], moving: Sequence[Tensor]) -> list[Launch]:
    buckets: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    rows = list(zip(*fixed, strict=True))
    # operands of one element (step counters) are read alone: their address may be any
    aligned = [_are_aligned(t.data_ptr() for t in row if t.shape == row[0].shape) for row in rows]
    for i, (row, last) in enumerate(zip(rows, moving, strict=True)):
        if row[0].numel():
            key = (row[0].device, aligned[i], *(t.dtype for t in row), last.dtype)
            buckets[key].append(i)
    return [
        Launch(
            table=_upload(
                [[*(t.data_ptr() for t in rows[i]), rows[i][0].numel(), i] for i in positions], device, torch.int64
            ),
            chunks=chunk_table([rows[i][0].numel() for i in positions], device),
            tickets=torch.zeros(len(positions), dtype=torch.int32, device=device),
            dtypes=tuple(dtypes),
            positions=positions,
            fixed_aligned=fixed_aligned,
            moving_table=torch.empty(len(positions), dtype=torch.int64, device=device),
        )
        for (device, fixed_aligned, *dtypes), positions in buckets.items()
    ]


def chunk_table(numels: Sequence[int], device: torch.device) -> Tensor:
    """Rows (tensor, first block), one for each ``BLOCKS_PER_CHUNK * BLOCK`` elements of each tensor.

    Example:
        >>> chunk_table([3, 2 * BLOCKS_PER_CHUNK * BLOCK], torch.device("cpu")).tolist()
        [[0, 0], [1, 0], [1, 64]]
    """
    counts = torch.tensor([-(-n // (BLOCK * BLOCKS_PER_CHUNK)) for n in numels])
    tensors = torch.repeat_interleave(torch.arange(len(numels)), counts)
    first_chunk_of_tensor = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    first_blocks = (torch.arange(len(tensors)) - first_chunk_of_tensor) * BLOCKS_PER_CHUNK
    return _upload(torch.stack([tensors, first_blocks], dim=1), device, torch.int32)


def share_one_dense_layout(*tensors: Tensor) -> bool:
    """Whether the tensors hold the same elements in the same order in memory, without gaps."""
    first = tensors[0]
    dense = torch.empty_like(first, device="meta").stride() == first.stride()  # empty_like closes gaps and overlaps
    return dense and all(t.stride() == first.stride() for t in tensors)


def _upload(
    values: Sequence[Sequence[int]] | Sequence[int] | Tensor, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """A small table of integers in device memory, without waiting for the device."""
    table = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # the allocator of pinned memory keeps the buffer until the copy has run
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


def _are_aligned(addresses: Any) -> bool:
    return all(a % 16 == 0 for a in addresses)
