"""What a report is made of, whatever it is written as: sections with tables and figures."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import parse


@contextlib.contextmanager
def blamed(paths: Sequence[pathlib.Path], experiment: str) -> Iterator[None]:
    """Turns an error over what a file holds, or lacks, into one that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{', '.join(map(str, paths))} cannot be shown as {experiment!r}: {reason}. It was written by another "
            "version, or by hand; run the experiment again."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts.

    Args:
        caption: What it shows.
        columns: The head.
        lines: The body. A line whose first cell stands between asterisks is the paper's.
    """

    caption: str
    columns: list[str]
    lines: list[list[str]]

    @classmethod
    def of(cls, caption: str, markdown: str) -> Table:
        """From what the functions that write Markdown tables return.

        Example:
            >>> Table.of("Squares", "| x | x^2 |\\n|---|---|\\n| 3 | 9 |").lines
            [['3', '9']]
        """
        columns, lines = parse(markdown)
        return cls(caption=caption, columns=columns, lines=lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that is drawn when it is needed.

    Args:
        name: Unique within its section, and fit for a file name.
        draw: Gives a matplotlib figure.
        caption: What it shows, and how to read it.
        alt: What a reader who does not see it would want to be told.
    """

    name: str
    draw: Callable[[], Any]
    caption: str
    alt: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """What one kind of result has to show.

    Args:
        summary: Paragraphs that open the section: what came out.
        tables: In order.
        figures: In order.
    """

    summary: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The results of one experiment in one setting.

    Args:
        title: Unique in the report.
        anchor: The same as a fragment of an address, and the beginning of its figures' file names.
        group: Of sections in the table of contents.
        content: Tables and figures.
        results: Where they come from, with their files.
    """

    title: str
    anchor: str
    group: str
    content: Content
    results: Sequence[tuple[pathlib.Path, Result]]

    @property
    def setting(self) -> str:
        """What was trained on what, where the config says so."""
        return str(self.results[0][1].config.get("setting", ""))

    @property
    def notes(self) -> list[str]:
        """How to read the numbers and where they differ from the paper's, each once."""
        return list(dict.fromkeys(note for _, result in self.results for note in result.notes))

    def blamed(self) -> contextlib.AbstractContextManager[None]:
        """Around work on this section: what goes wrong is said of its files."""
        return blamed([path for path, _ in self.results], self.results[0][1].experiment)

    def file_name(self, figure: Figure) -> str:
        """The figure's name among all of the report, without an ending."""
        return f"{self.anchor}-{figure.name}" if figure.name else self.anchor
