"""Byte token files from a folder of text, whatever lies in it."""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Iterator

from horst.lab.data.tokenization import write_token_files

ENDINGS = (".txt", ".md", ".rst", ".py", ".tex", ".html", ".csv")
HELD_OUT, SCORED = 20, 3000  # one text in so many is held out; so many characters of it are scored
LEAST = 2 * HELD_OUT  # texts; where there are fewer files, they are cut into pieces
PIECE = 16_384  # characters
_SKIPPED = ("site-packages", "dist-packages")


def byte_tokens(folder: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """The folder itself if it holds token files; else ``out``, with token files made of the text files below it.

    A hash of its place in the folder decides whether a text is held out, so the same folder gives the same split. Only
    the beginning of a held-out text is scored, so that a validation set of a few batches comes from many texts.

    Args:
        folder: What ``horst data`` wrote, or a folder of text files at any depth.
        out: Folder to make. One that is there already, whole, is used again.

    Raises:
        FileNotFoundError: The folder holds neither.
    """
    if (folder / "meta.json").is_file():
        return folder
    paths = [path for path in sorted(folder.rglob("*")) if _is_text(path, folder)] if folder.is_dir() else []
    texts = list(_texts(paths, folder))
    if len(texts) < LEAST:
        raise FileNotFoundError(
            f"{folder} has no meta.json, and {len(texts)} texts in {len(paths)} files ({', '.join(ENDINGS)}); at least "
            f"{LEAST} are needed to hold some out. Name a folder with more text, or one that `horst data tokenize "
            "--tokenizer bytes` wrote."
        )
    if not (out / "meta.json").is_file():
        order = sorted(range(len(texts)), key=lambda i: (zlib.crc32(texts[i][0].encode()), i))
        held_out = set(order[: -(-len(texts) // HELD_OUT)])
        placed = (("val", text[:SCORED]) if i in held_out else ("train", text) for i, (_, text) in enumerate(texts))
        write_token_files(placed, out, tokenizer="bytes", notes={"texts": len(texts)})
    return out


def _is_text(path: pathlib.Path, folder: pathlib.Path) -> bool:
    parts = path.relative_to(folder).parts
    hidden = any(part.startswith(".") or part in _SKIPPED for part in parts)
    return path.suffix in ENDINGS and not hidden and path.is_file()


def _texts(paths: list[pathlib.Path], folder: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The files, or their pieces where the files are few, each with its place in the folder."""
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        length = PIECE if len(paths) < LEAST else max(1, len(text))
        for start in range(0, len(text), length):
            yield f"{path.relative_to(folder).as_posix()} {start}", text[start : start + length]
