"""One run in a directory at a time: a second one would delete the first one's files and write between its lines."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import TextIO

try:
    import fcntl
except ModuleNotFoundError:  # Windows: runs there are not kept apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["locked"]

logger = logging.getLogger(__name__)

FILE = ".lock"


@contextlib.contextmanager
def locked(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Keep other processes' runs out of ``directory`` inside; the end of the process, however it comes, lets them in.

    A file system without locks keeps nobody out.

    Raises:
        RuntimeError: Another process has the directory.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(folder):
        ...     os.listdir(folder)
        ['.lock']
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # The file stays: one that is deleted and made anew would be another lock.
    with open(directory / FILE, "a") as file:
        if fcntl is not None:
            _lock(file, directory)
        yield


def _lock(file: TextIO, directory: pathlib.Path) -> None:
    try:
        # Not flock, which a loader's forked workers would hold for seconds after their run was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RuntimeError(
                f"another process is training in {directory}. Wait for it or stop it, or choose another directory."
            ) from None
        logger.info("%s cannot be locked (%s): nothing keeps a second run out of it.", directory, error)
