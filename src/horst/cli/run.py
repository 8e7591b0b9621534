"""``horst run RECIPE --scale SCALE --field value``: a table or figure from one command."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from horst.cli.destination import check_free
from horst.cli.output import table, write, write_json
from horst.cli.recipes import RecipeOptions, parse_recipe, recipe_completion
from horst.cli.report import draw_figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """A recipe with its config, and where its result goes."""

    figures: bool = True
    """Whether to draw the figures of the result into a folder beside it."""


def parse(arguments: Sequence[str], prog: str) -> Any:
    """The recipe's name, its scale, and its config's fields as options."""
    return parse_recipe(Options, arguments, prog)


def completion() -> Any:
    """What a shell can complete."""
    return recipe_completion(Options)


def main(options: Any) -> None:
    """Run it; under ``torchrun`` the first process alone saves the result, prints its rows and draws its figures."""
    from horst.lab.experiments.recipes import RECIPES
    from horst.lab.experiments.result import is_first_process

    if is_first_process():  # another that begins late would find the file that this one has written
        check_free(options.result_file, options.overwrite, "file")
    result = RECIPES[options.recipe].run(options.config)
    if not is_first_process():
        return
    path = result.save(options.result_file)
    if options.json:
        write_json(result.rows)
    else:
        write(table(result.rows, f"{options.recipe}, {result.seconds:.0f} s") + f"\n-> {path}")
    if options.figures:
        draw_figures(path, sys.stderr if options.json else None)
