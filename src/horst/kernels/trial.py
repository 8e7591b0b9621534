"""Whether a kernel can be used here: it runs, and gives the numbers of the plain formula."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_ROUNDING = 1e-2  # of 16 bits, with room


def gives(name: str, kernel: Callable[[], Tensor], formula: Callable[[], Tensor]) -> bool:
    """Whether a kernel runs and gives what the formula gives, up to rounding. If not, the log says why.

    Example:
        >>> gives("the double", lambda: 2 * torch.ones(3), lambda: torch.full((3,), 2.0))
        True
    """
    try:
        found = kernel().float()
    except torch.OutOfMemoryError:  # of a full device, not of the kernel
        raise
    except Exception as error:  # of a compiler, a driver, a device: all of them can do without the kernel
        _log.warning("%s is left out: %s", name, first_line(error))
        return False
    expected = formula()
    difference = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    if not difference < _ROUNDING:  # this form refuses NaN too
        _log.warning("%s is left out: its numbers differ from the formula's by %.1e", name, difference)
        return False
    return True


def first_line(error: Exception) -> str:
    """The first line of what an error says, or its class if it says nothing.

    Example:
        >>> first_line(RuntimeError("no memory, and more")), first_line(AssertionError())
        ('no memory, and more', 'AssertionError')
    """
    return next(iter(str(error).splitlines()), "") or type(error).__name__
