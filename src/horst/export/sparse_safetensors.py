"""Sparse safetensors: for each tensor one bit per weight and the values that are not zero, in a valid safetensors file.

A tensor ``name`` that becomes smaller is stored as two: ``name::bitmask`` (uint8, eight weights per byte, lowest bit
first, in row-major order) and ``name::values`` (the values where the bit is set, in the tensor's dtype). The others are
stored as they are. A value counts as zero if all its bits are zero: -0.0 and NaN are values, and the round trip is
exact. :mod:`horst.export.safetensors_header` describes the metadata.

With fewer bits per value (``values``), ``name::values`` holds bfloat16 numbers or integer codes, ``name::scales`` the
scales of the codes, and where that is shorter ``name::gaps`` and ``name::remainders`` the positions
(:mod:`horst.export.positions`).

The size at sparsity s, for b-byte values, is (1 - s) + 1/(8 b) of the dense file: 0.131 at 90 % and 0.531 at 50 % in
float32.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO, overload

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from horst.export.bitmask import count_values, read_dense, read_sparse, write_dense, write_sparse
from horst.export.precision import choose_precisions
from horst.export.safetensors_header import (
    RESERVED,
    Header,
    check_data,
    check_metadata,
    dtype_name,
    encode_index,
    place,
    read_header,
    read_index,
    read_parts_of,
    shorten,
)
from horst.export.sparse_linear import SparseLinear, sparsify
from horst.export.stored_tensor import BITMASK, ENTRY_BYTES, VALUES, Parts, Stored, StoredTensor, decode, encode
from horst.files import InvalidFileError, PathLike, whole_file
from horst.parameters.kinds import clean_name
from horst.parameters.quantization import GROUP_SIZE

_log = logging.getLogger(__name__)


def save_sparse(
    model: nn.Module | Mapping[str, Tensor],
    path: PathLike,
    *,
    metadata: Mapping[str, str] | None = None,
    min_sparsity: float = 0.0,
    values: str | None = None,
    head_values: str | None = None,
    group_size: int = GROUP_SIZE,
) -> pathlib.Path:
    """Write a model's tensors, those with enough zeros as bitmask and values.

    Args:
        model: A module, or its state dict. Tensors that share storage (tied weights) are stored once.
        path: The file, ``model.sparse.safetensors`` by custom. It is written under another name and renamed.
        metadata: Strings to keep with the weights, such as ``{"architecture": ..., "config": ...}``; see
            :func:`read_metadata`.
        min_sparsity: Tensors whose share of zeros is not above this stay dense, as do those that would not get
            smaller. 1 stores everything dense.
        values: Precision of the matrices, pruned or not: ``"int8"``, ``"int4"``, ``"int3"``, ``"int2"``,
            ``"bfloat16"``, or ``"float32"``, which is exact. Positions are then stored in the shorter of two ways. None
            keeps the dtype and stores a bitmask. Norms, biases and buffers are always kept. Of a state dict, all
            tensors of two or more dimensions count as matrices.
        head_values: Precision of embeddings and heads; None keeps them.
        group_size: Consecutive inputs of a row that share a scale, for integers.

    Example:
        >>> import tempfile
        >>> layer = nn.Linear(64, 64)
        >>> _ = layer.weight.data[:58].zero_()
        >>> path = save_sparse(layer, f"{tempfile.mkdtemp()}/model.sparse.safetensors")
        >>> torch.equal(load_sparse(path)["weight"], layer.weight)
        True
    """
    if not 0.0 <= min_sparsity <= 1.0:  # this form refuses NaN too
        raise ValueError(f"min_sparsity must lie in [0, 1], got {min_sparsity}. Give a fraction: 0.5, not 50.")
    check_metadata(metadata or {})
    tensors, tied = _untie(_named_tensors(model))
    precisions = choose_precisions(model, tensors, values, head_values, group_size)
    index: dict[str, Stored] = {}
    encoded: dict[str, Parts] = {}  # as large as in the file
    for name, tensor in tensors.items():
        if name not in precisions:
            index[name] = _how_to_store(name, tensors, min_sparsity)
            continue
        try:
            index[name], parts = encode(tensor, precisions[name].values, precisions[name].view, min_sparsity)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if taken := [entry for entry in index[name].entries(name) if entry != name and entry in tensors]:
            raise ValueError(f"{name!r} would be stored as {taken[0]!r}, the name of another tensor. Rename one.")
        encoded[name] = {end: part.cpu() for end, part in parts.items()}
        _log.info("%s: positions %s, values %s", name, index[name].positions_as, index[name].values_as)
    entries = place({part: spec for name, stored in index.items() for part, spec in stored.entries(name).items()})
    crc32 = dict.fromkeys(entries, 0)
    size = len(encode_index(entries, index, tied, crc32, metadata or {}))
    with whole_file(path) as temporary, open(temporary, "xb") as file:
        for name, stored in index.items():
            if name in encoded:
                for end, part in encoded[name].items():
                    crc32[name + end] = write_dense(file, size + entries[name + end].start, part)
                continue
            if stored.nnz is None:
                crc32[name] = write_dense(file, size + entries[name].start, tensors[name])
                continue
            mask, values = name + BITMASK, name + VALUES
            starts = size + entries[mask].start, size + entries[values].start
            crc32[mask], crc32[values] = write_sparse(file, *starts, tensors[name])
        file.seek(0)
        file.write(encode_index(entries, index, tied, crc32, metadata or {}))  # as long as before
    dense_bytes = sum(tensor.nbytes for tensor in tensors.values())
    _log.info("%s holds %d bytes of tensors in %d", path, dense_bytes, pathlib.Path(path).stat().st_size)
    return pathlib.Path(path)


@overload
def load_sparse(path: PathLike) -> dict[str, Tensor]: ...
@overload
def load_sparse(path: PathLike, model: nn.Module, *, sparse: bool = ...) -> nn.Module: ...
@torch.no_grad()
def load_sparse(
    path: PathLike, model: nn.Module | None = None, *, sparse: bool = False
) -> dict[str, Tensor] | nn.Module:
    """Read what :func:`save_sparse` wrote: a state dict, or ``model`` filled with it.

    The file is checked from end to end before the model is touched. Names, shapes and dtypes must be the model's.

    Args:
        path: The file.
        model: Model to fill; None returns a state dict, in which tied tensors share their storage.
        sparse: Whether to turn linear layers that are faster sparse into that form, for inference on this CPU, see
            :func:`horst.export.sparsify`.

    Raises:
        InvalidFileError: The file is damaged, truncated, inconsistent, or something else, such as a pickle.
    """
    if sparse and model is None:
        raise ValueError("sparse=True turns the layers of a model into their sparse form: give the model, too.")
    path = pathlib.Path(path)
    state: dict[str, Tensor] = {}
    with _open(path) as file:
        header = read_header(file, path)
        index, tied = read_index(header, path)
        check_data(file, header, index, path)
        targets = None if model is None else _targets(model, index, tied, path)
        for name, stored in index.items():
            if targets is None:
                state[name] = _read(file, header, name, stored, torch.device("cpu"))
                continue
            first, *others = targets[name]
            if stored.is_plain and first.device.type == "cpu" and first.is_contiguous():
                _read_plain(file, header, name, stored, first)
            else:
                first.copy_(_read(file, header, name, stored, first.device))
            for other in others:
                other.copy_(first)
    if model is None:
        return state | {alias: state[name] for alias, name in tied.items()}
    return sparsify(model) if sparse else model


def read_metadata(path: PathLike) -> dict[str, str]:
    """What was given to :func:`save_sparse` as ``metadata``.

    Example:
        >>> import tempfile
        >>> path = save_sparse({"w": torch.zeros(3)}, f"{tempfile.mkdtemp()}/w", metadata={"architecture": "tiny"})
        >>> read_metadata(path)
        {'architecture': 'tiny'}
    """
    metadata = _header(pathlib.Path(path))[0].metadata
    return {key: value for key, value in metadata.items() if key not in RESERVED}


def read_dtypes(path: PathLike) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a file that :func:`save_sparse` wrote, so that a model can be built to match.

    Example:
        >>> import tempfile
        >>> read_dtypes(save_sparse({"w": torch.zeros(3).half()}, f"{tempfile.mkdtemp()}/w"))
        {'w': torch.float16}
    """
    _, index, tied = _header(pathlib.Path(path))
    return {name: index[source].dtype for name, source in ({name: name for name in index} | tied).items()}


