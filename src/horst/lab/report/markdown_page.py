"""A report as Markdown, with its figures as files beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from horst.lab.report.document import Section
from horst.lab.report.html_page import ENVIRONMENT, LEDE, READING, TITLE, environment_table, partial_note
from horst.lab.report.tables import Table, origin


def page(sections: Sequence[Section], figures: str, ending: str | None) -> str:
    """The whole page.

    Args:
        sections: Sections of the report.
        figures: Folder of the figures, relative to the page.
        ending: File type of the figures; None leaves them out.
    """
    parts = [f"# {TITLE}", LEDE]
    for section in sections:
        parts.append(f"## {_plain(section.title)}")
        if section.setting:
            parts.append(f"Setting: {_plain(section.setting)}.")
        if note := partial_note(section):
            parts.append(f"**{_plain(note)}**")
        parts += [_plain(paragraph) for paragraph in section.content.summary]
        for table in section.content.tables:
            parts += [_plain(table.caption), _table(table)]
        if ending is not None:
            parts += [
                f"![{_plain(figure.alt)}]({figures}/{section.file_name(figure)}.{ending})\n\n{_plain(figure.caption)}"
                for figure in section.content.figures
            ]
        if section.notes:
            parts += [f"### {READING}", "\n".join(f"- {_plain(note)}" for note in section.notes)]
        parts += [_plain(origin(path.name, result)) for path, result in section.results]
    table = environment_table(sections)
    parts += [f"## {ENVIRONMENT}", _plain(table.caption), _table(table)]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    return dataclasses.replace(table, columns=[_plain(c) for c in table.columns], rows=rows).markdown()


def _plain(text: str) -> str:
    """One line without HTML: a Markdown viewer would take it for its own."""
    return escape(" ".join(text.split()), quote=False).replace("[", "\\[")
