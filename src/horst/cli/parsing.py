"""Words to options: tyro reads the fields of a dataclass, and what it refuses becomes one line."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from horst.extras import load_extra

_LONGEST = 3600  # seconds
_MISSING = re.compile(r"(?:Required options )?Missing from horst \w+: PATH The (\w+): (.*) \(required\)")
# What tyro says of a word that is no number, as Python's own conversion or as a list of types.
_NO_NUMBER = re.compile(
    r"Error parsing (--[\w-]+): (?:could not convert string to (float): |invalid literal for (int)\(\) with base 10: |"
    r"no type matching (?:\{None\}\|)?(FLOAT|INT) could be instantiated from \[)'(.*)'\]?\.?"
)


def read_pattern(pattern: str | None) -> str | tuple[int, int] | None:
    """What ``--pattern`` says: N:M as it is, blocks as two numbers.

    Example:
        >>> read_pattern("2:4"), read_pattern("4x1"), read_pattern(None)
        ('2:4', (4, 1), None)
    """
    blocks = re.fullmatch(r"(\d+)x(\d+)", pattern or "")
    if pattern is not None and not blocks and not re.fullmatch(r"\d+:\d+", pattern):
        raise ValueError(
            f"--pattern must be N:M such as 2:4, or a block of rows x columns such as 4x4, got {pattern!r}. Leave it "
            "out for single weights."
        )
    return (int(blocks[1]), int(blocks[2])) if blocks else pattern


def parse(options: Any, arguments: Sequence[str], *, prog: str, description: str | None = None) -> Any:
    """The options from the words after a command's name. Fields without a default are positional.

    Args:
        options: A dataclass, a union of them (subcommands) or a function; help texts are its docstrings.
        arguments: The words.
        prog: The words before them.
        description: The first line of the help.

    Raises:
        ValueError: The words do not fit; the message is one line.
        SystemExit: Help was asked for, and printed.
    """
    tyro = load_extra("tyro")
    # tyro frames its complaints in boxes of many lines.
    with contextlib.redirect_stderr(io.StringIO()) as complaint:
        try:
            return tyro.cli(options, args=list(arguments), prog=prog, description=description, config=config())
        except SystemExit as stop:
            if not stop.code:
                raise
    said = _one_line(complaint.getvalue())
    if "--learning-rate" in said and "lr" in getattr(options, "__dataclass_fields__", ()):
        said += " Did you mean --lr?"  # too far apart for tyro
    raise ValueError(f"{said} See {prog} --help.")


def check_seconds(seconds: float) -> None:
    """Refuse a duration that never ends, or never begins."""
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"--seconds must be above 0 and at most {_LONGEST}, got {seconds}.")


def config() -> tuple[Any, ...]:
    """The settings of tyro, the same for every command."""
    conf = load_extra("tyro").conf
    return conf.OmitArgPrefixes, conf.FlagCreatePairsOff, conf.PositionalRequiredArgs


def _one_line(box: str) -> str:
    """The text of tyro's box, without its frame, its copy of the help text, and its pointer to the help."""
    said: list[str] = []
    before, _, after = box.partition("Perhaps you meant")
    for line in before.splitlines():
        text = line.strip("│ ")
        if text.startswith(("For full helptext", "Argument helptext", "Got errors")):
            break
        if text and text[0] not in "╭╰─├" and text.strip("-"):  # dashes where the terminal has no frames
            said.append(text)
    sentence = " ".join(said).removeprefix("Value error ").removeprefix("Error parsing config: ")
    sentence = _in_plain_words(sentence) or "the arguments are not understood."
    sentence = sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."
    options = [text.split()[0] for line in after.splitlines() if (text := line.strip("│ ")).startswith("--")]
    if options:  # tyro's first is not always the nearest: --step is --steps before --max-step
        given = next((word.rstrip(",.") for word in sentence.split() if word.startswith("-")), sentence)
        sentence += f" Did you mean {max(options, key=lambda o: SequenceMatcher(None, given, o).ratio())}?"
    return sentence


def _in_plain_words(sentence: str) -> str:
    """A complaint about a number or about what is missing, without the names of types.

    Example:
        >>> _in_plain_words("Error parsing --sparsity: could not convert string to float: '70%'")
        "--sparsity must be a number in [0, 1), got '70%'. Write 0.7."
    """
    if missing := _MISSING.fullmatch(sentence):
        return f"the {missing[1]} is missing: {missing[2]}"
    found = _NO_NUMBER.fullmatch(sentence)
    if found is None:
        return sentence
    option, word = found[1], found[5]
    kind = "a number" if "FLOAT" in (found[2] or "").upper() + (found[4] or "") else "a whole number"
    kind = "a number in [0, 1)" if option == "--sparsity" else kind
    share = re.fullmatch(r"(\d+(?:\.\d+)?) *%", word)
    hint = f" Write {float(share[1]) / 100:g}." if share else ""
    return f"{option} must be {kind}, got {word!r}.{hint}"
