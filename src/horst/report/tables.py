"""Markdown tables between markers: a page says where a table goes, a function writes it from a result file.

A block looks like this, and everything between its two lines is rewritten:

    <!-- table:NAME -->
    <!-- /table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from horst.experiments.result import Result

_BLOCK = re.compile(r"<!-- table:(?P<name>\w+) -->.*?<!-- /table -->", flags=re.DOTALL)


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table.

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def number(value: float | str | None, spec: str, none: str = "n/a") -> str:
    """A number as a table shows it; a result file holds infinity as a string.

    Example:
        >>> number(1.234, ".1f"), number(None, ".1f")
        ('1.2', 'n/a')
    """
    if value is None:
        return none
    return value if isinstance(value, str) else format(value, spec)


def origin(path: str, result: Result) -> str:
    """Where a table's numbers come from, in one line."""
    where = result.environment
    commit = where["commit"][:12]
    return f"`{path}`: {result.seconds:.0f} s on {where['device']}, torch {where['torch']}, commit {commit}."


def rewrite_blocks(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with the content of every block written anew.

    Example:
        >>> rewrite_blocks("<!-- table:x -->old<!-- /table -->", {"x": lambda: "new"})
        '<!-- table:x -->\\nnew\\n<!-- /table -->'
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise ValueError(f"the page asks for the table {name!r}. Known tables: {sorted(tables)}.")
        return f"<!-- table:{name} -->\n{tables[name]()}\n<!-- /table -->"

    return _BLOCK.sub(replace, page)
