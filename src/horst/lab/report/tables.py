"""Markdown tables between markers: a page says where a table goes, a function writes it from a result file.

A block looks like this, and everything between its two lines is rewritten:

    <!-- table:NAME -->
    <!-- /table -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from horst.lab.experiments.result import Result

_BLOCK = re.compile(r"<!-- table:(?P<name>\w+) -->.*?<!-- /table -->", flags=re.DOTALL)
_BAR = re.compile(r"(?<!\\)\|")  # not one that is part of a cell


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    """A Markdown table; a cell is one line whatever it holds.

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in [columns, *lines]]
    written = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([written[0], "|" + "---|" * len(columns), *written[1:]])


def parse(table: str) -> tuple[list[str], list[list[str]]]:
    """The columns and lines that :func:`markdown` was given.

    Example:
        >>> parse(markdown(["a", "b"], [["1", "|x|"]]))
        (['a', 'b'], [['1', '|x|']])
    """
    rows = [[cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]] for line in table.splitlines()]
    return rows[0], rows[2:]


def number(value: float | str | None, spec: str, none: str = "n/a") -> str:
    """A number as a table shows it; a result file holds infinity as a string.

    Example:
        >>> number(1.234, ".1f"), number(None, ".1f")
        ('1.2', 'n/a')
    """
    if value is None:
        return none
    return value if isinstance(value, str) else format(value, spec)


def short_commit(commit: str) -> str:
    """A commit as a line shows it: twelve digits, and whether code was changed after it.

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


FOLDED = 2  # more files than this are shown when asked for


def origins(paths: Sequence[str], results: Sequence[Result]) -> str:
    """The same for a table of several files: a paragraph for each device and version of torch, a long list folded."""
    groups: dict[tuple[str, str], list[tuple[str, Result]]] = {}
    for path, result in zip(paths, results, strict=True):
        groups.setdefault((result.environment["device"], result.environment["torch"]), []).append((path, result))
    paragraphs = []
    for (device, torch), found in groups.items():
        if len(found) == 1:
            paragraphs.append(origin(*found[0]))
            continue
        commits = [short_commit(result.environment["commit"]) for _, result in found]
        alike = len(set(commits)) == 1
        cost = f"{sum(result.seconds for _, result in found):.0f} s on {device}, torch {torch}"
        if len(found) > FOLDED:
            names = [f"<code>{p}</code> ({commit})" for (p, _), commit in zip(found, commits, strict=True)]
            files = ",\n".join(names)
            paragraphs.append(f"<details><summary>{len(found)} result files: {cost}</summary>\n{files}\n</details>")
            continue
        files = ", ".join(f"`{p}`" if alike else f"`{p}` ({c})" for (p, _), c in zip(found, commits, strict=True))
        commit = f", commit {commits[0]}" if alike else "; in brackets the commit"
        paragraphs.append(f"{files}: {cost}{commit}.")
    return "\n\n".join(paragraphs)


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
