"""Progress of a command: bars in a terminal, lines of the log elsewhere; always on stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from horst.cli.output import write
from horst.extras import load_extra


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


@contextlib.contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal; call what this gives with the number done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    console = load_extra("rich.console").Console(stderr=True)
    with load_extra("rich.progress").Progress(console=console, transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)


@contextlib.contextmanager
def spinner(what: str) -> Iterator[None]:
    """In a terminal a line that moves, with the last message of the library's log."""
    if not sys.stderr.isatty():
        yield
        return
    console = load_extra("rich.console").Console(stderr=True)
    with console.status(what) as status:
        handler = _ToStatus(what, status)
        logging.getLogger("horst").addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger("horst").removeHandler(handler)


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
