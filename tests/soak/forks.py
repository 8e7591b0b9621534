"""A call in a fork of this process, which is warm: it has torch loaded and has computed nothing."""

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

CRASHED = 70  # the exit code of a call that raised


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a call ended: its exit code (minus a signal's number), what it wrote, whether it took too long."""

    code: int
    out: str
    err: str
    hung: bool


def start(function: Callable[[], int | None], folder: Path) -> int:
    """Fork; the child calls the function in an empty directory of its own group. Returns its process id."""
    process = os.fork()
    if process:
        return process
    code = CRASHED
    try:
        os.setpgid(0, 0)
        for name, number in (("out", 1), ("err", 2)):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        code = function() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(process: int, seconds: float) -> int | None:
    """The exit code, or None if it is still running after so many seconds."""
    end = time.monotonic() + seconds
    pause = 0.001
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def kill(process: int) -> int:
    """SIGKILL to a child, unless it has ended; its exit code."""
    os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def call(function: Callable[[], int | None], folder: Path, seconds: float) -> Ended:
    """Fork, call, wait; after so many seconds it counts as hung and is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    process = start(function, folder)
    code = wait(process, seconds)
    hung = code is None
    if code is None:
        code = kill(process)
    texts = [(folder / name).read_text(errors="replace") if (folder / name).exists() else "" for name in ("out", "err")]
    return Ended(code, *texts, hung)
