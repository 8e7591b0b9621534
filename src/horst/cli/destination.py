"""Where output goes: refused before the work begins if it cannot be written, and written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal


def check_free(out: Path, overwrite: bool, kind: Literal["file", "directory"]) -> None:
    """Refuse a place that is taken, or that cannot be written to."""
    if out.name in ("", ".."):
        raise ValueError(f"--out must name a new {kind}, got {out}.")
    if out.exists() and out.is_dir() != (kind == "directory"):
        other = "directory" if kind == "file" else "file"
        raise FileExistsError(f"{out} exists and is a {other}; --out must name a {kind}. Choose another name.")
    if os.path.lexists(out) and not overwrite and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists. Add --overwrite to replace it, or choose another name.")
    above = next(parent for parent in out.absolute().parents if parent.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{out} cannot be written: {above} is not a directory.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(f"{out} cannot be written: no permission for {above}. Choose another name.")


@contextlib.contextmanager
def replaced(out: Path, overwrite: bool) -> Iterator[Path]:
    """A name for a directory that takes the place of ``out`` if the block succeeds.

    Example:
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replaced(folder / "model", overwrite=False) as new:
        ...     new.mkdir()
        >>> [path.name for path in folder.iterdir()]
        ['model']
    """
    check_free(out, overwrite, "directory")
    missing = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name[:100]}.", dir=out.parent) as folder:
            new, old = Path(folder) / out.name, Path(folder) / f"{out.name}.old"
            yield new
            if os.path.lexists(out):  # no directory can be renamed onto one that holds something
                os.replace(out, old)
            try:
                os.replace(new, out)
            except OSError:
                if os.path.lexists(old):
                    os.replace(old, out)
                raise
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):  # not empty, or never made
                parent.rmdir()
        raise
