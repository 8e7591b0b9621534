"""What commands print: tables that fit the terminal, plain aligned columns elsewhere, or JSON."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import io
import itertools
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from horst.extras import load_extra

_GAP = 2  # between the columns of a table in a terminal
ALL_ZEROS = "zeros of all weights"  # the title of their share
_TEXT = 24  # characters that a column of longer texts gets at least


class Share(float):
    """A part of a whole, which tables show in per cent."""


def nearest(word: str, words: Iterable[str]) -> str:
    """A suggestion for a misspelt word, or nothing.

    Example:
        >>> nearest("tabel6", ["table6", "table1"])
        ' Did you mean table6?'
    """
    found = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def write(text: str, stream: TextIO | None = None) -> None:
    """A line to stdout or to ``stream``; what its encoding cannot express (a name that is no UTF-8) is escaped.

    A stderr that is gone is no error. It carries remarks, and a run whose terminal was closed has a checkpoint to save.
    """
    stream = sys.stdout if stream is None else stream
    encoding = stream.encoding or "utf-8"
    with contextlib.suppress(OSError) if stream is sys.stderr else contextlib.nullcontext():
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def write_json(value: Any) -> None:
    """A value as JSON: paths as text, no NaN."""
    from horst.lab.experiments.result import to_json

    write(json.dumps(to_json(value), indent=1, allow_nan=False))


def show(rows: Sequence[Mapping[str, Any]], title: str = "", *, as_json: bool, more: str = "") -> None:
    """Rows as JSON, or as a table with lines of text below it."""
    if as_json:
        write_json(rows)
    else:
        write("\n".join([table(rows, title), more] if more else [table(rows, title)]))


def number(value: Any) -> str:
    """A cell's text: four significant digits for floats, per cent for shares.

    Example:
        >>> number(30.12345), number(Share(0.6067))
        ('30.12', '60.7%')
    """
    if isinstance(value, Share):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Rows as a table, a column for each key of any: fitted to a terminal, in colour, else plain columns.

    Example:
        >>> print(table([{"method": "wanda", "perplexity": 30.12345}]))
        method  perplexity
        wanda        30.12
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[number(row.get(c)) for c in columns] for row in rows]
    right = [all(isinstance(row.get(c), (int, float, type(None))) for row in rows) for c in columns]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        return _rich_table(columns, cells, right, title)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)] if columns else []
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in [columns, *cells]
    ]
    return "\n".join([title] * bool(title) + lines)


def _rich_table(columns: list[str], cells: list[list[str]], right: list[bool], title: str) -> str:
    """A table no wider than the terminal, with no number cut.

    Where it would be wider, what all rows share goes into a line above, then headings break, and what is still too much
    goes into further tables below, which begin with the same columns.
    """
    out = io.StringIO()
    console = load_extra("rich.console").Console(file=out, force_terminal=True)
    heads = [column.replace("_", " ") for column in columns]
    # Numbers keep to one line; longer texts break.
    least = [max((len(line[i]) for line in cells), default=0) for i in range(len(columns))]
    least = [length if to_right else min(length, _TEXT) for length, to_right in zip(least, right, strict=True)]

    def fits(chosen: Sequence[int]) -> bool:
        widths = [max(least[i], *map(len, heads[i].split("\n"))) for i in chosen]
        return sum(widths) + _GAP * (len(widths) - 1) <= console.width

    shown, shared = list(range(len(columns))), []
    if not fits(shown) and (varied := [i for i in shown if len({line[i] for line in cells}) > 1]):
        shown, shared = varied, [i for i in shown if i not in varied]
    if not fits(shown):
        heads = [textwrap.fill(h, max([1, w, *map(len, h.split())])) for h, w in zip(heads, least, strict=True)]
    names = list(itertools.takewhile(lambda i: not right[i], shown))
    blocks = [shown[: len(names) + 1]]
    for i in shown[len(names) + 1 :]:
        if fits([*blocks[-1], i]):
            blocks[-1].append(i)
        else:
            blocks.append([*(names or shown[:1]), i])

    if title:
        console.print(f"\n{title}", style="italic", highlight=False, markup=False)
    if shared:
        same = ", ".join(f"{columns[i].replace('_', ' ')} {cells[0][i] or 'none'}" for i in shared)
        console.print(f"In all rows: {same}.", style="dim", highlight=False, markup=False)
    for block in blocks:
        lines = [[line[i] for i in block] for line in cells]
        console.print(_drawn([heads[i] for i in block], [right[i] for i in block], lines))
        console.print()
    return out.getvalue().rstrip("\n")


def _drawn(heads: list[str], right: list[bool], cells: list[list[str]]) -> Any:
    text = load_extra("rich.text").Text
    drawn = load_extra("rich.table").Table(
        box=load_extra("rich.box").SIMPLE_HEAD, header_style="bold", show_edge=False, pad_edge=False,
        padding=(0, _GAP - 1, 0, 0),
    )  # fmt: skip
    for head, to_right in zip(heads, right, strict=True):
        drawn.add_column(text(head), justify="right" if to_right else "left", no_wrap=to_right, overflow="fold")
    for line in cells:
        drawn.add_row(*map(text, line))  # brackets in a name are no markup
    return drawn
