"""Text for a model: its tokenizer, token files made of whatever ``--data`` names, and windows to calibrate on."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from horst.cli.images import DIGITS
from horst.cli.models import LoadedModel
from horst.cli.output import nearest
from horst.cli.progress import quiet
from horst.extras import load_extra
from horst.lab.data.tokenization import tokenize
from horst.lab.data.tokenizer import ByteTokenizer, GPT2Tokenizer, Tokenizer, load_tokenizer
from horst.recovery.data import is_encoder_decoder

if TYPE_CHECKING:
    from torch import Tensor

TokenizerName = Literal["auto", "gpt2", "bytes"]
HUB = "hub:"
WIKITEXT = "wikitext"
_TEXTS = f"Text is a .txt, .jsonl, .parquet or .bin file, a folder of horst data, {WIKITEXT}, or {HUB}owner/name."
_LONGEST = 2048  # where a model could take more, or does not say
SAMPLES, CPU_SAMPLES, CPU_CONTEXT = 128, 64, 512  # windows to calibrate on; on a CPU, and their tokens
_BATCH = 8  # sequences that go through a block at once when calibrating


class ModelTokenizer:
    """The tokenizer that lies beside a model's weights, as :func:`horst.lab.data.tokenization.tokenize` wants it."""

    def __init__(self, path: Path) -> None:
        auto = load_extra("transformers").AutoTokenizer
        self.transformers = auto.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        self.name = str(path.name)
        self.vocabulary = len(self.transformers)
        ends = (getattr(self.transformers, f"{kind}_token_id", None) for kind in ("eos", "sep", "bos", "pad"))
        end = next((number for number in ends if number is not None), None)
        if end is None:
            raise ValueError(f"the tokenizer of {path} has no token for the end of a text.")
        self.end_of_text = int(end)

    def encode(self, text: str) -> list[int]:
        """The text's tokens."""
        tokens: list[int] = self.transformers(text, add_special_tokens=False, verbose=False)["input_ids"]
        return tokens


def tokenizer_for(loaded: LoadedModel, name: TokenizerName) -> Tokenizer:
    """The tokenizer named; ``auto`` is the model's own, or the one of ours that has its vocabulary."""
    if name != "auto":
        return load_tokenizer(name)
    if loaded.has_tokenizer:
        return ModelTokenizer(loaded.path)
    if GPT2Tokenizer.vocabulary <= loaded.vocabulary < GPT2Tokenizer.vocabulary + 128:  # rounded up, for speed
        return GPT2Tokenizer()
    if loaded.vocabulary in (ByteTokenizer.vocabulary - 1, ByteTokenizer.vocabulary):
        return ByteTokenizer()
    raise ValueError(
        f"{loaded.path} has no tokenizer files, and its {loaded.vocabulary} tokens are not GPT-2's or bytes. Save its "
        "tokenizer beside it, give token files (horst data), or choose --tokenizer."
    )


def source(data: str) -> Any:
    """What :class:`horst.lab.data.documents.Source` takes: a path, or with ``hub:`` in front a data set of the Hub.

    ``hub:owner/name`` and ``hub:owner/name/config``, either with ``:split`` behind it. Without the prefix nothing is
    ever fetched: a misspelt path is a misspelt path.
    """
    if not data.startswith(HUB):
        return Path(data)
    name, _, split = data.removeprefix(HUB).partition(":")
    owner, _, rest = name.partition("/")
    dataset, _, config = rest.partition("/")
    if not owner or not dataset:
        raise ValueError(f"a data set of the Hub is {HUB}owner/name, with /config and :split if wanted, got {data!r}.")
    return load_extra("datasets").load_dataset(f"{owner}/{dataset}", config or None, split=split or "train")


