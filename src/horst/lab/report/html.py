"""The report: one self-contained HTML page from result files, and if wanted its figures and a Markdown version.

::

    from horst.lab.report import html

    html.build(["runs/quickstart.json", "results/table6.json"], "report.html", formats=("png", "markdown"))
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

from horst.files import PathLike, read_json, whole_file, write_text
from horst.lab.experiments.result import Result
from horst.lab.report import html_page, markdown_page
from horst.lab.report.document import Section
from horst.lab.report.figures import save_figure
from horst.lab.report.sections import sections

Format = Literal["png", "svg", "markdown"]
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "experiment": str, "config": dict, "rows": list, "curves": dict, "notes": list, "environment": dict,
    "seconds": (int, float), "schema_version": int,
}  # fmt: skip


def build(results: Sequence[PathLike], out: PathLike, *, formats: Collection[Format] = ()) -> pathlib.Path:
    """Write the page.

    Args:
        results: Result files, or folders with such files in them; see :func:`find_results`.
        out: HTML file, written whole or not at all.
        formats: Other files to write: ``"png"`` and ``"svg"`` put the figures into a folder beside the page, named
            like it with ``_figures`` at the end; ``"markdown"`` writes the report as Markdown, with those figures.

    Returns:
        ``out``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: There is no result at all; or a file is half-written, none of ours, or lacks what its tables show.
            The message names it.

    Example:
        >>> import tempfile
        >>> from horst.lab.experiments.result import run_and_record
        >>> from horst.lab.experiments.toy_suite import Config
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> result = run_and_record("mine", Config(), lambda: ([{"seed": 0, "score": 1.5}], {}, []))
        >>> file = result.save(folder / "mine.json")
        >>> page = build([file], folder / "report.html").read_text()
        >>> "<td class=\\"number\\">1.5</td>" in page
        True
    """
    unknown = sorted(set(formats) - set(get_args(Format)))
    if unknown:
        raise ValueError(f"formats must be among {', '.join(get_args(Format))}, got {', '.join(map(repr, unknown))}.")
    out = pathlib.Path(out)
    found = _read_sections(results)
    page = html_page.page(found)
    folder = figure_folder(out)
    endings = [ending for ending in ("png", "svg") if ending in formats]
    for ending in endings:
        _write_figures(found, folder, ending)
    if "markdown" in formats:
        write_text(out.with_suffix(".md"), markdown_page.page(found, folder.name, endings[0] if endings else None))
    return write_text(out, page)


def write_figures(results: Sequence[PathLike], folder: PathLike) -> list[pathlib.Path]:
    """Write the figures of a report as PNG files, without the report; returns their paths.

    Args:
        results: Result files, as for :func:`build`.
        folder: Folder of the figures, made if there is something to draw.

    Raises:
        FileNotFoundError, ValueError: As :func:`build`.
    """
    return _write_figures(_read_sections(results), pathlib.Path(folder), "png")


def figure_folder(path: PathLike) -> pathlib.Path:
    """Where the figures of a page or of a result file go.

    Example:
        >>> figure_folder("runs/table6_cpu.json").as_posix()
        'runs/table6_cpu_figures'
    """
    path = pathlib.Path(path)
    return path.with_name(f"{path.stem}_figures")


def read_result(path: PathLike) -> Result:
    """A result file, checked.

    Raises:
        ValueError: It is half-written, or something else.
    """
    path = pathlib.Path(path)
    try:
        fields = read_json(path)
    except ValueError as error:
        raise ValueError(
            f"{path} is no whole result file: {error} It may be half-written; run its experiment again."
        ) from error
    wrong = [name for name, kind in _FIELDS.items() if not isinstance(fields.get(name), kind)]
    if wrong:
        raise ValueError(
            f"{path} is not a result file of horst: it lacks {', '.join(wrong)}, or they have another type. Give files "
            "that an experiment has written."
        )
    if not all(isinstance(row, dict) for row in fields["rows"]) or not all(isinstance(n, str) for n in fields["notes"]):
        raise ValueError(f"{path} is not a result file of horst: rows must be objects, and notes texts.")
    try:
        return Result.load(path)
    except TypeError as error:
        raise ValueError(f"{path} is not a result file of horst: {error}.") from error


def find_results(given: Sequence[PathLike]) -> list[pathlib.Path]:
    """The result files that were named, and those in the folders that were, at any depth; each once.

    In a folder, JSON files of another kind are passed over. A half-written result is not: it must not be left out
    without a word.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: Nothing was named, or a folder holds no result.
    """
    if not given:
        raise ValueError("name result files, or folders with such files in them: horst report runs/.")
    found: dict[pathlib.Path, None] = {}
    for path in map(pathlib.Path, given):
        if not path.exists():
            raise FileNotFoundError(f"there is no {path}. horst run writes results to runs/.")
        files = sorted(file for file in path.rglob("*.json") if file.is_file())  # no pipes
        inside = [file for file in files if _is_result(file)] if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path} holds no result file. horst run writes them, as runs/RECIPE_SCALE.json.")
        found |= dict.fromkeys(inside)
    return list(found)


def _is_result(path: pathlib.Path) -> bool:
    """By its first words, if it is cut short."""
    content = path.read_bytes()
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        return b'"experiment"' in content[:4096]
    return isinstance(parsed, dict) and "experiment" in parsed and "schema_version" in parsed


def _read_sections(results: Sequence[PathLike]) -> list[Section]:
    return sections([(path, read_result(path)) for path in find_results(results)])


def _write_figures(found: Sequence[Section], folder: pathlib.Path, ending: str) -> list[pathlib.Path]:
    written = []
    for section in found:
        for figure in section.content.figures:
            path = folder / f"{section.file_name(figure)}.{ending}"
            with section.blamed():
                drawn = figure.draw()  # first: where nothing can be drawn, no folder is made
                with whole_file(path) as file:
                    save_figure(drawn, file, ending)
            written.append(path)
    return written
