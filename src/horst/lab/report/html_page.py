"""A report as one HTML page: no script, no network, light or dark as the reader's system is, from a phone up."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
from collections.abc import Sequence
from html import escape

from horst.lab.report.document import Figure, Section
from horst.lab.report.figures import save_figure
from horst.lab.report.tables import Table

TITLE = "horst: results"
LEDE = (
    "Transformers trained with HORST and with other optimizers, and their quality after pruning. "
    "Where the paper has a number, it stands beside ours, in italics; each section says what was trained on what, and "
    "how that differs from the paper."
)
READING = "How to read this"
_NUMBER = re.compile(r"[-+]?[\d.,]+([eE][-+]?\d+)?( ?%)?\*?( ± [\d.,]+%?)?( \(\d+% zeros\))?|inf")

STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c1e21; --muted: #595e66; --rule: #d8dbe0;
  --raised: #f5f6f8; --link: #0b57a4; --warn: #fff3d6; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171c; --ink: #e4e6eb; --muted: #a6abb4; --rule: #363a43;
  --raised: #1e2127; --link: #82b8ff; --warn: #3d3113; }
  img { filter: invert(.9) hue-rotate(180deg); } }  /* a figure has dark lines on no ground: light lines, same hues */
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
  -webkit-text-size-adjust: 100%; }
a { color: var(--link); }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; top: 1rem; background: var(--ground); }
header, nav, main, footer { padding: 0 clamp(1rem, 4vw, 2.5rem); max-width: 76rem; margin: 0 auto; }
header { padding-top: 2rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.5rem 0 .4rem; }
header p, section > p, section > ul, footer p { max-width: 46rem; }
nav { margin-top: 1.5rem; }
nav h2 { font-size: 1rem; margin: 0 0 .25rem; }
nav a { overflow-wrap: anywhere; }
nav > ul { list-style: none; margin: 0; padding: .9rem 1.1rem; background: var(--raised); border-radius: .5rem;
  columns: 17rem; column-gap: 2rem; }
nav > ul > li { margin-bottom: .6rem; }
nav ul ul { padding-left: 1.1rem; margin: .1rem 0 0; }
section { padding: 2rem 0 .5rem; margin-top: 2rem; border-top: 1px solid var(--rule); }
.setting, .origin, figcaption { color: var(--muted); font-size: .9rem; }
.partial { background: var(--warn); padding: .6rem .9rem; border-radius: .4rem; }
figure { margin: 1.25rem 0; min-width: 0; }
figure.table figcaption { margin-bottom: .4rem; }
figcaption { max-width: 46rem; }
.scroll { overflow-x: auto; overscroll-behavior-x: contain; }
.scroll:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  white-space: nowrap; }
th { font-weight: 600; }
tbody th { font-weight: 500; position: sticky; left: 0; background: var(--ground); }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; white-space: normal; min-width: 4.5rem;
  max-width: 12rem; }
td.text { white-space: normal; min-width: 7rem; overflow-wrap: anywhere; }
.number { text-align: right; }
.paper { color: var(--muted); font-style: italic; } .paper th { font-weight: 400; }
.change td, .change th { font-weight: 600; }
.figures { display: grid; gap: 0 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); }
img { display: block; max-width: 100%; height: auto; }
details { margin: .3rem 0; font-size: .9rem; } summary { cursor: pointer; color: var(--muted); }
pre { overflow: auto; max-height: 24rem; background: var(--raised); padding: .8rem; border-radius: .4rem;
  font-size: .8rem; }
code { overflow-wrap: anywhere; }
footer { padding-top: 1.5rem; padding-bottom: 3rem; color: var(--muted); font-size: .9rem; }
@media print { nav, details, .skip { display: none; } section { break-before: page; } }
"""


