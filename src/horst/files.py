"""Every atomic write, lock, checksum and JSON read of the package.

Files and folders appear whole or not at all: they are written under another name, flushed to disk and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import logging
import os
import pathlib
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterator
from typing import Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

PathLike = str | os.PathLike[str]
MAX_JSON_BYTES = 100_000_000  # also the limit of the safetensors library for its headers
LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)


class InvalidFileError(ValueError):
    """A file or directory that is damaged, not of the stated format, or not safe to load."""


# --- atomic writes ------------------------------------------------------------------------------------------------


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
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: PathLike, text: str) -> pathlib.Path:
    """Write a text file in UTF-8, whole or not at all; returns its path."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return pathlib.Path(path)


def write_json(path: PathLike, value: Any) -> pathlib.Path:
    """Write ``value`` as JSON, whole or not at all; NaN and infinity are refused. Returns the path.

    Example:
        >>> import tempfile
        >>> read_json(write_json(f"{tempfile.mkdtemp()}/a.json", {"a": 1}))
        {'a': 1}
    """
    return write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def whole_directory(path: PathLike, *, overwrite: bool = False) -> Iterator[pathlib.Path]:
    """An empty temporary directory, renamed to ``path`` if the block succeeds and removed if it fails.

    Args:
        path: The directory to make.
        overwrite: Whether to replace what is at ``path``. Otherwise only an empty directory may be there, so that the
            files of two models do not mix.
    """
    path = pathlib.Path(path)
    if not overwrite and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory. Choose another name, or remove it first.")
    with folder_beside(path) as folder:
        # A process killed between the two renames leaves the old directory, outside of the folder that is removed.
        new, old = folder / "new", folder.with_suffix(".old")
        new.mkdir()
        yield new
        for file in [*new.rglob("*"), new]:
            flush(file)
        try:
            if os.path.lexists(path):  # no directory can be renamed onto one that holds something
                os.replace(path, old)
            os.replace(new, path)
        except BaseException:
            if not os.path.lexists(path) and os.path.lexists(old):
                os.replace(old, path)
            raise
        if os.path.lexists(old):
            os.replace(old, folder / old.name)


@contextlib.contextmanager
def folder_beside(path: PathLike) -> Iterator[pathlib.Path]:
    """A hidden, locked folder beside ``path`` for as long as the block runs.

    Folders that killed processes left behind are removed first; their locks ended with the processes.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name[:100])}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError, RuntimeError), locked(left, required=True):
            shutil.rmtree(left, ignore_errors=True)
    folder = _beside(path)
    unlocked = folder.with_suffix("")  # under its own name another process could take it for one that was left behind
    try:
        with locked(unlocked):
            os.rename(unlocked, folder)
            yield folder
    finally:
        for made in (folder, unlocked):
            shutil.rmtree(made, ignore_errors=True)


def flush(path: PathLike) -> None:
    """Wait until a file, or a folder's list of files, is on disk."""
    if os.name != "posix" and pathlib.Path(path).is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")


# --- locks --------------------------------------------------------------------------------------------------------

# The system's locks do not hold within a process, and a file's lock ends when the process closes any descriptor of it.
# So entries are noted here, by process (a fork does not inherit them), device and inode (which survive a rename).
_held: set[tuple[int, int, int]] = set()
_held_guard = threading.Lock()


@contextlib.contextmanager
def locked(directory: PathLike, *, required: bool = False) -> Iterator[None]:
    """Keep other processes, and other blocks of this process, from locking ``directory`` inside the block.

    The lock also ends when the process does, however that happens.

    Args:
        directory: Directory to lock, made if it does not exist. The lock is the file ``.lock`` in it.
        required: Whether a system without file locks is an error. Otherwise nothing keeps other processes out there.

    Raises:
        RuntimeError: The directory is locked already.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, locked(folder):
        ...     os.listdir(folder)
        ['.lock']
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    # The file stays: one that is deleted and rebuilt would be another lock.
    with _once_per_process(directory), open(directory / LOCK_FILE, "a") as file:
        try:
            if fcntl is None:
                raise OSError(errno.ENOLCK, "the system has no fcntl")
            # Not flock, which a loader's forked workers would hold for seconds after their run was killed.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _in_use("another", directory) from None
            if required:
                raise
            logger.info("%s cannot be locked (%s): nothing keeps a second process out of it.", directory, error)
        yield


@contextlib.contextmanager
def _once_per_process(directory: pathlib.Path) -> Iterator[None]:
    status = directory.stat()
    entry = (os.getpid(), status.st_dev, status.st_ino)
    with _held_guard:
        if entry in _held:
            raise _in_use("this", directory)
        _held.add(entry)
    try:
        yield
    finally:
        with _held_guard:
            _held.discard(entry)


def _in_use(whose: str, directory: pathlib.Path) -> RuntimeError:
    return RuntimeError(
        f"{whose} process is writing to {directory}. Wait for it or stop it, or choose another directory."
    )


# --- checksums ----------------------------------------------------------------------------------------------------


def sha256(path: PathLike) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def crc32(path: PathLike) -> int:
    """The CRC-32 of a file's content: it finds damage, not malice."""
    value = 0
    for piece in _pieces(path):
        value = zlib.crc32(piece, value)
    return value


def _pieces(path: PathLike) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 22):
            yield piece


# --- reading what others wrote ------------------------------------------------------------------------------------


def read_json(path: PathLike) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InvalidFileError: The file is too large, is not JSON, repeats a key, or holds something else than an object.
    """
    path = pathlib.Path(path)
    _check_regular(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise InvalidFileError(f"{path} has {size} bytes; JSON files of at most {MAX_JSON_BYTES} bytes are read.")
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes | str, what: str) -> dict[str, Any]:
    """Parse a JSON object with distinct keys; ``what`` names the text in messages.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', "the header")
        Traceback (most recent call last):
            ...
        horst.files.InvalidFileError: the header is not valid JSON: 'a' appears twice.
    """
    try:
        content = json.loads(text, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{what} is not valid JSON: {str(error).rstrip('.')}.") from error
    if not isinstance(content, dict):
        raise InvalidFileError(f"{what} is {type(content).__name__} in JSON, not an object.")
    return content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{key[:80]!r} appears twice.")
        content[key] = value
    return content


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
    _check_regular(path)
    return path


def _check_regular(path: pathlib.Path) -> None:
    """Refuse a pipe or a device, which would be waited for without end; a file that is missing is another error."""
    if path.exists() and not path.is_file():
        raise InvalidFileError(f"{path} is not a regular file. It is not opened.")