def check_reads_text_alone(loaded: LoadedModel) -> None:
    """Refuse a model whose decoder needs inputs of its own."""
    if is_encoder_decoder(loaded.model):
        raise ValueError(
            f"{loaded.path} holds a {type(loaded.model).__name__}, whose decoder needs inputs of its own, and --data "
            "is one text. Use horst prune --method magnitude; or in Python horst.pruning.prune with batches such as "
            '{"input_ids": ..., "decoder_input_ids": ...}, or SparsifyTrainer.'
        )


def check_text(data: str) -> None:
    """Refuse what is no text: a path that is not there, or images."""
    path = Path(data)
    if path.exists() or data.startswith(HUB) or data == WIKITEXT:
        return
    if data == DIGITS:
        raise ValueError(f"{DIGITS} are images, and this model reads text. {_TEXTS}")
    near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise FileNotFoundError(f"there is no file {data}.{near} {_TEXTS}")


@contextlib.contextmanager
def token_file(data: str, loaded: LoadedModel, tokenizer: TokenizerName, split: str) -> Iterator[Path]:
    """A token file of ``data``: it itself, ``split.bin`` of a folder of them, or one made for as long as this is open.

    Args:
        data: Text (.txt, .jsonl, .parquet), a token file (.bin), a folder of ``horst data``, ``wikitext``, or see
            :func:`source`.
        loaded: The model that reads it.
        tokenizer: Tokenizer for text.
        split: ``"train"`` or ``"val"``.
    """
    check_text(data)
    path = Path(data)
    if path.is_dir():
        path = path / f"{split}.bin"
        if not path.is_file():
            raise FileNotFoundError(f"{data} has no {split}.bin. Give a folder that horst data made, or a text file.")
    if path.suffix == ".bin":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        is_wikitext = data == WIKITEXT and not path.exists()
        opened = _wikitext(Path(folder), split) if is_wikitext else source(data)
        made = Path(folder) / "tokens"
        try:
            with quiet("horst.lab.data"):
                tokenize(opened, made, tokenizer=tokenizer_for(loaded, tokenizer), validation=0)
            yield made / "train.bin"
        except ValueError as error:  # whatever is wrong with the tokens is wrong with what they were made of
            told = str(error).replace(str(made / "train.bin"), data).replace(str(Path(folder) / "wikitext.txt"), data)
            raise ValueError(told) from error


def _wikitext(folder: Path, split: str) -> Path:
    """WikiText-2 as perplexities are usually given on it: all lines as one text, with empty lines between."""
    lines = source(f"{HUB}Salesforce/wikitext/wikitext-2-raw-v1:{'train' if split == 'train' else 'test'}")["text"]
    path = folder / "wikitext.txt"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


def choose_context(loaded: LoadedModel, asked: int | None) -> int:
    """Tokens in a window: what was asked for, if the model can take it."""
    longest = loaded.longest
    if asked is None:
        return min(longest or _LONGEST, _LONGEST)
    if asked < 1 or (longest is not None and asked > longest):
        raise ValueError(f"--context must lie between 1 and the model's {longest or 'limit'}, got {asked}.")
    return asked


def choose_calibration(loaded: LoadedModel, samples: int | None, context: int | None, cpu: bool) -> tuple[int, int]:
    """Windows and tokens per window to calibrate on; what was not given is less on a CPU, where a token costs more."""
    length = choose_context(loaded, context)
    if context is None and cpu:
        length = min(length, CPU_CONTEXT)
    return samples or (CPU_SAMPLES if cpu else SAMPLES), length


def calibration_windows(path: Path, loaded: LoadedModel, *, context: int, samples: int, seed: int) -> list[Tensor]:
    """Batches of ``samples`` windows drawn from a token file without replacement, by ``seed``."""
    import torch

    from horst.lab.data.token_batches import TokenBatches

    windows = TokenBatches(path, batch_size=1, context=context, seed=seed, vocabulary=loaded.vocabulary)
    drawn = [tokens for tokens, _ in itertools.islice(windows.batches(), samples)]
    return list(torch.cat(drawn).split(_BATCH))
