"""Warnings that point at the line of the user, however many frames of ours and of torch's lie between."""

from __future__ import annotations

import sys
import warnings

__all__ = ["warn_user"]

_NOT_THE_USERS = ("horst", "torch", "contextlib")


def warn_user(message: str) -> None:
    """A UserWarning that points at the innermost line outside this package and torch."""
    level = 2  # 1 is this function, 2 who called it
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