def page(sections: Sequence[Section]) -> str:
    """The whole page."""
    body = []
    for section in sections:
        with section.blamed():
            body.append(_section(section))
    files = sum(len(section.results) for section in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="referrer" content="no-referrer">
<title>{TITLE}</title>
<style>{STYLE}</style>
</head>
<body>
<a class="skip" href="#results">Skip to the results</a>
<header><h1>{TITLE}</h1>{f"<p>{escape(LEDE)}</p>" if len(sections) > 1 else ""}</header>
{_contents(sections) if len(sections) > 1 else ""}
<main id="results">
{"".join(body)}
</main>
<footer><p>Made from {files} result file{"s" * (files > 1)}; every number on this page comes from there. The paper:
Jacobs, Jain and Burkholz, <cite>HORST: Composing Optimizer Geometries for Sparse Transformer Training</cite>.</p>
</footer>
</body>
</html>
"""


def _contents(sections: Sequence[Section]) -> str:
    groups = []
    for group, members in itertools.groupby(sections, key=lambda section: section.group):
        items = [f'<li><a href="#{section.anchor}">{escape(section.title)}</a></li>' for section in members]
        groups.append(f"<li>{escape(group)}<ul>{''.join(items)}</ul></li>")
    return f'<nav aria-labelledby="contents"><h2 id="contents">Contents</h2><ul>{"".join(groups)}</ul></nav>'


def _section(section: Section) -> str:
    content = section.content
    parts = [f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">']
    parts.append(f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>')
    if section.setting:
        parts.append(f'<p class="setting">Setting: {escape(section.setting)}.</p>')
    if section.missing:
        parts.append(f'<p class="partial" role="note">{escape(section.missing)}</p>')
    parts += [f"<p>{_code(paragraph)}</p>" for paragraph in content.summary]
    first, *others = map(_figure, content.figures) if content.figures else [""]
    parts.append(first)
    parts += [_table(table, f"{section.anchor}-table-{i}") for i, table in enumerate(content.tables, 1)]
    if others:
        parts.append(f'<div class="figures">{"".join(others)}</div>')
    if section.notes:
        items = "".join(f"<li>{_code(note)}</li>" for note in section.notes)
        parts.append(f"<h3>{READING}</h3><ul>{items}</ul>")
    for origin, (path, result) in zip(section.origins, section.results, strict=True):
        parts.append(f'<p class="origin">{_code(origin)}</p>')
        config = escape(json.dumps(result.config, indent=1))
        parts.append(f"<details><summary>Settings of {escape(path.name)}</summary><pre>{config}</pre></details>")
    return "\n".join([*parts, "</section>\n"])


def _table(table: Table, name: str) -> str:
    rows = [[" ".join(cell.split()) for cell in row] for row in table.rows]
    kinds = ["", *(_kind([row[i] for row in rows]) for i in range(1, len(table.columns)))]
    head = "".join(
        f'<th scope="col"{_class(kind)}>{escape(" ".join(column.split()))}</th>'
        for kind, column in zip(kinds, table.columns, strict=True)
    )
    body = "\n".join(_line(row, kinds, paper=i in table.paper) for i, row in enumerate(rows))
    return (
        f'<figure class="table"><figcaption id="{name}">{escape(table.caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}"><table aria-labelledby="{name}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div></figure>"
    )


def _line(line: Sequence[str], kinds: Sequence[str], *, paper: bool) -> str:
    role = "paper" if paper else "change" if line[0].startswith("difference") else ""
    pairs = zip(line[1:], kinds[1:], strict=True)
    cells = "".join(f"<td{_class(kind)}>{escape(cell)}</td>" for cell, kind in pairs)
    return f'<tr{_class(role)}><th scope="row">{escape(line[0])}</th>{cells}</tr>'


def _kind(column: Sequence[str]) -> str:
    """Numbers stand to the right, long texts may break."""
    numbers = sum(bool(_NUMBER.fullmatch(cell)) for cell in column)
    if 4 * numbers > sum(cell not in ("", "n/a") for cell in column):
        return "number"
    return "text" if max(map(len, column), default=0) > 24 else ""


def _figure(figure: Figure) -> str:
    """An image of its own inside the page: its ids and styles cannot meet those of others."""
    drawn, out = figure.draw(), io.BytesIO()
    save_figure(drawn, out, "svg", transparent=True)
    least = round(58 * drawn.get_figwidth())  # pixels, 60 % of its size: below, it scrolls in its box
    image = (
        f'<img src="data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}" alt="{escape(figure.alt)}" '
        f'style="min-width: {least}px">'
    )
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f'<figure><div class="scroll" tabindex="0" role="region" aria-label="Figure">{image}</div>{caption}</figure>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _code(text: str) -> str:
    """Escaped, with what stands between backticks set as code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
