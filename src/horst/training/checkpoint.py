"""Checkpoints: atomic, complete, checked when read, and good for any number of processes.

A checkpoint is a folder ``step-00001000`` of

- ``__0_0.distcp``, ... and ``.metadata``: the tensors, in the format of ``torch.distributed.checkpoint``;
- ``rank-00000.json``, ...: the states of each rank's random number generators;
- ``checkpoint.json``: all that is not a tensor, the run's fingerprint, the size and checksum of every other file, and a
  checksum of all this.

It is written under another name, flushed to disk and renamed, so a folder of that name is whole: a process killed at
any moment, or a full disk, leaves the checkpoints before it as they were. A folder without ``checkpoint.json``, which a
copy or a deletion that was broken off leaves behind, is no checkpoint: a run resumes from the one before, and replaces
the folder when it has a whole one of that step. Ranks on several hosts need a file system that they share.

Reading one runs no code from it: tensors are read with ``weights_only=True``, the format's own pickled metadata by an
unpickler that refuses what does not belong there (:mod:`horst.training.tensor_files`), the rest is JSON.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from horst.files import crc32, flush, read_json
from horst.training.distributed import on_every_rank, on_rank_0, rank, world_size
from horst.training.run_state import random_state, set_random_state
from horst.training.tensor_files import METADATA, read_tensors, write_tensors

logger = logging.getLogger(__name__)

FORMAT = 1  # raised when the meaning of a file changes
_INDEX = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_TENSOR = "$tensor"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that must not be read: corrupt, or of another run."""


def complete(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The complete checkpoints in ``directory``, oldest first."""
    return [path for path in _folders(pathlib.Path(directory)) if (path / _INDEX).is_file()]


def latest(directory: str | os.PathLike[str]) -> pathlib.Path | None:
    """The newest complete checkpoint in ``directory``, as rank 0 sees it; None if there is none."""
    return on_rank_0(lambda: _latest(pathlib.Path(directory)))


def _latest(directory: pathlib.Path) -> pathlib.Path | None:
    newest = complete(directory)[-1:]
    for path in _folders(directory):
        if not newest or _step_of(path) > _step_of(newest[0]):
            logger.warning("%s has no %s and is passed over; a whole one will replace it.", path, _INDEX)
    return newest[0] if newest else None


def save(
    directory: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    *,
    fingerprint: Mapping[str, Any],
    keep: int = 2,
) -> pathlib.Path:
    """Write ``state`` as the checkpoint of ``step``, then delete all but the newest ``keep``.

    Every rank calls it, with its own part of the same state.

    Args:
        state: Nested dictionaries (with string keys) and lists of tensors, DTensors, numbers, strings and None. The
            states of the random number generators are saved beside it.
        fingerprint: Settings that a run must share with this one to resume from here; JSON, compared by :func:`load`.

    Raises:
        CheckpointError: It could not be written. Earlier checkpoints are untouched.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(folder, 10, {"weights": torch.ones(2), "step": 10}, fingerprint={"model": "tiny"})
        ...     path.name, load(path, fingerprint={"model": "tiny"})
        ('step-00000010', {'weights': tensor([1., 1.]), 'step': 10})
    """
    directory = pathlib.Path(directory)
    final = directory / f"step-{step:08d}"
    temporary = directory / f".{final.name}.tmp"
    tensors: dict[str, Tensor] = {}
    plain = _split(state, "", tensors)
    index = {"format": FORMAT, "step": step, "torch": torch.__version__, "fingerprint": fingerprint, "state": plain}
    try:
        on_rank_0(lambda: _make_empty(temporary, final))
        write_tensors(temporary, tensors)
        parts = on_every_rank(lambda: _finish_files(temporary))
        index["files"] = {name: entry for part in parts for name, entry in part.items()}
        on_rank_0(lambda: _publish(temporary, final, index))
    except (OSError, RuntimeError) as error:
        needed = sum(t.nbytes for t in tensors.values())
        message = why_not_written(f"the checkpoint of step {step}", directory, error, needed)
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(message) from error
    if rank() == 0:
        _delete_all_before(complete(directory)[-keep:][0])
    return final


def load(
    path: str | os.PathLike[str], *, fingerprint: Mapping[str, Any], like: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The state that :func:`save` was given, for this rank. Nothing is changed; tuples have become lists.

    Args:
        path: A checkpoint's folder.
        fingerprint: Settings of this run; a checkpoint with other ones is refused, with the differences.
        like: The model's tensors by name. A tensor of the state under such a name, and of its whole shape, comes on the
            same device and cut over ranks in the same way, whoever saved it; every other one whole, on the CPU.

    Raises:
        CheckpointError: The checkpoint is incomplete, corrupt or of another run.
    """
    path = pathlib.Path(path)
    index: dict[str, Any] = {}

    def check() -> None:
        index.update(_read_index(path))
        if changes := differences(index["fingerprint"], json.loads(json.dumps(fingerprint))):
            texts = [f"{name} was {_short(was)}, is {_short(now)}" for name, (was, now) in changes.items()]
            raise CheckpointError(
                f"{path} belongs to another run: {'; '.join(texts[:6])}. "
                "Run with the settings that it was begun with, or choose another directory."
            )
        _check_files(path, index["files"])

    on_every_rank(check)
    if index["torch"] != torch.__version__:
        logger.info("%s was written by torch %s, this is %s.", path.name, index["torch"], torch.__version__)
    try:
        state: dict[str, Any] = _join(index["state"], read_tensors(path, like or {}))
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error}.") from error
    except Exception as error:  # whatever torch makes of damaged files
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error
    return state


