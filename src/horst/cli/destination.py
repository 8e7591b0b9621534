"""Where output goes: refused before the work begins if it cannot be written, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from horst import __version__
from horst.files import read_json, whole_directory, write_json

#: In every directory that a command made: the names of what it wrote there. --overwrite replaces nothing else.
MARKER = ".horst.json"
_HEAD = 1 << 16  # bytes of a file that are looked at


class Stopped(SystemExit):
    """A signal came, and what it ended is put in order; the exit code is the shell's for the signal."""

    def __init__(self, number: int, state: str) -> None:
        super().__init__(128 + number)
        self.state = state

    def __str__(self) -> str:
        return f"stopped; {self.state}"


def check_free(
    out: Path, overwrite: bool, kind: Literal["file", "directory"], sources: Sequence[str | Path] = ()
) -> None:
    """Refuse an output that cannot be written, or that exists; with ``overwrite``, one that no command of ours wrote.

    Args:
        out: File or directory to write.
        overwrite: Whether what is there may be replaced.
        kind: What ``out`` shall be.
        sources: Paths that the command reads. None of them is replaced.
    """
    if out.name in ("", ".."):
        raise ValueError(f"--out must name a new {kind}, got {out}.")
    if out.exists() and out.is_dir() != (kind == "directory"):
        other = "directory" if kind == "file" else "file"
        raise FileExistsError(f"{out} exists and is a {other}; --out must name a {kind}. Choose another name.")
    for source in sources:
        if out.exists() and Path(source).resolve() == out.resolve():
            what = "the input" if kind == "file" else "the model" if isinstance(source, Path) else "the data"
            raise FileExistsError(f"--out {out} is {what} itself, which this command reads. Choose another name.")
        if out.exists() and Path(source).resolve().is_relative_to(out.resolve()):
            raise FileExistsError(f"{out} holds {source}, which this command reads. Choose another name for --out.")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        if not overwrite:
            raise FileExistsError(f"{out} exists. Add --overwrite to replace it, or choose another name.")
        if foreign := _not_ours(out):
            raise FileExistsError(
                f"{out} {foreign}. --overwrite replaces only what horst wrote: choose another name, or move it away."
            )
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{out} cannot be written: {above} is not a directory.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{out} cannot be written: no permission for {above}. Choose another name.")


def _not_ours(out: Path) -> str:
    """What shows that ``out`` was not written by a command of ours; nothing if it was."""
    if out.is_dir():
        if not (out / MARKER).is_file():
            return "was not made by horst"
        written = read_json(out / MARKER).get("files", [])
        added = sorted(path.name for path in out.iterdir() if path.name not in (*written, MARKER))
        return f"holds files that horst did not write ({', '.join(added[:3])})" if added else ""
    if not out.is_file():
        return "is not a regular file"
    from horst.lab.report.html_page import TITLE

    with open(out, "rb") as file:
        head = file.read(_HEAD)
    known = not head or b'"experiment"' in head or TITLE.encode() in head
    return "" if known else "is neither a result file nor a report"


def beside(path: Path, ending: str) -> Path:
    """A name next to a model's directory.

    Example:
        >>> beside(Path("models/my-gpt2"), "50").as_posix()
        'models/my-gpt2-50'
    """
    path = path if path.name not in ("", "..") else path.resolve()
    return path.with_name(f"{path.name}-{ending}")


@contextlib.contextmanager
def replaced(out: Path, overwrite: bool) -> Iterator[Path]:
    """An empty directory that takes the place of ``out`` if the block succeeds.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replaced(folder / "model", overwrite=False) as new:
        ...     _ = (new / "weights").write_text("w")
        >>> [path.name for path in folder.iterdir()]
        ['model']
        >>> sorted(path.name for path in (folder / "model").iterdir())
        ['.horst.json', 'weights']
    """
    check_free(out, overwrite, "directory")
    missing = [parent for parent in out.parents if not parent.exists()]
    try:
        with _stopped_by_signal(), whole_directory(out, overwrite=overwrite) as new:
            yield new
            write_json(new / MARKER, {"horst": __version__, "files": sorted(path.name for path in new.iterdir())})
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):  # not empty, or never made
                parent.rmdir()
        raise


@contextlib.contextmanager
def _stopped_by_signal() -> Iterator[None]:
    """SIGTERM or SIGHUP ends the block as Ctrl-C does, by an exception, so that what it began is removed."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # another one must not disturb the removal
        raise Stopped(number, "unfinished output is removed.")

    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return
    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP; nohup ignores it
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    previous = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in previous:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
