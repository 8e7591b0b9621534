"""A checkpoint's tensors, through ``torch.distributed.checkpoint``: each rank writes its part, any number read them.

torch reads the format's tensors with ``weights_only=True``, but its ``.metadata``, a pickle, without any check. Here an
unpickler that knows the few classes of that file, and refuses all others, reads it instead.
"""

from __future__ import annotations

import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from horst.training.distributed import world_size

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

METADATA = ".metadata"


def write_tensors(folder: pathlib.Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's part of ``tensors`` into ``folder``; of those that all ranks have whole, a share.

    Raises:
        OSError: The disk of any rank is full, or cannot be written.
    """
    # Imported here: it takes a second, and is not needed before there is something to save.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to save in a single process.*")
            save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=world_size() == 1)
    except CheckpointException as error:
        raise _cause(error) from error


def read_tensors(folder: pathlib.Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in ``folder``, by path.

    Args:
        like: The model's tensors by name. A tensor with such a name in its path, and of its whole shape, comes on the
            same device and cut over the ranks in the same way; every other one whole, on the CPU.

    Raises:
        pickle.UnpicklingError: The metadata names something that does not belong there.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with open(folder / METADATA, "rb") as stream:
        metadata = MetadataUnpickler(stream).load()

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    tensors = {}
    for path, entry in metadata.state_dict_metadata.items():
        model = next((like[name] for name in path.split("/") if name in like), None)
        if model is not None and model.shape == entry.size:
            tensors[path] = torch.empty_like(model, dtype=entry.properties.dtype, requires_grad=False)
        else:
            tensors[path] = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process.*")
            load(tensors, storage_reader=Reader(folder), no_dist=world_size() == 1)
    except CheckpointException as error:
        raise _cause(error) from error
    return tensors


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on a rank. torch wraps it in an exception that ``except Exception`` does not catch."""
    causes = [link for cause, _ in error.failures.values() for link in _chain(cause)]
    # A second Ctrl-C goes before all; a full disk before what torch, or another rank, said of it in the end.
    for kind in (KeyboardInterrupt, OSError):
        for cause in causes:
            if isinstance(cause, kind):
                return cause
    return RuntimeError(f"{type(causes[0]).__name__}: {causes[0]}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it was raised in the handling of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class MetadataUnpickler(pickle.Unpickler):
    """Makes what torch writes into ``.metadata``, and nothing else."""

    _CLASSES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),  # where Python 3.13 keeps it
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, if it belongs to the format; dtypes are attributes of torch."""
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in self._CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
