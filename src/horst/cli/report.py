"""``horst report RESULTS --out report.html``: one page from result files."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal, TextIO

from horst.cli.destination import check_free
from horst.cli.output import write, write_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Which results, and where the page goes."""

    results: tuple[Path, ...]
    """Result files (.json), or folders with such files in them, at any depth."""
    out: Path = Path("report.html")
    """HTML page."""
    formats: tuple[Literal["png", "svg", "markdown"], ...] = ()
    """Further files beside the page: the figures, the report as Markdown."""
    overwrite: bool = False
    """Replace existing files."""
    json: bool = False
    """Print JSON: the page and the results in it."""


def main(options: Options) -> None:
    """Build the page, unless a file cannot be shown."""
    from horst.lab.report import html

    files = html.find_results(options.results)
    check_free(options.out, options.overwrite, "file", files)
    if "markdown" in options.formats:
        check_free(options.out.with_suffix(".md"), options.overwrite, "file")
    html.build(files, options.out, formats=options.formats)
    if options.json:
        write_json({"out": str(options.out), "results": [str(file) for file in files]})
    else:
        write(f"{len(files)} results -> {options.out}")


def draw_figures(result_file: Path, stream: TextIO | None = None) -> None:
    """Write the figures that a report of this result has beside it, and say where they are, or why there are none."""
    from horst.lab.report import html

    try:
        written = html.write_figures([result_file], html.figure_folder(result_file))
    except Exception as error:  # whatever it is, the result stands, and the command that found it has not failed
        write(f"the figures could not be drawn: {' '.join(str(error).split())}", sys.stderr)
        return
    for path in written:
        write(f"-> {path}", stream)
