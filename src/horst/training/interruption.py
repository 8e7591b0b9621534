"""Stopping a run from outside: SIGTERM or Ctrl-C asks it to save and leave; a second Ctrl-C ends it at once."""

from __future__ import annotations

import logging
import os
import pathlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupted", "StopRequest"]

logger = logging.getLogger(__name__)


class Interrupted(SystemExit):
    """The run was asked to stop, has saved its state and can be resumed.

    Not caught, it ends the process with the shell's code for the signal: 143 for SIGTERM, 130 for Ctrl-C.

    Attributes:
        step: Steps that are done.
        checkpoint: Where they were saved.
    """

    def __init__(self, signal_number: int, step: int, checkpoint: pathlib.Path) -> None:
        super().__init__(128 + signal_number)
        self.step, self.checkpoint = step, checkpoint

    def __str__(self) -> str:
        return f"stopped after step {self.step} and saved to {self.checkpoint}; run again to go on."


class StopRequest:
    """Notes SIGTERM and SIGINT instead of dying of them; the handlers are put back on leaving.

    Example:
        >>> with StopRequest() as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     print(stop.signal == signal.SIGTERM)
        True
    """

    def __init__(self) -> None:
        self.signal = 0  # none yet
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number
            logger.warning("%s: the run saves and stops.", signal.Signals(number).name)
        # Under torchrun a signal arrives twice, from the terminal or scheduler and passed on by torchrun.
        elif number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