def find_checkpoint(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """``path`` itself if it is a checkpoint, else that of the last step of the run whose directory it is; None if no
    checkpoint was kept.

    Raises:
        ValueError: The run's checkpoints are all of earlier steps.
    """
    path = pathlib.Path(path)
    if path in complete(path.parent):
        return path
    newest = next(reversed(complete(path / "checkpoints")), None)
    if newest is not None:
        index = read_json(newest / _INDEX)
        steps = index.get("fingerprint", {}).get("config", {}).get("steps")
        if index.get("step") != steps:
            raise ValueError(
                f"the newest checkpoint of {path} is of step {index.get('step')} of {steps}: the run was interrupted "
                "there, or broke down later. Run its recipe again with --checkpoint-every, into another --directory."
            )
    return newest


def trained_weights(path: pathlib.Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, by name, on the CPU."""
    weights: dict[str, Tensor] = load(path, fingerprint=read_json(path / _INDEX).get("fingerprint", {}))["model"]
    return weights


def restore_random_state(path: str | os.PathLike[str]) -> None:
    """Set every generator to what it was on this rank when the checkpoint at ``path`` was written.

    A rank that was not there then is seeded by the step and its number.
    """
    file = pathlib.Path(path) / f"rank-{rank():05d}.json"
    if file.exists():
        set_random_state(read_json(file))
    else:
        torch.manual_seed(_step_of(file.parent) * 1_000_003 + rank())


def why_not_written(what: str, directory: str | os.PathLike[str], error: Exception, needed: int = 0) -> str:
    """What a user must know when ``what`` could not be written: why, what to do, and what is left of the run.

    Args:
        directory: Folder of the checkpoints.
        error: Error that was raised.
        needed: Bytes that are needed at least.
    """
    directory = pathlib.Path(directory)
    good = complete(directory)
    kept = f"The last good checkpoint, {good[-1]}, is untouched." if good else "There is no earlier checkpoint."
    free = _free_bytes(directory)
    # torch may hide the system's own word for a full disk.
    full = (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)) or (
        free is not None and free < needed
    )
    room = f"Make room for its {needed / 1e6:,.0f} MB" if needed else "Make room"
    advice = f"{room}, or keep fewer checkpoints, and run again. " if full else ""
    return f"{what} could not be written: {error}. {advice}{kept}"


def _free_bytes(directory: pathlib.Path) -> int | None:
    """Room where ``directory`` is or would be made; None where the system does not say."""
    directory = directory.absolute()
    try:
        return shutil.disk_usage(next(place for place in (directory, *directory.parents) if place.is_dir())).free
    except OSError:
        return None


def _folders(directory: pathlib.Path) -> list[pathlib.Path]:
    """Those with the name of a checkpoint, complete or not, oldest first."""
    return sorted((path for path in directory.glob("step-*") if _NAME.fullmatch(path.name)), key=_step_of)


def _step_of(path: pathlib.Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


# --- nested states ------------------------------------------------------------------------------------------------


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """``value`` with references in place of its tensors; these go to ``tensors``, by path."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a checkpoint's dictionaries have string keys; {path or 'the state'} has {bad[0]!r}.")
        return {key: _split(entry, f"{path}/{key}" if path else key, tensors) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(entry, f"{path}/{i}", tensors) for i, entry in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint holds tensors, numbers, strings and None; {path} is a {type(value).__name__}.")


def _join(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What :func:`_split` took apart."""
    if isinstance(plain, dict):
        if plain.keys() == {_TENSOR}:
            return tensors[plain[_TENSOR]]
        return {key: _join(entry, tensors) for key, entry in plain.items()}
    return [_join(entry, tensors) for entry in plain] if isinstance(plain, list) else plain


# --- writing ------------------------------------------------------------------------------------------------------


def _make_empty(temporary: pathlib.Path, final: pathlib.Path) -> None:
    if (final / _INDEX).exists():
        raise FileExistsError(f"{final} exists already")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    for leftover in temporary.parent.glob(".step-*.tmp"):  # of processes that were killed while writing
        shutil.rmtree(leftover)
    temporary.mkdir()


def _finish_files(folder: pathlib.Path) -> dict[str, list[int]]:
    """Write this rank's random states; flush all its files to disk, and give their sizes and checksums."""
    own = folder / f"rank-{rank():05d}.json"
    own.write_text(json.dumps(random_state()))
    mine = [own, *folder.glob(f"__{rank()}_*")]
    if rank() == 0:
        mine.append(folder / METADATA)
    for file in mine:
        flush(file)
    return {file.name: [file.stat().st_size, crc32(file)] for file in mine}


def _publish(temporary: pathlib.Path, final: pathlib.Path, index: dict[str, Any]) -> None:
    (temporary / _INDEX).write_text(json.dumps({**index, "checksum": _checksum_of_index(index)}))
    flush(temporary / _INDEX)
    flush(temporary)
    if final.is_dir():  # without its index
        shutil.rmtree(final)
    os.rename(temporary, final)
    flush(final.parent)


def _delete_all_before(oldest: pathlib.Path) -> None:
    """Delete the checkpoints before ``oldest``, and what is left of some whose deletion was broken off."""
    for path in _folders(oldest.parent):
        if _step_of(path) < _step_of(oldest):
            (path / _INDEX).unlink(missing_ok=True)  # first: without it the folder is no checkpoint any more
            shutil.rmtree(path, ignore_errors=True)


def _checksum_of_index(index: Mapping[str, Any]) -> int:
    """A checksum over all other entries, as they are when they have been written and read."""
    others = json.loads(json.dumps({key: value for key, value in index.items() if key != "checksum"}))
    return zlib.crc32(json.dumps(others).encode())


# --- reading ------------------------------------------------------------------------------------------------------


def _corrupt(path: pathlib.Path, why: str) -> CheckpointError:
    earlier = [p for p in complete(path.parent) if _step_of(p) < _step_of(path)]
    advice = f"Delete it to resume from the one before, {earlier[-1]}." if earlier else "There is no earlier one."
    return CheckpointError(f"{path} is corrupt: {why}. {advice}")


def _read_index(path: pathlib.Path) -> dict[str, Any]:
    if not (path / _INDEX).exists():
        raise CheckpointError(f"{path} is no complete checkpoint: it has no {_INDEX}.")
    try:
        index = read_json(path / _INDEX)
        version = index["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"{_INDEX} cannot be read ({error})") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}; this version of horst reads format {FORMAT}.")
    if index.get("checksum") != _checksum_of_index(index):
        raise _corrupt(path, f"the checksum of {_INDEX} is wrong")
    if _NAME.fullmatch(path.name) and index["step"] != _step_of(path):
        raise _corrupt(path, f"its {_INDEX} is of step {index['step']}")
    return index


def _check_files(path: pathlib.Path, files: Mapping[str, list[int]]) -> None:
    """Compare sizes and checksums; each rank looks at its share of the files."""
    for name in sorted(files)[rank() :: world_size()]:
        size, checksum = files[name]
        file = path / name
        if not file.exists():
            raise _corrupt(path, f"{name} is missing")
        if file.stat().st_size != size:
            raise _corrupt(path, f"{name} has {file.stat().st_size} bytes instead of {size}")
        if crc32(file) != checksum:
            raise _corrupt(path, f"the checksum of {name} is wrong")


def differences(saved: Any, mine: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """The entries in which nested dictionaries differ, by name, with both values.

    Example:
        >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
        {'a.b': (1, 2)}
    """
    if isinstance(saved, dict) and isinstance(mine, dict):
        names = [*saved, *(key for key in mine if key not in saved)]
        parts = [differences(saved.get(key), mine.get(key), f"{name}.{key}" if name else key) for key in names]
        return {key: pair for part in parts for key, pair in part.items()}
    return {} if saved == mine else {name: (saved, mine)}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
