"""``horst list``: recipes with their scales, optimizers, contenders, sparsity methods, pruning methods, exports."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from horst.cli.export import FORMATS
from horst.cli.output import table, write, write_json
from horst.cli.recipes import recipe_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The recipes, optimizers, methods and formats."""

    json: bool = False
    """Print JSON instead of tables."""


def main(options: Options) -> None:
    """Print one table per kind."""
    found = everything()
    if options.json:
        write_json(found)
        return
    write("\n\n".join(table(rows, kind.capitalize()) for kind, rows in found.items()))


def everything() -> dict[str, list[dict[str, str]]]:
    """By kind, one row per entry: its name, and one line about it."""
    import horst
    from horst import sparsity
    from horst.lab.baselines.learned_thresholds import learn_thresholds
    from horst.lab.baselines.tuning import CONTENDERS
    from horst.pruning import OWL
    from horst.pruning.one_shot import METHODS

    named = {name: getattr(sparsity, name) for name in sparsity.__all__}
    masks: list[Any] = [
        thing
        for thing in named.values()
        if isinstance(thing, type) and issubclass(thing, sparsity.Sparsifier) and thing is not sparsity.Sparsifier
    ]
    masks += sparsity.PRESETS.values()
    optimizers: list[Any] = [
        horst.HORST,
        horst.HAM,
        horst.AdamS,
        horst.with_mirror_step,
        horst.OperatorOptimizer,
    ]
    return {
        "recipes": recipe_rows(),
        "optimizers": [{"optimizer": f"horst.{thing.__name__}", "about": _first_line(thing)} for thing in optimizers],
        "contenders": [{"optimizer": name, "about": contender.about} for name, contender in CONTENDERS.items()],
        "sparsity methods": [
            *({"method": thing.__name__, "about": _first_line(thing)} for thing in masks),
            {"method": "str (of the lab)", "about": _first_line(learn_thresholds)},
        ],
        "pruning methods": [
            *({"method": name, "about": _first_line(thing)} for name, thing in METHODS.items()),
            {"method": "owl (a distribution)", "about": _first_line(OWL)},
        ],
        "exports": [{"form": name, "about": about} for name, about in FORMATS.items()],
    }


def _first_line(thing: Any) -> str:
    """The docstring's first sentence, without the marks of its markup."""
    line = (inspect.getdoc(thing) or "").split("\n")[0]
    line = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", line).replace("``", "")
    return line.split("; see ")[0].rstrip(".")