def read_parts(path: PathLike) -> dict[str, StoredTensor]:
    """What a file stores of each tensor, unpacked but not dense: positions, values or codes, and scales.

    The file is checked from end to end first. Tied tensors are the same object.

    Example:
        >>> import tempfile
        >>> path = save_sparse({"w": 0.5 * torch.eye(64)}, f"{tempfile.mkdtemp()}/w", values="int8")
        >>> parts = read_parts(path)["w"]
        >>> parts.values.shape, parts.scales.shape, parts.group_size
        (torch.Size([64]), torch.Size([64, 1, 1]), 128)
    """
    path = pathlib.Path(path)
    with _open(path) as file:
        header = read_header(file, path)
        index, tied = read_index(header, path)
        check_data(file, header, index, path)
        parts = {name: decode(stored, read_parts_of(file, header, name, stored)) for name, stored in index.items()}
    return parts | {alias: parts[name] for alias, name in tied.items()}


def read_layout(path: PathLike) -> list[dict[str, Any]]:
    """One row per tensor of a file: how positions and values are stored, and how many bytes they take.

    Example:
        >>> import tempfile
        >>> path = save_sparse({"w": 0.5 * torch.eye(64)}, f"{tempfile.mkdtemp()}/w", values="int8")
        >>> [(row["tensor"], row["positions"], row["values"], row["bits per weight"]) for row in read_layout(path)]
        [('w', 'gaps, 3 bits', 'int8, groups of 128', 0.564453125)]
    """
    header, index, _ = _header(pathlib.Path(path))
    rows = []
    for name, stored in index.items():
        size = sum(header.entries[entry].end - header.entries[entry].start for entry in stored.entries(name))
        zeros = 0.0 if stored.nnz is None else 1 - stored.nnz / stored.weights
        described = {"tensor": name, "shape": list(stored.shape), "zeros": zeros, "positions": stored.positions_as}
        described |= {"values": stored.values_as, "bytes": size, "bits per weight": 8 * size / max(stored.weights, 1)}
        rows.append(described)
    return rows


