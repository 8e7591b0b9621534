"""The header of a safetensors file: written, and read as if by an enemy.

The file is the header's length (eight bytes, little-endian), the header (JSON), and the data. The header maps each
tensor to its dtype, shape and place in the data; ``__metadata__`` maps strings to strings. Everything is checked before
anything is allocated: places must tile the data exactly, and each shape must fit the bytes that are there.

The metadata of a sparse safetensors file holds

- ``format`` and ``format_version``: ``horst-sparse`` and ``1``, or ``2`` where the index has one of the optional keys;
- ``index``: JSON, for each tensor its shape, dtype and ``nnz``, the number of its values (null where it is dense).
  Optional are ``values`` (the dtype of its values), ``bits``, ``group_size`` and ``view`` (of its codes) and ``gaps``
  (of its positions), see :class:`horst.export.stored_tensor.Stored`;
- ``tied``: JSON, from the names of tensors that share storage with another to that other's name: they are stored once;
- ``crc32``: JSON, the checksum of each entry of the file;
- ``header_crc32``: that of the header itself, computed with eight zeros in its place;
- whatever the caller adds, such as an architecture and its configuration.

The checksums find damage, not malice: whoever can write the file can write them too. What a hostile file could do is
bounded by the other checks: sizes are compared with the bytes that are there before anything is allocated, so that
loading takes at most 64 times the file's size (one bit for each 8-byte zero), and 512 times where positions are gaps.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch

from horst.export.bitmask import read_dense, scan
from horst.export.positions import MAX_REMAINDER_BITS
from horst.export.stored_tensor import BITMASK, Parts, Stored, find_problem
from horst.files import MAX_JSON_BYTES, InvalidFileError, parse_json
from horst.parameters.quantization import BITS, Grid

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
FORMAT, VERSIONS = "horst-sparse", ("1", "2")
RESERVED = ("format", "format_version", "index", "tied", "crc32", "header_crc32")
_REQUIRED, _OPTIONAL = {"shape", "dtype", "nnz"}, {"values", "bits", "group_size", "view", "gaps"}
_HEADER_CRC32 = re.compile(rb'(?<="header_crc32":")[0-9a-f]{8}(?=")')


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: ``start`` and ``end`` count bytes from the beginning of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds, checked; ``data_start`` is where its data begins."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    raw: bytes
    data_start: int


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in safetensors.

    Example:
        >>> dtype_name(torch.bfloat16)
        'BF16'
    """
    if dtype not in _NAMES:
        raise ValueError(f"safetensors holds no {dtype}. It holds {', '.join(map(str, _NAMES))}.")
    return _NAMES[dtype]


def place(tensors: dict[str, tuple[torch.dtype, Sequence[int]]]) -> dict[str, Entry]:
    """Lay tensors out one after another, wide dtypes first, so that each begins at a multiple of its item's size."""
    entries, start = {}, 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        end = start + math.prod(shape) * dtype.itemsize
        entries[name] = Entry(dtype, tuple(shape), start, end)
        start = end
    return entries


