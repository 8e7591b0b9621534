"""SlimPajama-6B, the paper's language data, cut and shuffled as its base code does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horst.lab.data.documents import Source
from horst.lab.data.tokenization import Placed, write_token_files
from horst.lab.data.tokenizer import Tokenizer

SLIMPAJAMA_6B = "DKYoon/SlimPajama-6B"
HELD_OUT = 0.0005
SPLIT_SEED = 2357


def tokenize_slimpajama(
    out: str | os.PathLike[str],
    *,
    dataset: Any = SLIMPAJAMA_6B,
    tokenizer: str | Tokenizer = "gpt2",
    workers: int = 1,
) -> Path:
    """Write SlimPajama-6B's tokens to ``out/train.bin`` and ``out/val.bin``.

    The dataset's train split is cut by ``train_test_split(test_size=0.0005, seed=2357)``, which shuffles, and both
    parts are written in the order that it gives. The dataset's own validation and test splits are not used.

    Args:
        out: Folder to make.
        dataset: Name of the dataset on the Hub, or its train split, loaded.
        tokenizer, workers: Tokenizer and number of processes, as for :func:`horst.lab.data.tokenization.tokenize`.
    """
    train = Source(dataset)
    if train.dataset is None:
        raise ValueError(f"dataset must be a datasets.Dataset or its name on the Hub, got the file {train.path}.")
    parts = train.dataset.train_test_split(test_size=HELD_OUT, seed=SPLIT_SEED, shuffle=True)

    def placed(split: str, part: Any) -> Iterator[Placed]:
        return ((split, document.text) for document in Source(part).documents())

    rule = {"rule": "datasets.train_test_split of the train split", "test_size": HELD_OUT, "seed": SPLIT_SEED}
    return write_token_files(
        itertools.chain(placed("train", parts["train"]), placed("val", parts["test"])),
        out,
        tokenizer=tokenizer,
        notes={"sources": [train.describe()], "split": rule},
        workers=workers,
    )
