"""What makes a run this run: the settings that decide what it computes, and the data it was given.

Both go into its checkpoints, from which no other run resumes, and into its outcome, which no other run is given.
:mod:`horst.fields` says which settings decide.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Collection
from typing import Any

from horst import fields
from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.data.image_data import ImageData
from horst.lab.data.image_files import find_images
from horst.lab.data.token_files import open_tokens
from horst.lab.experiments.result import to_json

#: Fields of the optimization that only some contenders read.
STRENGTHS = frozenset(field.name for field in dataclasses.fields(Optimization) if field.metadata.get("read_by"))
_BEGINNING = 1 << 20  # bytes
_SAMPLE = 256  # files


def settings(run: Any, optimizer: Name) -> dict[str, Any]:
    """The settings of a run's outcome, as JSON: without other contenders' strengths and where the data lie.

    Args:
        run: A ``LanguageConfig`` or a ``VisionConfig``.
        optimizer: The contender.
    """
    found = fields.settings(run, without=["nothing"], reader=optimizer)
    del found["data"]  # a path: what lies there is told by its digest
    as_json: dict[str, Any] = to_json(found)
    return as_json


def unread_strengths(optimizers: Collection[Name]) -> dict[str, str]:
    """Fields of the optimization that none of these contenders reads, and why."""
    return {
        field.name: f"only {', '.join(readers)} read{'s' * (len(readers) == 1)} it, and optimizers has none of them."
        for field in dataclasses.fields(Optimization)
        if (readers := field.metadata.get("read_by")) and not set(readers) & set(optimizers)
    }


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run computes, of a config as a result file holds it.

    Left out are fields that change speed, memory or how often a run is looked at, which may change when it is resumed,
    and those that say which runs a table has.

    Example:
        >>> deciding({"steps": 10, "loop": {"compile": "auto"}, "model": {"heads": 2, "attention": "short"}})
        {'steps': 10, 'loop': {}, 'model': {'heads': 2}}
    """
    kept = {name: value for name, value in settings.items() if name not in _not_deciding()}
    return {name: deciding(value) if isinstance(value, dict) else value for name, value in kept.items()}


@functools.cache
def _not_deciding() -> frozenset[str]:
    from horst.lab.experiments.recipes import RECIPES  # all configs, some of whose modules import this one

    kinds = {type(config()) for recipe in RECIPES.values() for config in recipe.scales.values()}
    return fields.names(*kinds, affects=("execution", "rows", "nothing"))


def token_data(folder: pathlib.Path) -> dict[str, Any]:
    """What token files hold: their counts, and a digest of ``meta.json``, which has their sources' checksums.

    The beginning of each file is in the digest too, for sources without one.
    """
    return _token_data(folder, stamp(folder))


def stamp(path: pathlib.Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a file or of the files in a folder: while it stays, they need not be read again."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file())


@functools.lru_cache(maxsize=8)
def _token_data(folder: pathlib.Path, stamp: Any) -> dict[str, Any]:
    opened = {split: open_tokens(folder / f"{split}.bin") for split in ("train", "val")}
    digest = hashlib.sha256((folder / "meta.json").read_bytes())
    for file in opened.values():
        with open(file.path, "rb") as stream:
            digest.update(stream.read(_BEGINNING))
    counts = {split: len(file.tokens) for split, file in opened.items()}
    return {"tokenizer": opened["train"].tokenizer, "tokens": counts, "digest": digest.hexdigest()[:16]}


def image_data(data: ImageData) -> dict[str, Any]:
    """What arrays of images hold: their counts, and a digest of images and labels."""
    digest = hashlib.sha256()
    for tensor in (data.images, data.labels, data.test_images, data.test_labels):
        digest.update(tensor.contiguous().numpy().data)
    counts = {"train": len(data.images), "test": len(data.test_images)}
    return {"images": counts, "shape": list(data.images.shape[1:]), "digest": digest.hexdigest()[:16]}


@functools.cache  # a million names take a while, and every run of a table asks
def image_folders(root: pathlib.Path) -> dict[str, Any]:
    """What folders of images hold, without reading them: how many files, a digest of their names and of some sizes.

    Args:
        root: Absolute path, under which the answer is remembered.
    """
    digest = hashlib.sha256()
    counts = {}
    for split in ("train", "val"):
        folder = root / split
        shards = sorted(os.fsencode(path) for path in folder.glob("*.tar"))
        paths = shards or [bytes(path) for path in find_images(folder).paths]
        prefix = len(os.fsencode(folder))
        digest.update(b"\n".join(path[prefix:] for path in paths))
        sizes = [os.stat(path).st_size for path in paths[:: max(1, len(paths) // _SAMPLE)]]
        digest.update(repr(sizes).encode())
        counts[split] = len(paths)
    return {"files": counts, "digest": digest.hexdigest()[:16]}
