"""Stopping a run from outside: SIGTERM, SIGHUP or Ctrl-C asks it to save and leave; a second Ctrl-C ends it at once.

Several ranks leave after the same step, which they must agree on.
"""

from __future__ import annotations

import _thread
import logging
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from horst.training.distributed import on_every_rank, world_size

logger = logging.getLogger(__name__)

# The longest that a signal waits for the other ranks: torchrun kills 30 s after it, and saving needs time, too.
AGREE_SECONDS = 5.0
# The longest that leaving waits until the log has said why: a pipe may be full, and its reader gone.
ANNOUNCE_SECONDS = 10.0
#: Signals that ask a process to end; Windows has no SIGHUP.
STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(SystemExit):
    """The run was asked to stop, has saved its state and can be resumed.

    Not caught, it ends the process with the shell's code for the signal: 143 for SIGTERM, 130 for Ctrl-C.

    Attributes:
        step: Steps that are done.
        checkpoint: Checkpoint that holds them.
    """

    def __init__(self, signal_number: int, step: int, checkpoint: pathlib.Path) -> None:
        super().__init__(128 + signal_number)
        self.step, self.checkpoint = step, checkpoint

    def __str__(self) -> str:
        return f"stopped after step {self.step} and saved to {self.checkpoint}; run again to go on."


class StopRequest:
    """Notes SIGTERM, SIGHUP and SIGINT instead of dying of them; the handlers are put back on leaving.

    The block answers a signal by leaving with a ``SystemExit``, as :class:`Interrupted` is one. If it returns, or fails
    with an error that the caller may handle, the signal is passed on to the handler that was there before.

    Example:
        >>> import contextlib
        >>> with contextlib.suppress(SystemExit), StopRequest() as stop:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     raise SystemExit(128 + stop.signal)
        >>> stop.signal == signal.SIGTERM
        True
    """

    def __init__(self) -> None:
        self.signal = 0  # none yet
        self._previous: dict[int, Any] = {}
        self._announcing = threading.Lock()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, *STOPPING):  # the one that would raise here, and skip __exit__, first
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        # While the log still goes where the caller sent it; not for ever, if nobody reads it.
        self._announcing.acquire(timeout=ANNOUNCE_SECONDS)
        if self.signal and (kind is None or issubclass(kind, Exception)):
            signal.raise_signal(self.signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal = number
            # The handler may have cut into a line on its way to the log, and a stream refuses a second writer within
            # the first: the error would end the run before it has saved. Another thread waits until the line is out.
            # Not one of threading, whose locks the main thread may hold just now.
            self._announcing.acquire(blocking=False)
            try:
                _thread.start_new_thread(self._announce, ())
            except RuntimeError:  # the system has no thread left; the run saves all the same
                self._announcing.release()
        # Under torchrun a signal arrives twice, from the terminal or scheduler and passed on by torchrun.
        elif number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt

    def _announce(self) -> None:
        try:
            logger.warning("%s: the run saves and stops.", signal.Signals(self.signal).name)
        finally:
            self._announcing.release()


class AgreedStop:
    """The signal that all ranks stop for, after the same step.

    A process alone follows its own request at once. Several compare theirs after as many steps as the slowest rank does
    in ``AGREE_SECONDS``, at most twice as many as the time before: the steps between wait for nobody.

    Args:
        request: Request of this rank.
        step: First step of the run.
        wait: Function that waits for the device. The host runs ahead of it, and would count the time of steps that
            it has only queued.

    Example:
        >>> with StopRequest() as request:
        ...     AgreedStop(request, step=0, wait=lambda: None).signal_after(0)
        0
    """

    def __init__(self, request: StopRequest, *, step: int, wait: Callable[[], object]) -> None:
        self._request, self._wait = request, wait
        self._signal = 0
        self._compared, self._next = step, step
        self._began = time.perf_counter()

    def signal_after(self, step: int, *, last: bool = False) -> int:
        """The signal to stop for after ``step``, or 0. Every rank asks after every step.

        Args:
            step: Steps that are done.
            last: Whether nobody asks again: the ranks then compare at once.
        """
        if world_size() == 1:
            return self._request.signal
        if last or step >= self._next:
            self._compare(step)
        return self._signal

    def _compare(self, step: int) -> None:
        self._wait()
        seconds = time.perf_counter() - self._began
        signals, times = zip(*on_every_rank(lambda: (self._request.signal, seconds)), strict=True)
        self._signal = max(signals)
        stretch = AGREE_SECONDS / max(*times, AGREE_SECONDS / 2)
        self._next = step + max(1, int((step - self._compared) * stretch))
        self._compared, self._began = step, time.perf_counter()
