"""Documents from files and from Hugging Face datasets, one at a time.

A source is a path to ``.jsonl``, ``.txt`` (each also as ``.gz`` or ``.xz``) or ``.parquet``; a ``datasets.Dataset``,
loaded, or the folder that its ``save_to_disk`` wrote; or the name of one on the Hub, ``"owner/name"`` or
``"owner/name:split"``.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from horst.extras import load_extra
from horst.files import sha256

_OPEN: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_ROWS = 1000  # of a parquet file or dataset at a time


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, and what tells it from others: its id, or the text itself where there is none."""

    id: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Where in a record the text and the id are, and what parts a text file.

    Args:
        text: Name of the text's field or column.
        id: Name of the id's field or column. The text of a record without one is its id.
        separator: String that separates the documents of a ``.txt`` file; None makes it one document.
    """

    text: str = "text"
    id: str = "id"
    separator: str | None = None


class Source:
    """Where documents come from: a file, or a Hugging Face dataset.

    Args:
        given: File, dataset or name; see the module.

    Raises:
        FileNotFoundError: There is no such file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "two.jsonl"
        ...     _ = path.write_text('{"id": 7, "text": "seven"}' + chr(10) + '{"text": "nameless"}')
        ...     list(Source(path).documents())
        [Document(id='7', text='seven'), Document(id='nameless', text='nameless')]
    """

    def __init__(self, given: Any) -> None:
        found = _local_path(given)
        self.path = found if found is not None and found.is_file() else None
        self.dataset: Any = None if self.path is not None else _load_dataset(given if found is None else found)
        # A loaded dataset has no name, and a path tells of the machine; the first is for messages.
        self.name = str(given) if isinstance(given, str | os.PathLike) else "the dataset"
        self._short_name = found.name if found is not None else given if isinstance(given, str) else None

    def documents(self, fields: Fields | None = None) -> Iterator[Document]:
        """The documents, in the source's order; ``fields=None`` reads ``"text"`` and ``"id"``.

        Raises:
            ValueError: A record has no text, or a file is damaged; the message has the file and the line or row.
        """
        fields = Fields() if fields is None else fields
        if self.path is None:
            yield from _from_dataset(self.dataset, fields, self.name)
            return
        read = next(read for suffix, read in _READERS.items() if _is_of(self.path, suffix))
        try:
            yield from read(self.path, fields)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}. If it is "
                f"in another encoding, convert it, for Latin-1: iconv -f latin1 -t utf-8 {self.path} > utf8.txt"
            ) from error
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path} is damaged or cut short: {error}. Fetch it anew.") from error

    def describe(self) -> dict[str, Any]:
        """What tells this source from another: a file's name, size and sha256, or a dataset's rows and fingerprint."""
        if self.path is not None:
            return {"file": self.path.name, "bytes": self.path.stat().st_size, "sha256": sha256(self.path)}
        return {
            "dataset": self._short_name,
            "split": str(self.dataset.split),
            "rows": getattr(self.dataset, "num_rows", None),  # a streamed dataset has neither
            "fingerprint": getattr(self.dataset, "_fingerprint", None),
        }


def _load_dataset(given: Any) -> Any:
    if isinstance(given, Path):
        loaded = load_extra("datasets").load_from_disk(given)
        if isinstance(loaded, dict):
            raise ValueError(f"{given} holds the splits {sorted(loaded)}: give one of them, {given / 'train'}.")
        return loaded
    if isinstance(given, str):
        name, _, split = given.partition(":")
        return load_extra("datasets").load_dataset(name, split=split or "train")
    if isinstance(given, dict):
        raise ValueError(f"the dataset has the splits {sorted(given)}: give one of them, dataset['train'].")
    if not hasattr(given, "select_columns"):
        raise TypeError(f"a source is a path, a datasets.Dataset or the name of one, got {type(given).__name__}.")
    return given


def _local_path(given: Any) -> Path | None:
    """The file that a source names, or the folder of a saved dataset; None for a loaded one or a name on the Hub."""
    if not isinstance(given, str | os.PathLike):
        return None
    path = Path(given)
    if any(_is_of(path, suffix) for suffix in _READERS):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        return path
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return path
    if path.exists() or not isinstance(given, str):
        raise ValueError(
            f"{path} is no file to read documents from. Give .jsonl or .txt (either also as .gz or .xz) or .parquet;"
            " or a folder that save_to_disk of datasets wrote."
        )
    return None


def _is_of(path: Path, suffix: str) -> bool:
    endings = [suffix] if suffix == ".parquet" else [suffix, *(suffix + packed for packed in _OPEN)]
    return path.name.endswith(tuple(endings))


def _open_text(path: Path) -> Any:
    # newline="\n" keeps every character as it is; -sig leaves out the mark that Windows writes in front
    return _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="\n")


def _from_jsonl(path: Path, fields: Fields) -> Iterator[Document]:
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                hint = ' Each line is {"text": "..."}. Is it plain text? Name it .txt.' if number == 1 else ""
                raise ValueError(f"{path}, line {number}: no JSON ({error}).{hint}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: an object with a field {fields.text!r} is needed.")
            yield _document(record, fields, f"{path}, line {number}")


def _from_text(path: Path, fields: Fields) -> Iterator[Document]:
    with _open_text(path) as file:
        text = file.read()
    for part in [text] if fields.separator is None else text.split(fields.separator):
        if part:
            yield Document(part, part)


def _from_parquet(path: Path, fields: Fields) -> Iterator[Document]:
    damage = (load_extra("pyarrow").ArrowException, OSError)
    try:
        file = load_extra("pyarrow.parquet").ParquetFile(path)
        columns = _columns(file.schema_arrow.names, fields, str(path))
        rows = (row for batch in file.iter_batches(batch_size=_ROWS, columns=columns) for row in batch.to_pylist())
        yield from _numbered(rows, fields, str(path))
    except damage as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"{path} cannot be read: {reason}. If it is damaged, fetch it anew.") from error


_READERS = {".jsonl": _from_jsonl, ".txt": _from_text, ".parquet": _from_parquet}


def _from_dataset(dataset: Any, fields: Fields, name: str) -> Iterator[Document]:
    if dataset.column_names is not None:  # a streamed dataset may not know them
        dataset = dataset.select_columns(_columns(dataset.column_names, fields, name))
    batches = dataset.iter(batch_size=_ROWS)
    rows = (dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True))
    return _numbered(rows, fields, name)


def _numbered(rows: Iterable[dict[str, Any]], fields: Fields, where: str) -> Iterator[Document]:
    return (_document(row, fields, f"{where}, row {number} (the first is 0)") for number, row in enumerate(rows))


def _columns(names: list[str], fields: Fields, where: str) -> list[str]:
    if fields.text not in names:
        raise ValueError(f"{where} has no column {fields.text!r}. Its columns: {', '.join(names)}.")
    return [name for name in (fields.id, fields.text) if name in names]


def _document(record: dict[str, Any], fields: Fields, where: str) -> Document:
    if fields.text not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise ValueError(
            f"{where} has no field {fields.text!r} (it has {names}). Rename the field of the text, or give its name to "
            "horst data tokenize --text-field, which makes a folder of tokens."
        )
    text = record[fields.text]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: the field {fields.text!r} must be a text, got {type(text).__name__}. "
            f"The record's fields: {', '.join(map(str, record))}."
        )
    name = record.get(fields.id)
    return Document(text if name is None else str(name), text)
