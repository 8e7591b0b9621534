"""How a launch is cut into programs, by the matrix and the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

MOST_TOKENS = 16


@dataclass(frozen=True)
class Launch:
    """The shape of a launch.

    Attributes:
        rows: Rows of the matrix per program.
        block: Entries of each row that a program reads per step; a power of two.
        warps: Warps per program.
        overlap: Whether the launch may begin while the kernel before it ends; see the Triton kernel.
        staged: Whether the kernel is the one with the inputs in shared memory, else Triton's. There, ``block`` is the
            entries in flight per warp, a multiple of 128.

    Example:
        >>> str(Launch(4, 128, 4, overlap=True))
        '4 x 128, 4 warps, overlapping'
    """

    rows: int
    block: int
    warps: int
    overlap: bool = False
    staged: bool = False

    def __str__(self) -> str:
        warps = "1 warp" if self.warps == 1 else f"{self.warps} warps"
        words = [warps, *(["overlapping"] if self.overlap else []), *(["staged"] if self.staged else [])]
        return f"{self.rows} x {self.block}, {', '.join(words)}"


def default_launch(rows: int, entries: int, tokens: int) -> Launch:
    """A launch for a matrix of ``rows`` rows with ``entries`` stored entries, where none was measured.

    Example:
        >>> default_launch(4096, 4096 * 400, tokens=1)
        Launch(rows=4, block=128, warps=4, overlap=False, staged=False)
    """
    if rows < 2048 and entries >= 512 * rows:  # too few rows for one warp each: four warps share one
        return Launch(1, 512, 4)
    return Launch(4, 128, 4)