def _header(path: pathlib.Path) -> tuple[Header, dict[str, Stored], dict[str, str]]:
    with _open(path) as file:
        header = read_header(file, path)
    return header, *read_index(header, path)


def _open(path: pathlib.Path) -> BinaryIO:
    if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe waits for a writer
        raise InvalidFileError(
            f"{path} is a pipe or a device; a sparse file must be a plain one. Copy it to disk first."
        )
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a directory, and this reads one file. Give the file in it, model.sparse.safetensors, or load "
            "the directory with horst.export.load_pretrained."
        )
    return open(path, "rb")


def _named_tensors(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for raw, tensor in (model.state_dict() if isinstance(model, nn.Module) else model).items():
        name = clean_name(raw) if isinstance(model, nn.Module) else raw
        if name in named or name == "__metadata__":
            raise ValueError(f"{raw!r} cannot be stored under the name {name!r}: it is taken.")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{raw!r} is a {type(tensor).__name__}; only tensors can be stored.")
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(
                f"{raw!r} is no plain dense tensor ({type(tensor).__name__}, {tensor.layout}, {tensor.device}). "
                "Gather a DTensor with full_tensor(), densify a sparse tensor with to_dense()."
            )
        named[name] = tensor.detach()
    return named


def _untie(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors to store, and a map from the names of those that are the same memory to the first of them."""
    first: dict[tuple[Any, ...], str] = {}
    tensors, tied = {}, {}
    for name, tensor in named.items():
        same = first.setdefault(_place_in_memory(tensor), name) if tensor.numel() else name
        if same == name:
            tensors[name] = tensor
        else:
            tied[name] = same
    return tensors, tied


def _place_in_memory(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _how_to_store(name: str, tensors: Mapping[str, Tensor], min_sparsity: float) -> Stored:
    tensor = tensors[name]
    dtype_name(tensor.dtype)  # refuses what safetensors does not hold
    shape, n = tuple(tensor.shape), tensor.numel()
    nnz, negative_zeros = count_values(tensor)
    if negative_zeros > 0.1 * n:
        _log.warning(
            "%s: %d of %d weights are -0.0 and are stored as values, to be exact. weight[weight == 0] = 0 makes them "
            "zeros that cost nothing (weight * mask leaves -0.0, masked_fill does not).",
            *(name, negative_zeros, n),
        )
    sparse = Stored(tensor.dtype, shape, nnz)
    saved = n * tensor.itemsize - nnz * tensor.itemsize - -(-n // 8)
    name_taken = any(entry in tensors for entry in sparse.entries(name))
    if saved <= ENTRY_BYTES or n - nnz <= min_sparsity * n or name_taken:
        return Stored(tensor.dtype, shape, None)
    return sparse


def _targets(
    model: nn.Module, index: Mapping[str, Stored], tied: Mapping[str, str], path: pathlib.Path
) -> dict[str, list[Tensor]]:
    """For each stored tensor those of the model that get it, distinct in memory, after checking that all fits."""
    if any(isinstance(module, SparseLinear) for module in model.modules()):
        raise ValueError(
            "the model's layers are in their sparse form. Load into the dense model; sparse=True converts."
        )
    state = {clean_name(name): tensor for name, tensor in model.state_dict().items()}
    names = {name: name for name in index} | dict(tied)
    if state.keys() != names.keys():
        missing, unexpected = sorted(state.keys() - names.keys()), sorted(names.keys() - state.keys())
        raise ValueError(
            f"{path.name} is not of this model: it lacks {shorten(missing)}, and has {shorten(unexpected)} "
            "that the model has not. load_sparse(path) without a model returns what is there."
        )
    targets: dict[str, list[Tensor]] = {name: [] for name in index}
    filled: dict[tuple[Any, ...], str] = {}
    for name, source in names.items():
        tensor, stored = state[name], index[source]
        if tuple(tensor.shape) != stored.shape or tensor.dtype != stored.dtype or tensor.is_meta:
            raise ValueError(
                f"{name} has shape {stored.shape} and {stored.dtype} in {path.name}, but the model has "
                f"{tuple(tensor.shape)} and {tensor.dtype} on {tensor.device}. Build the same model, with "
                f"model.to({stored.dtype}) and not on the meta device."
            )
        memory = _place_in_memory(tensor) if tensor.numel() else (name,)
        if filled.setdefault(memory, source) != source:
            raise ValueError(
                f"{name} and {filled[memory]} are one tensor in the model, but two in {path.name}: untie them first."
            )
        if not any(tensor.data_ptr() == other.data_ptr() for other in targets[source]):
            targets[source].append(tensor)
    return targets


def _read(file: BinaryIO, header: Header, name: str, stored: Stored, device: torch.device) -> Tensor:
    """The dense tensor; unpacked on ``device`` where it is not plain."""
    if not stored.is_plain:
        parts = read_parts_of(file, header, name, stored)
        return decode(stored, {end: part.to(device) for end, part in parts.items()}).dense()
    out = torch.empty(stored.shape, dtype=stored.dtype)
    _read_plain(file, header, name, stored, out)
    return out


def _read_plain(file: BinaryIO, header: Header, name: str, stored: Stored, out: Tensor) -> None:
    def start(entry: str) -> int:
        return header.data_start + header.entries[entry].start

    if stored.nnz is None:
        read_dense(file, start(name), out)
    else:
        read_sparse(file, start(name + BITMASK), start(name + VALUES), out)
