"""Progress of a command: bars in a terminal, lines of the log elsewhere; always on stderr."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from horst.cli.output import write
from horst.extras import load_extra

_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Print the library's log as plain lines; in a terminal, where there are bars, warnings only."""
    logger, handler = logging.getLogger("horst"), _ToStderr()
    level = logger.level
    handler.setLevel(logging.WARNING if sys.stderr.isatty() else logging.INFO)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def quiet(logger: str) -> Iterator[None]:
    """Hide the log of a part of the library, except for warnings: it is about temporary files here."""
    part = logging.getLogger(logger)
    level = part.level
    part.setLevel(logging.WARNING)
    try:
        yield
    finally:
        part.setLevel(level)


def _how_far(done: int, total: int, began: float) -> str:
    """What is done, and how long the rest takes, judged by it."""
    seconds = (time.perf_counter() - began) * max(total - done, 0) / max(done, 1)
    return f"{done} of {total}, about {timedelta(seconds=round(seconds))} left"


@contextlib.contextmanager
def blocks_counted(total: int) -> Iterator[None]:
    """Add the time left to the lines with which pruning reports each block."""
    began, done = time.perf_counter(), itertools.count(1)

    def add(record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO:
            record.msg, record.args = f"{record.getMessage()}, block {_how_far(next(done), total, began)}", ()
        return True

    logger = logging.getLogger("horst.pruning.calibration")
    logger.addFilter(add)
    try:
        yield
    finally:
        logger.removeFilter(add)


@contextlib.contextmanager
def bar(what: str, total: int, *, lines: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal, elsewhere ``lines``, one in ten seconds; call what this gives with the number done."""
    if not sys.stderr.isatty():
        began = told = time.perf_counter()

        def tell(done: int) -> None:
            nonlocal told
            if lines and time.perf_counter() - told >= _LINE_EVERY:
                told = time.perf_counter()
                write(f"{what}: batch {_how_far(done, total, began)}", sys.stderr)

        if lines:
            write(f"{what}: {total} batches", sys.stderr)
        yield tell
        return
    console = load_extra("rich.console").Console(stderr=True)
    with _shown(load_extra("rich.progress").Progress(console=console, transient=True)) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextlib.contextmanager
def spinner(what: str, *, line: bool = False) -> Iterator[None]:
    """In a terminal a line that moves, with the last message of the library's log; elsewhere one line if asked for."""
    if not sys.stderr.isatty():
        if line:
            write(f"{what} ...", sys.stderr)
        yield
        return
    console = load_extra("rich.console").Console(stderr=True)
    with _shown(console.status(what)) as status:
        handler = _ToStatus(what, status)
        logging.getLogger("horst").addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger("horst").removeHandler(handler)


@contextlib.contextmanager
def _shown(display: Any) -> Iterator[Any]:
    """A display of rich for as long as the block runs. A terminal that was closed must not hide how the block ended."""
    display.start()
    try:
        yield display
    finally:
        with contextlib.suppress(OSError):
            display.stop()


class _ToStderr(logging.Handler):
    """Writes to the present stderr: a bar replaces it for a while."""

    def emit(self, record: logging.LogRecord) -> None:
        write(self.format(record), sys.stderr)


class _ToStatus(logging.Handler):
    def __init__(self, what: str, status: Any) -> None:
        super().__init__(logging.INFO)
        self.what, self.status = what, status

    def emit(self, record: logging.LogRecord) -> None:
        self.status.update(f"{self.what}: {load_extra('rich.markup').escape(record.getMessage())}")
