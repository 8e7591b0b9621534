"""Parts of a report, whatever format it is written in: sections with tables and figures."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from horst.lab.experiments.result import Result
from horst.lab.report.tables import Table, origin


@contextlib.contextmanager
def blamed(paths: Sequence[pathlib.Path], experiment: str) -> Iterator[None]:
    """Turn an error about the content of a file into one that names the file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{', '.join(map(str, paths))} cannot be shown as {experiment!r}: {reason}. It was written by another "
            "version, or by hand; run the experiment again."
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that is drawn when it is needed.

    Args:
        name: Name that is unique within its section and fit for a file name.
        draw: Function that returns a matplotlib figure.
        caption: What the figure shows, and how to read it.
        alt: Description for readers who do not see it.
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
        tables: Tables in order.
        figures: Figures in order.
    """

    summary: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The results of one experiment in one setting.

    Args:
        title: Title that is unique in the report.
        anchor: The title as a fragment of an address, and the beginning of its figures' file names.
        group: Heading in the table of contents.
        content: Tables and figures.
        results: Result files that they come from.
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

    @property
    def missing(self) -> str:
        """What to say of results that were interrupted; nothing of whole ones."""
        for _, result in self.results:
            runs = result.curves.get("runs")
            if isinstance(runs, Mapping) and runs.get("done") != runs.get("planned"):
                done, planned = runs.get("done"), runs.get("planned")
                return f"This result is partial: {done} of {planned} runs were done when it was interrupted."
        return ""

    @property
    def origins(self) -> list[str]:
        """Where the numbers of each file come from: time, machine, versions."""
        lines = []
        for path, result in self.results:
            others = [f"{k} {v}" for k, v in result.environment.items() if k not in ("device", "torch", "commit")]
            lines.append(f"{origin(path.name, result)} {', '.join(others)}".rstrip())
        return lines

    def blamed(self) -> contextlib.AbstractContextManager[None]:
        """Context in which errors name the files of this section."""
        return blamed([path for path, _ in self.results], self.results[0][1].experiment)

    def file_name(self, figure: Figure) -> str:
        """The figure's name among all of the report, without an ending."""
        return f"{self.anchor}-{figure.name}" if figure.name else self.anchor
