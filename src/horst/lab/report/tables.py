"""A table of texts, and the short texts that go into its cells."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts. It does not know whether it becomes HTML, Markdown or lines of a terminal.

    Args:
        columns: Column titles.
        rows: One text per column.
        caption: What the table shows.
        paper: Indices of the rows that hold the paper's numbers. They are set in italics.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    paper: Collection[int] = ()

    def markdown(self) -> str:
        """The table in Markdown; a cell is one line whatever it holds.

        Example:
            >>> print(Table(columns=["", "x^2"], rows=[["3", "9"], ["paper", "9.1"]], paper=[1]).markdown())
            |  | x^2 |
            |---|---|
            | 3 | 9 |
            | *paper* | *9.1* |
        """
        rows = [
            [f"*{cell}*" if cell and i in self.paper else cell for cell in map(_one_line, row)]
            for i, row in enumerate(self.rows)
        ]
        written = ["| " + " | ".join(row) + " |" for row in [[_one_line(c) for c in self.columns], *rows]]
        return "\n".join([written[0], "|" + "---|" * len(self.columns), *written[1:]])

    def records(self) -> list[dict[str, str]]:
        """One dictionary per row, as the command line prints them."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def captioned(self, caption: str) -> Table:
        """The same table with another caption."""
        return dataclasses.replace(self, caption=caption)

    def column(self, title: str) -> list[str]:
        """The cells below a title."""
        place = list(self.columns).index(title)
        return [row[place] for row in self.rows]


def from_rows(rows: Iterable[Row], *columns: tuple[str, str | Callable[[Row], str]]) -> Table:
    """One line per row of a result.

    Args:
        rows: Rows of a result.
        columns: Title and cells of each column: a format string with the names of a row, or a function of the row.

    Example:
        >>> rows = [{"name": "a", "seconds": 1.52, "loss": None}]
        >>> from_rows(rows, ("model", "{name}"), ("time", "{seconds:.1f} s"), ("loss", "{loss:.2f}")).rows
        [['a', '1.5 s', 'n/a']]
    """
    lines = [
        [_CELLS.vformat(cell, (), row) if isinstance(cell, str) else cell(row) for _, cell in columns] for row in rows
    ]
    return Table(columns=[title for title, _ in columns], rows=lines)


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return number(value, format_spec)


_CELLS = _Cells()


def _one_line(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")


def number(value: float | str | None, spec: str, none: str = "n/a") -> str:
    """A number as a table shows it; a result file holds infinity as a string.

    Example:
        >>> number(1.234, ".1f"), number(None, ".1f")
        ('1.2', 'n/a')
    """
    if value is None:
        return none
    return value if isinstance(value, str) else format(value, spec)


def level_name(sparsity: float) -> str:
    """A sparsity as a column title.

    Example:
        >>> level_name(0.0), level_name(0.5)
        ('dense', '50%')
    """
    return f"{sparsity:.0%}" if sparsity else "dense"


def short_commit(commit: str) -> str:
    """The first twelve digits of a commit, and whether code was changed after it.

    Example:
        >>> short_commit("0123456789abcdef-dirty"), short_commit("unknown")
        ('0123456789ab-dirty', 'unknown')
    """
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def origin(path: str, result: Result) -> str:
    """Where a table's numbers come from, in one line."""
    where = result.environment
    commit = short_commit(where["commit"])
    return f"`{path}`: {result.seconds:.0f} s on {where['device']}, torch {where['torch']}, commit {commit}."
