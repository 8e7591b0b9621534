"""One run in a directory at a time: a second one would delete the first one's files and write between its lines."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import TextIO

try:
    import fcntl
except ModuleNotFoundError:  # Windows: runs there are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked"]

logger = logging.getLogger(__name__)

FILE = ".lock"

# The system's locks do not hold within a process, and a file's go when the process closes any descriptor of it. So
# entries are noted here; code in the process that reads or copies the lock file itself would still lose the lock.
_held: set[tuple[int, str]] = set()  # process and real path: what a fork inherits is not its own
_held_guard = threading.Lock()


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other runs out of ``directory`` inside; the end of the process, however it comes, lets them in.

    A file system without locks keeps no other process out.

    Raises:
        RuntimeError: Another process, or this one, has the directory already.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(folder):
        ...     os.listdir(folder)
        ['.lock']
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # The file stays: one that is deleted and made anew would be another lock.
    with _only_one_here(directory), open(directory / FILE, "a") as file:
        if fcntl is not None:
            _lock(file, directory)
        yield


@contextlib.contextmanager
def _only_one_here(directory: pathlib.Path) -> Iterator[None]:
    entry = (os.getpid(), os.path.realpath(directory))
    with _held_guard:
        if entry in _held:
            raise _in_use("this", directory)
        _held.add(entry)
    try:
        yield
    finally:
        with _held_guard:
            _held.discard(entry)


def _lock(file: TextIO, directory: pathlib.Path) -> None:
    try:
        # Not flock, which a loader's forked workers would hold for seconds after their run was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _in_use("another", directory) from None
        logger.info("%s cannot be locked (%s): nothing keeps a second run out of it.", directory, error)


def _in_use(whose: str, directory: pathlib.Path) -> RuntimeError:
    return RuntimeError(
        f"{whose} process is training in {directory}. Wait for it or stop it, or choose another directory."
    )
