"""What commands print: rich tables on a terminal, plain aligned columns elsewhere."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horst.extras import load_extra


def nearest(word: str, words: Iterable[str]) -> str:
    """A suggestion for a misspelt word, or nothing.

    Example:
        >>> nearest("tabel6", ["table6", "table1"])
        ' Did you mean table6?'
    """
    found = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def number(value: Any) -> str:
    """A cell's text: four significant digits for floats."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def table(rows: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Rows with equal keys as a table: with rules and colour on a terminal, else plain columns.

    Example:
        >>> print(table([{"method": "wanda", "perplexity": 30.12345}]))
        method  perplexity
        wanda        30.12
    """
    columns = list(rows[0]) if rows else []
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
    rich_table, console = load_extra("rich.table"), load_extra("rich.console")
    drawn = rich_table.Table(title=title or None, title_justify="left", header_style="bold")
    for name, to_right in zip(columns, right, strict=True):
        drawn.add_column(name, justify="right" if to_right else "left")
    for line in cells:
        drawn.add_row(*line)
    out = io.StringIO()
    console.Console(file=out, force_terminal=True).print(drawn)
    return out.getvalue().rstrip("\n")
