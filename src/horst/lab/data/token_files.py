"""Tokens on disk: a folder with ``train.bin``, ``val.bin`` and ``meta.json``.

A ``.bin`` file is nothing but token numbers, uint16 (uint32 where the vocabulary needs it), little-endian, one document
after the other, each closed by the end-of-text token. It is read through a memory map, so its size does not matter.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horst.extras import load_extra
from horst.files import read_json, whole_directory, write_json

if TYPE_CHECKING:
    import numpy.typing as npt

FORMAT = "horst tokens"
VERSION = 1
_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
_KINDS = {str: "a string", int: "a whole number", dict: "an object"}
_HOW_TO_MAKE = "Make both with `horst data tokenize`, or in Python with horst.lab.data.tokenization.tokenize."


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenFile:
    """One ``.bin`` file, open for reading, and what its ``meta.json`` says of it.

    Args:
        path: The file.
        tokens: Contents, a memory map.
        documents: Number of documents.
        tokenizer: The tokenizer's name.
        vocabulary: The tokenizer's: every token is below it.
        end_of_text: The token after each document.
    """

    path: Path
    tokens: npt.NDArray[Any]
    documents: int
    tokenizer: str
    vocabulary: int
    end_of_text: int

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """The tokens ``[begin, end)``, checked: one beyond the vocabulary would end a GPU program without a message."""
        window = self.tokens[begin:end]
        if window.size and int(window.max()) >= self.vocabulary:
            raise ValueError(
                f"{self.path} has the token {int(window.max())} between {begin} and {end}, but its meta.json says that "
                f"there are {self.vocabulary}. The file is damaged, or meta.json belongs to another: tokenize anew."
            )
        return window


def open_tokens(path: str | os.PathLike[str], *, vocabulary: int | None = None) -> TokenFile:
    """Open a ``.bin`` file and check it against the ``meta.json`` beside it.

    Args:
        path: Token file, such as ``wiki/train.bin``.
        vocabulary: The model's, which must hold the tokenizer's.

    Raises:
        FileNotFoundError: The file or its ``meta.json`` is missing.
        ValueError: ``meta.json`` is damaged, the two disagree, or the vocabulary is too small.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no token file {path} with a meta.json. {_HOW_TO_MAKE}")
    meta = _read_meta(path.parent / "meta.json")
    splits = meta["splits"]
    if path.stem not in splits or path.suffix != ".bin":
        raise ValueError(f"{path} is not one of the files of its meta.json: {', '.join(f'{s}.bin' for s in splits)}.")
    numpy = load_extra("numpy")
    dtype = numpy.dtype(_DTYPES[meta["dtype"]])
    count, size = splits[path.stem]["tokens"], path.stat().st_size
    if size != count * dtype.itemsize:
        raise ValueError(
            f"{path} has {size:,} bytes, but its meta.json promises {count:,} tokens of {dtype.itemsize} bytes. It was "
            "cut short, or the two do not belong together: copy or tokenize anew."
        )
    if vocabulary is not None and meta["vocabulary"] > vocabulary:
        raise ValueError(
            f"{path} has tokens of {meta['tokenizer']!r}, {meta['vocabulary']} of them, but the model's vocabulary is "
            f"{vocabulary}. Use a model with a vocabulary of at least {meta['vocabulary']}, or tokenize the text anew "
            "with this model's tokenizer (the tokenizer of bytes has 257)."
        )
    return TokenFile(
        path=path,
        tokens=numpy.asarray(numpy.memmap(path, dtype=dtype, mode="r")),  # slices of a memmap itself are slow
        documents=splits[path.stem]["documents"],
        tokenizer=meta["tokenizer"],
        vocabulary=meta["vocabulary"],
        end_of_text=meta["end_of_text"],
    )


def dtype_name(vocabulary: int) -> str:
    """The smallest type that holds every token.

    Example:
        >>> dtype_name(50257), dtype_name(100_277)
        ('uint16', 'uint32')
    """
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


class TokenWriter:
    """Appends tokens to the files of a folder in the making; :func:`new_token_folder` makes it.

    Args:
        folder: Folder of the files.
        dtype: Type of the tokens, ``"uint16"`` or ``"uint32"``.
        files: Stack that closes the files.
    """

    def __init__(self, folder: Path, dtype: str, files: ExitStack) -> None:
        self._folder, self._dtype, self._stack = folder, _DTYPES[dtype], files
        self._files: dict[str, Any] = {}
        self.counts: dict[str, dict[str, int]] = {}

    def append(self, split: str, tokens: npt.NDArray[Any], documents: int) -> None:
        """Add whole documents to ``<split>.bin``."""
        if split not in self._files:
            self._files[split] = self._stack.enter_context((self._folder / f"{split}.bin").open("wb"))
            self.counts[split] = {"tokens": 0, "documents": 0}
        self._files[split].write(tokens.astype(self._dtype).tobytes())
        self.counts[split]["tokens"] += len(tokens)
        self.counts[split]["documents"] += documents


@contextmanager
def new_token_folder(out: str | os.PathLike[str], meta: dict[str, Any]) -> Iterator[TokenWriter]:
    """A folder of token files that appears whole when the block ends, or not at all.

    Args:
        out: The folder; it must not exist, or be empty.
        meta: Entries of ``meta.json``: ``tokenizer``, ``vocabulary``, ``end_of_text``, and what else is worth keeping.
    """
    dtype = dtype_name(meta["vocabulary"])
    with whole_directory(out) as temporary:
        with ExitStack() as files:
            yield (writer := TokenWriter(temporary, dtype, files))
        content = {"format": FORMAT, "version": VERSION, "dtype": dtype, "splits": writer.counts, **meta}
        write_json(temporary / "meta.json", content)


def _read_meta(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: a .bin file alone does not say which tokens it holds. {_HOW_TO_MAKE}"
        )
    meta = read_json(path)
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe token files of ours (its format is not {FORMAT!r}).")
    if meta.get("version") != VERSION:
        raise ValueError(f"{path} has version {meta.get('version')}, this code reads {VERSION}. Tokenize anew.")
    _check_types(path, meta, {"tokenizer": str, "vocabulary": int, "end_of_text": int, "dtype": str, "splits": dict})
    _check_types(path, meta["splits"], dict.fromkeys(meta["splits"], dict), "splits.")
    for split, counts in meta["splits"].items():
        _check_types(path, counts, {"tokens": int, "documents": int}, f"splits.{split}.")
    if meta["dtype"] not in _DTYPES:
        raise ValueError(f"{path} has dtype {meta['dtype']!r}; it must be {' or '.join(_DTYPES)}. Tokenize anew.")
    if not 0 <= meta["end_of_text"] < meta["vocabulary"]:
        raise ValueError(
            f"{path} has end_of_text {meta['end_of_text']}, which must lie in its vocabulary, [0, "
            f"{meta['vocabulary']}). Tokenize anew."
        )
    return meta


def _check_types(path: Path, entries: dict[str, Any], types: Mapping[str, type], inside: str = "") -> None:
    for key, kind in types.items():
        if type(entries.get(key)) is not kind:  # not isinstance, for which true is an int
            found = repr(entries[key])[:80] if key in entries else "nothing"
            raise ValueError(f"{path} is damaged: {inside}{key} must be {_KINDS[kind]}, got {found}. Tokenize anew.")
