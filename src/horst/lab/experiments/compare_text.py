"""Byte token files from a folder of text, whatever lies in it."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Iterator

from horst.lab.data.tokenization import write_token_files

ENDINGS = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv")
HELD_OUT, SCORED = 20, 3000  # one file in so many is held out; so many characters of it are scored
LEAST = 2 * HELD_OUT
_SKIPPED = ("site-packages", "dist-packages")


def byte_tokens(folder: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The folder itself if it holds token files; else ``out``, with token files made of the text files below it.

    A file is held out by a hash of its path in the folder, so the same folder always gives the same split. Only the
    beginning of a held-out file is scored, so that a validation set of a few batches is made of many files.

    Args:
        folder: What ``horst data`` wrote, or a folder of text files at any depth.
        out: Folder to make. One that is there already, whole, is used again.

    Raises:
        FileNotFoundError: The folder holds neither.
    """
    if (folder / "meta.json").is_file():
        return folder
    paths = [path for path in sorted(folder.rglob("*")) if _is_text(path, folder)] if folder.is_dir() else []
    if len(paths) < LEAST:
        raise FileNotFoundError(
            f"{folder} has no meta.json, and {len(paths)} text files ({', '.join(ENDINGS)}); at least {LEAST} are "
            "needed to hold some out. Name a folder of text, or one that `horst data tokenize --tokenizer bytes` wrote."
        )
    if not (out / "meta.json").is_file():
        write_token_files(_placed(paths, folder), out, tokenizer="bytes", notes={"files": len(paths)})
    return out


def _is_text(path: pathlib.Path, folder: pathlib.Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") or part in _SKIPPED for part in parts)
    return path.suffix in ENDINGS and not hidden and path.is_file()


def _placed(paths: list[pathlib.Path], folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        held_out = zlib.crc32(path.relative_to(folder).as_posix().encode()) % HELD_OUT == 0
        if text:
            yield ("val", text[:SCORED]) if held_out else ("train", text)
