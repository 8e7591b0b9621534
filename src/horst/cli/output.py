"""What commands print: rich tables on a terminal, plain aligned columns elsewhere, or JSON."""

from __future__ import annotations

import difflib
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from horst.extras import load_extra


def nearest(word: str, words: Iterable[str]) -> str:
    """A suggestion for a misspelt word, or nothing.

    Example:
        >>> nearest("tabel6", ["table6", "table1"])
        ' Did you mean table6?'
    """
    found = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def write(text: str, stream: TextIO | None = None) -> None:
    """A line to stdout or to ``stream``; what its encoding cannot express (a name that is no UTF-8) is escaped."""
    stream = sys.stdout if stream is None else stream
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def write_json(value: Any) -> None:
    """A value as JSON: paths as text, no NaN."""
    from horst.experiments.result import plain

    write(json.dumps(plain(value), indent=1, allow_nan=False))


def number(value: Any) -> str:
    """A cell's text: four significant digits for floats."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Rows as a table, a column for each key of any: with rules and colour on a terminal, else plain columns.

    Example:
        >>> print(table([{"method": "wanda", "perplexity": 30.12345}]))
        method  perplexity
        wanda        30.12
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[number(row.get(c)) for c in columns] for row in rows]
    right = [all(isinstance(row.get(c), (int, float, type(None))) for row in rows) for c in columns]
    if sys.stdout.isatty():
        return _rich_table(columns, cells, right, title)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)] if columns else []
    lines = [
        "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
        for line in [columns, *cells]
    ]
    return "\n".join([title] * bool(title) + lines)


def _rich_table(columns: list[str], cells: list[list[str]], right: list[bool], title: str) -> str:
    rich_table, console, text = load_extra("rich.table"), load_extra("rich.console"), load_extra("rich.text")
    drawn = rich_table.Table(title=title or None, title_justify="left", header_style="bold")
    for name, to_right in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if to_right else "left")
    for line in cells:
        drawn.add_row(*map(text.Text, line))  # brackets in a name are no markup
    out = io.StringIO()
    console.Console(file=out, force_terminal=True).print(drawn)
    return out.getvalue().rstrip("\n")
