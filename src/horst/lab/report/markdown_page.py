"""A report as Markdown, with its figures as files beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape

from horst.lab.report.document import Section
from horst.lab.report.html_page import LEDE, READING, TITLE
from horst.lab.report.tables import Table


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
        if section.missing:
            parts.append(f"**{_plain(section.missing)}**")
        parts += [_plain(paragraph) for paragraph in section.content.summary]
        shown = [
            f"![{_plain(figure.alt)}]({figures}/{section.file_name(figure)}.{ending})\n\n{_plain(figure.caption)}"
            for figure in (section.content.figures if ending is not None else ())
        ]
        parts += shown[:1]
        for table in section.content.tables:
            parts += [_plain(table.caption), _table(table)]
        parts += shown[1:]
        if section.notes:
            parts += [f"### {READING}", "\n".join(f"- {_plain(note)}" for note in section.notes)]
        parts += map(_plain, section.origins)
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    return dataclasses.replace(table, columns=[_plain(c) for c in table.columns], rows=rows).markdown()


def _plain(text: str) -> str:
    """One line without HTML: a Markdown viewer would take it for its own."""
    return escape(" ".join(text.split()), quote=False).replace("[", "\\[")
