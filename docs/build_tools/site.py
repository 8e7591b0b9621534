"""What the site's build does to pages and docstrings, which are written for GitHub and for ``help()``."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside of the documentation become their text: the site does not hold those files."""
    outside = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({re.escape(outside)}[^)]*\)", r"\1", markdown)


class Docstrings(griffe.Extension):
    """Our docstrings (reStructuredText inside Google sections) as Markdown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Roles become code, formulas become blocks, and the example section gets the plural that griffe knows.

    Example:
        >>> to_markdown(":class:`~horst.HORST` of :math:`x`")
        '`horst.HORST` of `x`'
    """
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return re.sub(r"^( *)\.\. math::(.*(?:\n(?:\1 +.*|$))*)", _formula, text, flags=re.MULTILINE)


def _formula(match: re.Match[str]) -> str:
    indent, body = match[1], textwrap.dedent(match[2].lstrip(" ")).strip("\n")
    block = "\n".join(["```tex", body, "```"])
    return textwrap.indent(block, indent) + "\n"
