"""Documents to token files, on as many processes as wanted, always in the same order."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horst.extras import load_extra
from horst.lab.data.documents import Document, Fields, Source
from horst.lab.data.token_files import dtype_name, new_token_folder
from horst.lab.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt

_logger = logging.getLogger(__name__)

_CHARACTERS = 1 << 20  # of text that a process takes at a time
_HASHES = 1 << 64

# A text and the file it goes to, "train" or "val".
Placed = tuple[str, str]
# The same after encoding: tokens, and how many documents they are.
_Encoded = dict[str, tuple[Any, int]]


def tokenize(
    sources: Any,
    out: str | os.PathLike[str],
    *,
    tokenizer: str | Tokenizer = "gpt2",
    validation: float | int = 0.005,
    fields: Fields | None = None,
    workers: int = 1,
) -> Path:
    """Write the documents of ``sources`` to ``out/train.bin`` and ``out/val.bin``, with a ``meta.json``.

    The end-of-text token follows each document. A document is held out by the hash of its id (of its text, if it has
    none), whatever stands before or after it: the same ones for every order of the files, and documents with one id
    stay together. The folder appears whole at the end, or not at all.

    Args:
        sources: Source, or list of sources: see :mod:`horst.lab.data.documents`.
        out: Folder to make.
        tokenizer: ``"gpt2"``, ``"bytes"``, or an object of your own.
        validation: Part to hold out. A fraction is a share of the documents, in expectation; a whole number is a number
            of documents, which takes a second pass over the sources; 0 holds out nothing and writes no ``val.bin``.
        fields: Names of the text's and the id's fields; None is ``"text"`` and ``"id"``.
        workers: Processes that encode. More than one are started afresh and import the main program: a script needs
            ``if __name__ == "__main__":`` then.

    Returns:
        The folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = Path(folder) / "text.txt"
        ...     _ = text.write_text("one|two|three|four")
        ...     made = tokenize(text, Path(folder) / "tokens", tokenizer="bytes", validation=1,
        ...                     fields=Fields(separator="|"))
        ...     sorted(path.name for path in made.iterdir())
        ['meta.json', 'train.bin', 'val.bin']
    """
    opened = [Source(given) for given in (sources if isinstance(sources, list | tuple) else [sources])]
    if not opened:
        raise ValueError("sources is empty. Give a file, a dataset, or a list of them.")
    # A bool is an int to Python, but neither True nor False says how much.
    if isinstance(validation, bool) or validation < 0 or (isinstance(validation, float) and not validation < 1):
        raise ValueError(
            f"validation must be a share in [0, 1) or a whole number of documents, got {validation!r}. "
            "Half a per cent is 0.005."
        )
    limit = _hash_limit(opened, validation, fields)

    def placed() -> Iterator[Placed]:
        document = None
        for source in opened:
            for document in source.documents(fields):
                yield ("val" if document_hash(document) < limit else "train"), document.text
        if document is None:
            names = ", ".join(source.name for source in opened)
            raise ValueError(f"there is no text in {names}: nothing to tokenize. Give a source that is not empty.")

    described = [source.describe() for source in opened]
    rule = {"rule": "sha256 of the id, or of the text where there is none", "validation": validation}
    return write_token_files(
        placed(), out, tokenizer=tokenizer, splits=("train", "val") if validation else ("train",),
        notes={"sources": described, "split": rule}, workers=workers,
    )  # fmt: skip


def tokenize_slimpajama(
    out: str | os.PathLike[str],
    *,
    dataset: Any = "DKYoon/SlimPajama-6B",
    tokenizer: str | Tokenizer = "gpt2",
    workers: int = 1,
) -> Path:
    """Write the tokens of SlimPajama-6B, the paper's language data, to ``out/train.bin`` and ``out/val.bin``.

    As in the paper's base code, the dataset's train split is cut by ``train_test_split(test_size=0.0005, seed=2357)``,
    which shuffles, and both parts are written in the order that it gives. The dataset's own validation and test splits
    are not used.

    Args:
        out: Folder to make.
        dataset: Name of the dataset on the Hub, or its train split, loaded.
        tokenizer, workers: Tokenizer and number of processes, as for :func:`tokenize`.
    """
    train = Source(dataset)
    if train.dataset is None:
        raise ValueError(f"dataset must be a datasets.Dataset or its name on the Hub, got the file {train.path}.")
    cut = {"test_size": 0.0005, "seed": 2357}
    parts = train.dataset.train_test_split(**cut, shuffle=True)

    def placed(split: str, part: Any) -> Iterator[Placed]:
        return ((split, document.text) for document in Source(part).documents())

    rule = {"rule": "datasets.train_test_split of the train split", **cut}
    return write_token_files(
        itertools.chain(placed("train", parts["train"]), placed("val", parts["test"])),
        out,
        tokenizer=tokenizer,
        notes={"sources": [train.describe()], "split": rule},
        workers=workers,
    )


def document_hash(document: Document) -> int:
    """64 bits that depend on the document's id alone."""
    digest = hashlib.sha256(document.id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def _hash_limit(sources: Sequence[Source], validation: float | int, fields: Fields | None) -> int:
    """Documents whose hash is below this are held out."""
    if isinstance(validation, float):
        return int(validation * _HASHES)
    if validation == 0:
        return 0
    documents = itertools.chain.from_iterable(source.documents(fields) for source in sources)
    smallest = heapq.nsmallest(validation, (document_hash(document) for document in documents))
    return smallest[-1] + 1 if smallest else 0


def write_token_files(
    texts: Iterable[Placed],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | Tokenizer = "gpt2",
    splits: Sequence[str] = ("train", "val"),
    notes: dict[str, Any] | None = None,
    workers: int = 1,
) -> Path:
    """Encode texts and write each to the file it is meant for, in their order, whatever the number of workers.

    Args:
        texts: Pairs of a split and a text.
        out: Folder to make.
        tokenizer, workers: Tokenizer and number of processes, as for :func:`tokenize`.
        splits: Files that must not stay empty.
        notes: Further entries of ``meta.json``.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if not 0 <= tokenizer.end_of_text < tokenizer.vocabulary:
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has a vocabulary of {tokenizer.vocabulary}, which does not hold its "
            f"end_of_text, {tokenizer.end_of_text}."
        )
    meta = {
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": tokenizer.end_of_text,
        **(notes or {}),
    }
    with new_token_folder(out, meta) as writer:
        for encoded in _encode_all(_pieces(texts), tokenizer, workers):
            for split, (tokens, documents) in encoded.items():
                writer.append(split, tokens, documents)
        empty = [split for split in splits if split not in writer.counts]
        if empty:
            total = sum(count["documents"] for count in writer.counts.values())
            raise ValueError(
                f"of {total} documents none went to {empty[0]}.bin. Hold out another share or number of documents; a "
                ".txt file is one document unless Fields(separator=...), on the command line --separator, cuts it."
            )
        for split, count in writer.counts.items():
            _logger.info("%s: %s tokens of %s documents", split, f"{count['tokens']:,}", f"{count['documents']:,}")
    return Path(out)


def _pieces(texts: Iterable[Placed]) -> Iterator[list[Placed]]:
    """Texts in lists large enough to be worth sending to another process."""
    piece: list[Placed] = []
    characters = 0
    for split, text in texts:
        piece.append((split, text))
        characters += len(text)
        if characters >= _CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def _encode_all(pieces: Iterator[list[Placed]], tokenizer: Tokenizer, workers: int) -> Iterator[_Encoded]:
    if workers == 1:
        for piece in pieces:
            yield _encode(piece, tokenizer)
        return
    # Not forked: a fork of a process with threads, as torch's are, may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_set_tokenizer, initargs=(tokenizer,)) as pool:
        # A bounded queue, taken from in the order it was filled: sources may be far larger than memory.
        waiting: deque[Future[_Encoded]] = deque()
        try:
            for piece in pieces:
                waiting.append(pool.submit(_encode_here, piece))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"one of {workers} tokenizing processes died: no memory left, or the main script does not guard its "
                'code with if __name__ == "__main__". Use workers=1 to do without them.'
            ) from error
        finally:
            for future in waiting:
                future.cancel()


_tokenizer_here: Tokenizer | None = None


def _set_tokenizer(tokenizer: Tokenizer) -> None:
    global _tokenizer_here
    _tokenizer_here = tokenizer


def _encode_here(piece: list[Placed]) -> _Encoded:
    assert _tokenizer_here is not None
    return _encode(piece, _tokenizer_here)


def _encode(piece: list[Placed], tokenizer: Tokenizer) -> _Encoded:
    numpy = load_extra("numpy")
    dtype = numpy.dtype(dtype_name(tokenizer.vocabulary))
    end = numpy.array([tokenizer.end_of_text], dtype)
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    for split, text in piece:
        tokens = numpy.asarray(tokenizer.encode(text))
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < tokenizer.vocabulary:
            raise ValueError(
                f"the tokenizer {tokenizer.name!r} has a vocabulary of {tokenizer.vocabulary}, but gave tokens from "
                f"{int(tokens.min())} to {int(tokens.max())}."
            )
        parts.setdefault(split, []).extend([tokens.astype(dtype), end])
    return {split: (numpy.concatenate(arrays), len(arrays) // 2) for split, arrays in parts.items()}
