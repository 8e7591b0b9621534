"""What makes a run this run: the settings that decide what it computes, and the data it was given.

Both go into its checkpoints, which another run does not go on from, and into its outcome, which no other run is given.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
from typing import Any

from horst.lab.baselines.contenders import Name
from horst.lab.data.image_data import ImageData
from horst.lab.data.image_files import find_images
from horst.lab.data.token_files import open_tokens
from horst.lab.experiments.result import plain

# Fields that change nothing in a run's outcome, nor which checkpoints and curves it leaves.
SILENT = ("compile", "parallel", "workers", "log_every", "keep_checkpoints", "tensorboard", "wandb")
# Those, and fields that change how fast a run is, how much memory it takes, how often it is looked at: a run that was
# interrupted may go on with others.
HOW = (
    *SILENT, "accumulate", "attention", "loss_rows", "deterministic", "eval_batch_size", "eval_batches", "eval_every",
    "checkpoint_every",
)  # fmt: skip
_BEGINNING = 1 << 20  # bytes
_SAMPLE = 256  # files


def settings(run: Any, optimizer: Name) -> dict[str, Any]:
    """A run's config as JSON, without the strengths of other contenders, where its data lie, and :data:`SILENT`.

    Args:
        run: A ``LanguageConfig`` or a ``VisionConfig``.
        optimizer: The contender.
    """
    fields = {**dataclasses.asdict(run), "optimization": run.optimization.settings(optimizer)}
    found: dict[str, Any] = plain({name: fields[name] for name in fields if name not in ("data", *SILENT)})
    return found


def deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide what a run computes: all but :data:`HOW`.

    Example:
        >>> deciding({"steps": 10, "compile": "auto", "model": {"heads": 2, "attention": "short"}})
        {'steps': 10, 'model': {'heads': 2}}
    """
    kept = {name: value for name, value in settings.items() if name not in HOW}
    return {name: deciding(value) if isinstance(value, dict) else value for name, value in kept.items()}


def token_data(folder: pathlib.Path) -> dict[str, Any]:
    """What token files hold: their counts, and a digest of ``meta.json``, which has their sources' checksums.

    The beginning of each file is in the digest too, for sources without one.
    """
    opened = {split: open_tokens(folder / f"{split}.bin") for split in ("train", "val")}
    digest = hashlib.sha256((folder / "meta.json").read_bytes())
    for file in opened.values():
        with open(file.path, "rb") as stream:
            digest.update(stream.read(_BEGINNING))
    counts = {split: len(file.tokens) for split, file in opened.items()}
    return {"tokenizer": opened["train"].tokenizer, "tokens": counts, "digest": _short(digest)}


def image_data(data: ImageData) -> dict[str, Any]:
    """What arrays of images hold: their counts, and a digest of images and labels."""
    digest = hashlib.sha256()
    for tensor in (data.images, data.labels, data.test_images, data.test_labels):
        digest.update(tensor.contiguous().numpy().data)
    counts = {"train": len(data.images), "test": len(data.test_images)}
    return {"images": counts, "shape": list(data.images.shape[1:]), "digest": _short(digest)}


@functools.cache  # a million names take a while, and every run of a table asks
def image_folders(root: pathlib.Path) -> dict[str, Any]:
    """What folders of images hold, without reading them: how many files, a digest of their names and of some sizes.

    Args:
        root: An absolute path, under which the answer is remembered.
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
    return {"files": counts, "digest": _short(digest)}


def _short(digest: Any) -> str:
    text: str = digest.hexdigest()
    return text[:16]
