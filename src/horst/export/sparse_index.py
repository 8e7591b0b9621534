"""The index of a sparse safetensors file: which tensors it holds, how, and whether the rest of the file agrees.

The metadata of the file holds

- ``format`` and ``format_version``: ``horst-sparse`` and ``1``;
- ``index``: JSON, for each tensor its shape, dtype and ``nnz``, the number of its values (null where it is dense);
- ``tied``: JSON, from the names of tensors that share storage with another to that other's name: they are stored once;
- ``crc32``: JSON, the checksum of each entry of the file;
- ``header_crc32``: that of the header itself, computed with eight zeros in its place;
- whatever the caller adds, such as an architecture and its configuration.

The checksums find damage, not malice: whoever can write the file can write them too. What a hostile file could do is
bounded by the other checks: sizes are compared with the bytes that are there before anything is allocated, so that
loading takes at most 64 times the file's size (one bit for each 8-byte zero).
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch

from horst.export.bitmask import scan
from horst.export.safetensors_header import (
    Entry,
    Header,
    dtype_name,
    encode,
    parse_dtype,
    parse_shape,
)
from horst.files import InvalidFileError, parse_json

FORMAT, VERSION = "horst-sparse", "1"
RESERVED = ("format", "format_version", "index", "tied", "crc32", "header_crc32")
BITMASK, VALUES = "::bitmask", "::values"
_HEADER_CRC32 = re.compile(rb'(?<="header_crc32":")[0-9a-f]{8}(?=")')


@dataclass(frozen=True)
class Stored:
    """How one tensor is stored; ``nnz`` is the number of its values, None where it is dense."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nnz: int | None

    def entries(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The entries of the file that hold the tensor."""
        if self.nnz is None:
            return {name: (self.dtype, self.shape)}
        mask_bytes = -(-math.prod(self.shape) // 8)
        return {name + BITMASK: (torch.uint8, (mask_bytes,)), name + VALUES: (self.dtype, (self.nnz,))}


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse a caller's metadata that safetensors cannot hold or the format uses itself."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata maps strings to strings, got {key!r}: {value!r}. Use json.dumps for the rest.")
        if key in RESERVED:
            raise ValueError(f"the metadata key {key!r} is the format's own ({', '.join(RESERVED)}). Choose another.")


def encode_index(
    entries: dict[str, Entry],
    index: Mapping[str, Stored],
    tied: dict[str, str],
    crc32: dict[str, int],
    user: Mapping[str, str],
) -> bytes:
    """The beginning of the file; as long for any checksums, so it can be written last."""
    described = {
        name: {"shape": list(stored.shape), "dtype": dtype_name(stored.dtype), "nnz": stored.nnz}
        for name, stored in index.items()
    }
    metadata = {
        "format": FORMAT,
        "format_version": VERSION,
        "index": json.dumps(described, separators=(",", ":")),
        "tied": json.dumps(tied, separators=(",", ":")),
        "crc32": json.dumps({name: f"{value:08x}" for name, value in crc32.items()}, separators=(",", ":")),
        "header_crc32": "0" * 8,
    }
    encoded = encode(entries, metadata | dict(user))
    return encoded[:8] + _HEADER_CRC32.sub(b"%08x" % zlib.crc32(encoded[8:]), encoded[8:], count=1)


def read_index(header: Header, path: pathlib.Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """How each tensor is stored and which share storage, with everything checked that the header alone can tell."""
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise InvalidFileError(
            f"{path.name} is a safetensors file, but not of the sparse form (its metadata says "
            f"format={metadata.get('format')!r}, not {FORMAT!r}). Read it with safetensors.torch.load_file."
        )
    if metadata.get("format_version") != VERSION:
        version = metadata.get("format_version")
        raise InvalidFileError(f"{path.name} has format version {version!r}; this code reads {VERSION!r}.")
    blanked, found = _HEADER_CRC32.subn(b"0" * 8, header.raw)
    if found != 1 or metadata.get("header_crc32") != f"{zlib.crc32(blanked):08x}":
        raise InvalidFileError(f"the header of {path.name} is damaged: its checksum does not fit.")
    described = parse_json(metadata.get("index", ""), f"the index of {path.name}")
    tied = parse_json(metadata.get("tied", ""), f"'tied' in {path.name}")
    index = {name: _stored(name, value) for name, value in described.items()}
    expected = {part: spec for name, stored in index.items() for part, spec in stored.entries(name).items()}
    actual = {name: (entry.dtype, entry.shape) for name, entry in header.entries.items()}
    if expected != actual:
        wrong = sorted(name for name in expected | actual if expected.get(name) != actual.get(name))
        raise InvalidFileError(
            f"index and tensors of {path.name} disagree on {shorten(wrong)}: {wrong[0]!r} should be "
            f"{expected.get(wrong[0], 'absent')} and is {actual.get(wrong[0], 'absent')}."
        )
    bad = [alias for alias, name in tied.items() if not isinstance(name, str) or name not in index or alias in index]
    if bad:
        raise InvalidFileError(f"{path.name} ties {shorten(bad)} to tensors it does not hold.")
    return index, tied


def _stored(name: str, value: object) -> Stored:
    what = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"shape", "dtype", "nnz"}:
        raise InvalidFileError(f"the index must give shape, dtype and nnz of {what}, got {str(value)[:80]}.")
    dtype = parse_dtype(value["dtype"], what)
    shape, nnz = parse_shape(value["shape"], dtype.itemsize, what), value["nnz"]
    if nnz is not None and not (type(nnz) is int and 0 <= nnz <= math.prod(shape)):
        raise InvalidFileError(f"{what} of shape {shape} cannot have nnz={str(nnz)[:80]}.")
    return Stored(dtype, shape, nnz)


def check_data(file: BinaryIO, header: Header, index: Mapping[str, Stored], path: pathlib.Path) -> None:
    """Read the file once from end to end: checksums, and as many bits as values."""
    crc32 = parse_json(header.metadata.get("crc32", ""), f"'crc32' in {path.name}")
    bits = {}
    for name, entry in header.entries.items():
        found, bits[name] = scan(file, header.data_start + entry.start, header.data_start + entry.end)
        if crc32.get(name) != f"{found:08x}":
            raise InvalidFileError(f"the data of {name!r} in {path.name} is damaged: its checksum does not fit.")
    for name, stored in index.items():
        if stored.nnz is None:
            continue
        beyond, used = 0, math.prod(stored.shape) % 8
        if used:  # bits of the last byte; those above are no weight's
            file.seek(header.data_start + header.entries[name + BITMASK].end - 1)
            beyond = file.read(1)[0] >> used
        if bits[name + BITMASK] != stored.nnz or beyond:
            raise InvalidFileError(
                f"mask and values of {name!r} in {path.name} disagree: {bits[name + BITMASK]} bits are set"
                f"{' (some beyond the last weight)' if beyond else ''} for {stored.nnz} values."
            )


def shorten(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "") or "nothing"
