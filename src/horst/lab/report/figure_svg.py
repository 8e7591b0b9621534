"""matplotlib figures as SVG inside a page: no fonts and no files needed, readable on light and on dark ground.

On a light page a figure has its own colours. On a dark one greys are inverted, and colours that would be too dim there
are made paler: the page's stylesheet gets one variable for each colour that changes.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from xml.etree import ElementTree

from horst.extras import load_extra

DARK_GROUND, DARK_INK = "#15171c", "#e4e6eb"
# Stands for the page's text colour while a figure is drawn: text, axes and ticks, but not what chose black itself.
_INK = "#010203"
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_REFERENCE = re.compile(r"(?<=url\(#)[^)]+(?=\))")
_CONTRAST = 4.0  # WCAG asks for 3 between a line and its ground


@contextlib.contextmanager
def themed() -> Iterator[None]:
    """While figures are made for :func:`inline`: what has no colour of its own takes that of the page's text."""
    keys = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings = dict.fromkeys(keys, _INK)
    with load_extra("matplotlib").rc_context({**settings, "svg.fonttype": "path", "svg.hashsalt": "horst"}):
        yield


def inline(draw: Callable[[], Any], *, name: str, alt: str) -> tuple[str, set[str]]:
    """An ``<svg>`` element for an HTML page, and the colours in it for :func:`dark_variables`.

    Args:
        draw: Function that returns a matplotlib figure.
        name: Prefix of the ids in it, which must be unique in a page.
        alt: Description for readers who do not see it.
    """
    with themed():
        figure = draw()
        # An image has text in its cells, whose colours belong to theirs: these stay, and so does the ground beneath.
        fixed = any(axes.images for axes in figure.axes)
        for axes in figure.axes:
            if not axes.images:
                axes.patch.set_facecolor("none")
        out = io.BytesIO()
        figure.savefig(out, format="svg", facecolor="none", metadata={"Date": None})
    root = ElementTree.fromstring(out.getvalue())
    colours: set[str] = set()

    def recolour(match: re.Match[str]) -> str:
        if match[0] == _INK:
            return "currentColor"
        if fixed:
            return match[0]
        colours.add(match[0])
        return f"var({_variable(match[0])}, {match[0]})"

    for element in root.iter():
        for child in [child for child in element if child.tag in (f"{_SVG}style", f"{_SVG}metadata")]:
            element.remove(child)  # a style would hold for the whole page
        element.tag = element.tag.removeprefix(_SVG)  # a page needs no namespaces
        if _LINK in element.attrib:
            target = element.attrib.pop(_LINK)
            element.set("href", f"#{name}-{target[1:]}" if target.startswith("#") else target)
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key in ("style", "fill", "stroke", "clip-path"):
                value = _REFERENCE.sub(lambda match: f"{name}-{match[0]}", value)
                element.set(key, _COLOUR.sub(recolour, value))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    width = float(root.attrib["viewBox"].split()[2]) * 96 / 72  # points to pixels
    root.attrib |= {
        "role": "img",
        "aria-label": alt,
        "style": f"max-width: {width:.0f}px; min-width: min({width:.0f}px, {_least_width(width)}rem)",
    }
    return ElementTree.tostring(root, encoding="unicode"), colours


def dark_variables(colours: Iterable[str]) -> str:
    """Declarations for a dark page: what the colours of its figures become there."""
    pairs = [(colour, on_dark(colour)) for colour in sorted(set(colours))]
    return " ".join(f"{_variable(colour)}: {dark};" for colour, dark in pairs if colour != dark)


def on_dark(colour: str) -> str:
    """What does on dark ground what ``colour`` does on white: greys are inverted, the rest paled as far as needed.

    Example:
        >>> on_dark("#ffffff") == DARK_GROUND, on_dark("#000000") == DARK_INK, on_dark("#e69f00")
        (True, True, '#e69f00')
    """
    red, green, blue = _channels(colour)
    if max(red, green, blue) - min(red, green, blue) < 0.04:
        ends = zip(_channels(DARK_INK), _channels(DARK_GROUND), strict=True)
        return _hex(*(ink + red * (ground - ink) for ink, ground in ends))
    while contrast(colour, DARK_GROUND) < _CONTRAST:  # white, which ends it, has a contrast of 18
        red, green, blue = (channel + 0.04 * (1 - channel) for channel in (red, green, blue))
        colour = _hex(red, green, blue)
    return colour


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio, from 1 to 21.

    Example:
        >>> contrast("#000000", "#ffffff")
        21.0
    """
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _least_width(pixels: float) -> int:
    """Below it, in rem, a figure scrolls in its box instead of shrinking: a wide one has several panels."""
    return 20 if pixels < 700 else 40 if pixels < 1100 else 56


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def _hex(red: float, green: float, blue: float) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in (red, green, blue))


def _variable(colour: str) -> str:
    return f"--on-dark-{colour[1:]}"