def encode(entries: dict[str, Entry], metadata: dict[str, str]) -> bytes:
    """The header and its length, as they stand at the beginning of the file."""
    content: dict[str, Any] = {"__metadata__": metadata}
    for name, entry in entries.items():
        content[name] = {
            "dtype": dtype_name(entry.dtype),
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # data begins at a multiple of eight, as the library writes it
    return len(raw).to_bytes(8, "little") + raw


def read_header(file: BinaryIO, path: pathlib.Path) -> Header:
    """Read and check the header of an open file; ``path`` is for messages."""
    size = file.seek(0, 2)
    file.seek(0)
    first = file.read(8)
    # A header may happen to be 128 bytes long, but begins with a brace.
    if (first[:4] == b"PK\x03\x04" or first[:1] == b"\x80") and file.read(1) != b"{":
        raise InvalidFileError(
            f"{path.name} is a pickle (torch.save), not a safetensors file. A pickle can run code when it is read and "
            "is never loaded here. If you trust it: torch.load(path, weights_only=True), then save_sparse."
        )
    if len(first) < 8:
        raise InvalidFileError(f"{path.name} is no safetensors file: it has {size} bytes and no header.")
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
        raise InvalidFileError(
            f"{path.name} is truncated or no safetensors file: it announces a header of {length} bytes and has "
            f"{size - 8} bytes after that number (at most {MAX_JSON_BYTES} are allowed)."
        )
    file.seek(8)
    raw = file.read(length)
    content = parse_json(raw, f"the header of {path.name}")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidFileError(f"the metadata of {path.name} is not a map from strings to strings.")
    entries = {name: _entry(name, value) for name, value in content.items()}
    _check_tiling(entries, size - 8 - length, path)
    return Header(entries, metadata, raw, 8 + length)


def parse_shape(shape: object, itemsize: int, what: str) -> tuple[int, ...]:
    """Check a shape out of a file: natural numbers whose product a tensor can have."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise InvalidFileError(f"{what} has the shape {str(shape)[:80]}, which is no list of natural numbers.")
    # torch computes strides as if an empty dimension had size one, in 64 bits.
    if len(shape) > 64 or math.prod(max(n, 1) for n in shape) * itemsize >= 1 << 63:
        raise InvalidFileError(f"{what} has the shape {str(shape)[:80]}, larger than any tensor.")
    return tuple(shape)


def parse_dtype(name: object, what: str) -> torch.dtype:
    """The dtype of a name out of a file."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise InvalidFileError(f"{what} has the dtype {str(name)[:80]!r}, not one of {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _entry(name: str, value: object) -> Entry:
    what = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise InvalidFileError(f"{what} must have dtype, shape and data_offsets, got {str(value)[:80]}.")
    dtype = parse_dtype(value["dtype"], what)
    shape = parse_shape(value["shape"], dtype.itemsize, what)
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise InvalidFileError(f"{what} has the offsets {str(offsets)[:80]}, not two natural numbers.")
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise InvalidFileError(
            f"{what} of shape {shape} and {dtype} needs {math.prod(shape) * dtype.itemsize} bytes, "
            f"but its place {start} to {end} holds {end - start}."
        )
    return Entry(dtype, shape, start, end)


def _check_tiling(entries: dict[str, Entry], data_bytes: int, path: pathlib.Path) -> None:
    """Offsets must cover the data once, from the first byte to the last."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            problem = "overlaps another" if entry.start < position else "leaves a hole before it"
            raise InvalidFileError(f"in {path.name}, the place of tensor {name[:80]!r} {problem}.")
        position = entry.end
    if position != data_bytes:
        problem = "truncated" if position > data_bytes else "too long"
        raise InvalidFileError(f"{path.name} is {problem}: its header describes {position} bytes, not {data_bytes}.")


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
    described = {name: _describe(stored) for name, stored in index.items()}
    metadata = {
        "format": FORMAT,
        "format_version": VERSIONS[not all(stored.is_plain for stored in index.values())],
        "index": json.dumps(described, separators=(",", ":")),
        "tied": json.dumps(tied, separators=(",", ":")),
        "crc32": json.dumps({name: f"{value:08x}" for name, value in crc32.items()}, separators=(",", ":")),
        "header_crc32": "0" * 8,
    }
    encoded = encode(entries, metadata | dict(user))
    return encoded[:8] + _HEADER_CRC32.sub(b"%08x" % zlib.crc32(encoded[8:]), encoded[8:], count=1)


def _describe(stored: Stored) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(stored.shape), "dtype": dtype_name(stored.dtype), "nnz": stored.nnz}
    if isinstance(stored.values, Grid):
        assert stored.view is not None
        described |= {"bits": stored.values.bits, "group_size": stored.values.group_size, "view": list(stored.view)}
    elif stored.values is not None:
        described["values"] = dtype_name(stored.values)
    if stored.gaps is not None:
        described["gaps"] = list(stored.gaps)
    return described


def read_index(header: Header, path: pathlib.Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """How each tensor is stored and which share storage, with everything checked that the header alone can tell."""
    metadata = header.metadata
    if metadata.get("format") != FORMAT:
        raise InvalidFileError(
            f"{path.name} is a safetensors file, but not of the sparse form (its metadata says "
            f"format={metadata.get('format')!r}, not {FORMAT!r}). Read it with safetensors.torch.load_file."
        )
    version = metadata.get("format_version")
    if version not in VERSIONS:
        raise InvalidFileError(f"{path.name} has format version {version!r}; this code reads {', '.join(VERSIONS)}.")
    blanked, found = _HEADER_CRC32.subn(b"0" * 8, header.raw)
    if found != 1 or metadata.get("header_crc32") != f"{zlib.crc32(blanked):08x}":
        raise InvalidFileError(f"the header of {path.name} is damaged: its checksum does not fit.")
    described = parse_json(metadata.get("index", ""), f"the index of {path.name}")
    tied = parse_json(metadata.get("tied", ""), f"'tied' in {path.name}")
    optional = set() if version == VERSIONS[0] else _OPTIONAL
    index = {name: _stored(name, value, optional) for name, value in described.items()}
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


def _stored(name: str, value: object, optional: set[str]) -> Stored:
    what = f"tensor {name[:80]!r}"
    if not isinstance(value, dict) or not _REQUIRED <= set(value) <= _REQUIRED | optional:
        raise InvalidFileError(f"the index must give shape, dtype and nnz of {what}, got {str(value)[:80]}.")
    dtype = parse_dtype(value["dtype"], what)
    shape, nnz = parse_shape(value["shape"], dtype.itemsize, what), value["nnz"]
    if nnz is not None and not (type(nnz) is int and 0 <= nnz <= math.prod(shape)):
        raise InvalidFileError(f"{what} of shape {shape} cannot have nnz={str(nnz)[:80]}.")
    gaps: Any = value.get("gaps")
    if "gaps" in value:
        if nnz is None or not _are_naturals(gaps, 2) or not 1 <= gaps[0] <= MAX_REMAINDER_BITS:
            raise InvalidFileError(f"{what} with nnz={nnz} cannot have gaps={str(gaps)[:80]}.")
        gaps = tuple(gaps)
    if not {"values", "bits", "group_size", "view"} & set(value):
        return Stored(dtype, shape, nnz, gaps=gaps)
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise InvalidFileError(f"{what} is {dtype}, which is not stored in fewer bits.")
    if "values" in value:
        if {"bits", "group_size", "view"} & set(value):
            raise InvalidFileError(f"{what} has both a dtype of its values and codes.")
        values = parse_dtype(value["values"], what)
        if not values.is_floating_point or values.itemsize >= dtype.itemsize:
            raise InvalidFileError(f"{what} is {dtype}; its values cannot be {values}.")
        return Stored(dtype, shape, nnz, values, gaps=gaps)
    bits, group_size = value.get("bits"), value.get("group_size")
    view: Any = value.get("view")
    if (
        type(bits) is not int
        or bits not in BITS.values()
        or not (type(group_size) is int and 1 <= group_size < 1 << 31)
    ):
        raise InvalidFileError(f"{what} cannot have bits={str(bits)[:80]} and group_size={str(group_size)[:80]}.")
    if not _are_naturals(view, 3) or math.prod(view) != math.prod(shape):
        raise InvalidFileError(f"{what} of shape {shape} cannot be seen as {str(view)[:80]}.")
    return Stored(dtype, shape, nnz, Grid(bits, group_size), tuple(view), gaps)


def _are_naturals(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def check_data(file: BinaryIO, header: Header, index: Mapping[str, Stored], path: pathlib.Path) -> None:
    """Read the file from end to end: checksums, as many bits as values, codes that are codes."""
    crc32 = parse_json(header.metadata.get("crc32", ""), f"'crc32' in {path.name}")
    bits = {}
    for name, entry in header.entries.items():
        found, bits[name] = scan(file, header.data_start + entry.start, header.data_start + entry.end)
        if crc32.get(name) != f"{found:08x}":
            raise InvalidFileError(f"the data of {name!r} in {path.name} is damaged: its checksum does not fit.")
    for name, stored in index.items():
        if not stored.is_plain and (problem := find_problem(stored, read_parts_of(file, header, name, stored))):
            raise InvalidFileError(f"the parts of {name!r} in {path.name} disagree: {problem}.")
        if stored.nnz is None or stored.gaps is not None:
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


def read_parts_of(file: BinaryIO, header: Header, name: str, stored: Stored) -> Parts:
    """The entries of one tensor, by the ends of their names."""
    parts = {}
    for entry in stored.entries(name):
        found = header.entries[entry]
        part = torch.empty(found.shape, dtype=found.dtype)
        read_dense(file, header.data_start + found.start, part)
        parts[entry.removeprefix(name)] = part
    return parts


def shorten(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "") or "nothing"
