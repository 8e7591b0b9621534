"""Write the generated tables and figures of the README and the docs from the committed result files.

``python docs/build_tools/pages.py`` draws every figure, and rewrites the blocks between ``<!-- table:NAME -->`` and
``<!-- /table -->`` of every Markdown file that has one. ``--check`` writes nothing, names the pages that are out of
date and ends with 1 if there are any. What each name shows is listed in ``page_tables.py``.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from page_tables import FIGURES, TABLES, WITHOUT_FILES, Part

from horst.lab.experiments.result import Result
from horst.lab.report.figures import save_figure
from horst.lab.report.tables import Table, origin, short_commit

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDED = 2  # more files than this are shown when asked for
_BLOCK = re.compile(r"<!-- table:(?P<name>\w+) -->.*?<!-- /table -->", flags=re.DOTALL)


def pages(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The README and the Markdown files of the docs that ask for a table."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in found if path.is_file() and _BLOCK.search(path.read_text(encoding="utf-8"))]


def rewrite(page: str, blocks: Mapping[str, str] | None = None, root: pathlib.Path = ROOT) -> str:
    """The page with every block written anew.

    Example:
        >>> rewrite("<!-- table:x -->old<!-- /table -->", {"x": "new"})
        '<!-- table:x -->\\nnew\\n<!-- /table -->'
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        known = TABLES if blocks is None else blocks
        if name not in known:
            raise ValueError(f"the page asks for the table {name!r}. Known tables: {sorted(known)}.")
        return f"<!-- table:{name} -->\n{block(name, root) if blocks is None else blocks[name]}\n<!-- /table -->"

    return _BLOCK.sub(replace, page)


@functools.cache
def block(name: str, root: pathlib.Path = ROOT) -> str:
    """A table, or several, and below where the numbers come from, unless the page links to a study that says it."""
    patterns, write = TABLES[name]
    paths = expand(patterns, root)
    results = [load(root / path) for path in paths]
    written = write(results)
    parts: Sequence[Part] = [written] if isinstance(written, (Table, str)) else written
    texts = [part.markdown() if isinstance(part, Table) else part for part in parts]
    sources = [] if name in WITHOUT_FILES else [origins(paths, results)]
    return "\n\n".join(text for text in (*texts, *sources) if text)


def expand(patterns: Sequence[str], root: pathlib.Path = ROOT) -> list[str]:
    """The files that names and patterns stand for, each once.

    Raises:
        FileNotFoundError: There is no file of a name that is no pattern.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        if "*" in pattern:
            found |= dict.fromkeys(path.relative_to(root).as_posix() for path in sorted(root.glob(pattern)))
        elif (root / pattern).is_file():
            found[pattern] = None
        else:
            raise FileNotFoundError(f"there is no result file {root / pattern}. Run its experiment first.")
    return list(found)


@functools.cache
def load(path: pathlib.Path) -> Result:
    return Result.load(path)


def origins(paths: Sequence[str], results: Sequence[Result]) -> str:
    """Where the numbers come from: a paragraph per device and version of torch, a long list folded."""
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
            listed = ",\n".join(names)
            paragraphs.append(f"<details><summary>{len(found)} result files: {cost}</summary>\n{listed}\n</details>")
            continue
        listed = ", ".join(f"`{p}`" if alike else f"`{p}` ({c})" for (p, _), c in zip(found, commits, strict=True))
        commit = f", commit {commits[0]}" if alike else "; in brackets the commit"
        paragraphs.append(f"{listed}: {cost}{commit}.")
    return "\n\n".join(paragraphs)


def draw(figure: str, path: pathlib.Path, root: pathlib.Path = ROOT) -> None:
    """Draw a figure of :data:`FIGURES` into a file."""
    patterns, write = FIGURES[figure]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(write([load(root / name) for name in expand(patterns, root)]), path)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write generated tables and figures into README and docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is out of date")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    old = []
    for path in pages(options.root):
        text = path.read_text(encoding="utf-8")
        new = rewrite(text, root=options.root)
        if new != text:
            old.append(path.relative_to(options.root))
            if not options.check:
                path.write_text(new, encoding="utf-8")
    for path in old:
        sys.stdout.write(f"{path} {'is out of date' if options.check else 'written'}\n")
    if not options.check:
        for figure in FIGURES:
            draw(figure, options.root / figure, options.root)
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
