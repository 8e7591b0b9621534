"""``horst quickstart``: small models, trained with AdamW and with HORST and pruned, in minutes on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horst.cli import INTERRUPTED
from horst.cli.destination import check_free
from horst.cli.output import table, write, write_json
from horst.cli.parsing import parse as parse_words
from horst.cli.progress import quiet


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
    from horst.lab.report import quickstart as shown

    for place in (options.out, options.report):
        check_free(place, options.overwrite or _is_partial(options.out), "file")
    with quiet("horst"):  # the quickstart says itself how far it is
        result = quickstart.run(options.config)
    path = result.save(options.out)
    page = html.build([path], options.report)
    if options.json:
        write_json(result.rows)
    else:
        if shown.rows_of(result, "language"):
            write(f"{table(shown.language_table([result]).records())}\n{shown.language_words(result)}\n")
        if shown.rows_of(result, "vision"):
            write(f"{table(shown.vision_table([result]).records())}\n{shown.vision_words(result)}\n")
        if shown.rows_of(result, "recovery"):
            write(f"{table(shown.recovery_table([result]).records())}\n{shown.recovery_words(result)}\n")
        write(f"-> {path}, {page}")
    return INTERRUPTED if quickstart.is_partial(result) else 0


def _is_partial(path: Path) -> bool:
    from horst.lab.experiments import quickstart
    from horst.lab.experiments.result import Result

    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        return quickstart.is_partial(Result.load(path))
    return False
