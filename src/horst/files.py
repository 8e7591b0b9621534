"""Files are written whole or not at all, and refused where they are not what they claim to be."""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

PathLike = str | os.PathLike[str]


class InvalidFileError(ValueError):
    """A file or directory of weights that is damaged, not of the stated format, or not safe to load."""


@contextlib.contextmanager
def whole_file(path: PathLike) -> Iterator[pathlib.Path]:
    """A temporary name beside ``path``, renamed to it if the block succeeds and removed if it fails.

    Example:
        >>> import tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with whole_file(folder / "a.txt") as temporary:
        ...     _ = temporary.write_text("all of it")
        >>> [p.name for p in folder.iterdir()]
        ['a.txt']
    """
    path = pathlib.Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory. Give the name of a file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: PathLike) -> Iterator[pathlib.Path]:
    """A temporary directory beside ``path``, renamed to it if the block succeeds and removed if it fails.

    A directory that already holds something is refused: files of two models must not mix.
    """
    path = pathlib.Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory. Choose another name, or remove it first.")
    with folder_beside(path) as temporary:
        yield temporary
        if path.is_dir():
            path.rmdir()  # empty, see above; not every system renames onto an empty directory
        os.replace(temporary, path)


@contextlib.contextmanager
def folder_beside(path: PathLike) -> Iterator[pathlib.Path]:
    """A hidden folder beside ``path`` for as long as the block runs; those that killed processes left are removed.

    A lock on the folder, which ends with its process however that ends, tells what is left from what is in use.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name[:100])}.{'[0-9a-f]' * 8}.tmp"):
        if left.is_dir() and (lock := _lock(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(lock)
    folder = _beside(path)
    unlocked = folder.with_suffix("")  # by its own name another process would take it for one that was left
    unlocked.mkdir()
    lock = _lock(unlocked)
    os.rename(unlocked, folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def path_inside(folder: PathLike, name: object) -> pathlib.Path:
    """The file called ``name`` in ``folder``, for names that come out of a file: one that leads elsewhere is refused.

    A link may lead to the ``blobs`` of the same repository in the Hugging Face cache, where ``folder`` is one of its
    snapshots.

    Example:
        >>> path_inside("/models/a", "../b.safetensors")
        Traceback (most recent call last):
            ...
        horst.files.InvalidFileError: '../b.safetensors' leads out of its folder a. Such a file is not opened.
    """
    folder = pathlib.Path(folder)
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidFileError(f"{name!r} is not the name of a file.")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        allowed.append(folder.resolve().parent.parent / "blobs")
    # A backslash separates folders on Windows only; no weights have one in their name.
    named = pathlib.PurePosixPath(name)
    if named.is_absolute() or ".." in named.parts or "\\" in name or ":" in name:
        raise InvalidFileError(f"{name!r} leads out of its folder {folder.name}. Such a file is not opened.")
    path = folder / name
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise InvalidFileError(f"{name!r} is a link out of its folder {folder.name}. Such a file is not opened.")
    return path


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")


def _lock(folder: pathlib.Path) -> int | None:
    """A descriptor that holds the folder until it is closed.

    None if another has it, it is gone, or the system knows no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # its process has removed it, or given it its final name
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
