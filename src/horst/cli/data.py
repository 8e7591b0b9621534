"""``horst data tokenize SOURCES --out FOLDER`` and ``horst data slimpajama --out FOLDER``: text to token files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from horst.cli.destination import check_free, replaced
from horst.cli.output import show
from horst.cli.progress import spinner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """Options of both commands."""

    tokenizer: Literal["gpt2", "bytes"] = "gpt2"
    """GPT-2's byte-pair encoding, or one token per byte."""
    workers: int = 1
    """Processes that encode."""
    overwrite: bool = False
    """Replace an existing folder, if horst made it."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenize(Encoding):
    """Text files, or data sets of the Hub, to train.bin, val.bin and meta.json."""

    sources: tuple[str, ...]
    """Files that end in .jsonl or .txt (either also with .gz or .xz) or .parquet; folders that save_to_disk of
    datasets wrote; or hub:owner/name, with /config and :split behind it if wanted."""
    out: Path = Path("data/text")
    """Folder to make."""
    validation: int | float = 0.005
    """Documents to hold out: a share of them, or a whole number; 0 for none."""
    text_field: str = "text"
    """Name of the field with the text."""
    separator: str | None = None
    """Separator of the documents in a .txt file; by default a file is one document."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slimpajama(Encoding):
    """SlimPajama-6B from the Hub, cut and shuffled as the paper's base code does."""

    out: Path = Path("data/slimpajama")
    """Folder to make."""


Options = Tokenize | Slimpajama


def main(options: Options) -> None:
    """Encode, and say what is in the folder."""
    from horst.cli.texts import source
    from horst.lab.data.documents import Fields
    from horst.lab.data.token_files import open_tokens
    from horst.lab.data.tokenization import tokenize, tokenize_slimpajama

    check_free(options.out, options.overwrite, "directory", getattr(options, "sources", ()))
    with spinner("tokenizing"), replaced(options.out, options.overwrite) as folder:
        if isinstance(options, Slimpajama):
            tokenize_slimpajama(folder, tokenizer=options.tokenizer, workers=options.workers)
        else:
            tokenize(
                [source(given) for given in options.sources],
                folder,
                tokenizer=options.tokenizer,
                validation=options.validation,
                fields=Fields(text=options.text_field, separator=options.separator),
                workers=options.workers,
            )
    files = [open_tokens(path) for path in sorted(options.out.glob("*.bin"))]
    rows = [
        {"file": str(options.out / file.path.name), "tokens": len(file.tokens), "documents": file.documents}
        for file in files
    ]
    show(rows, as_json=options.json)
