"""``horst quickstart``: two small models, trained with AdamW and with HORST and pruned, in minutes on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horst.cli import INTERRUPTED
from horst.cli.destination import check_free
from horst.cli.output import table, write, write_json
from horst.cli.parsing import parse as parse_words
from horst.cli.progress import quiet

if TYPE_CHECKING:
    from horst.lab.experiments.result import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Where the quickstart's result and page go; :func:`parse` adds its config."""

    out: Path = Path("runs/quickstart.json")
    """Result file."""
    report: Path = Path("report.html")
    """HTML page."""
    overwrite: bool = False
    """Replace an existing result and page; those of an interrupted quickstart are replaced anyway."""
    json: bool = False
    """Print the rows as JSON."""


def parse(arguments: Sequence[str], prog: str) -> Any:
    """The fields of the quickstart's config are options, too."""
    from horst.lab.experiments import quickstart

    about = (quickstart.__doc__ or "").split("\n")[0]
    return parse_words(completion(), arguments, prog=prog, description=about)


def completion() -> Any:
    """The options with the config."""
    from horst.lab.experiments import quickstart

    fields: list[Any] = [("config", quickstart.Config, quickstart.Config())]
    return dataclasses.make_dataclass("Options", fields, bases=(Options,), frozen=True, kw_only=True)


def main(options: Any) -> int:
    """Run it, print its two tables, write its page; interrupted, with what there is."""
    from horst.lab.experiments import quickstart
    from horst.lab.report import html

    for place in (options.out, options.report):
        check_free(place, options.overwrite or _is_partial(options.out), "file")
    with quiet("horst"):  # the quickstart says itself how far it is
        result = quickstart.run(options.config)
    path = result.save(options.out)
    page = html.build([path], options.report)
    if options.json:
        write_json(result.rows)
    else:
        _write_tables(result)
        write(f"-> {path}, {page}")
    return INTERRUPTED if quickstart.is_partial(result) else 0


def _write_tables(result: Result) -> None:
    from horst.lab.report import quickstart_tables as tables

    kinds = {"language": (tables.language_table, tables.language_words)}
    kinds["vision"] = (tables.vision_table, tables.vision_words)
    for part, (draw, say) in kinds.items():
        if tables.rows_of(result, part):
            write(table(draw([result]).records()) + f"\n{say(result)}\n")


def _is_partial(path: Path) -> bool:
    from horst.lab.experiments import quickstart
    from horst.lab.experiments.result import Result

    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return quickstart.is_partial(Result.load(path))
    return False
