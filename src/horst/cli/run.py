"""``horst run RECIPE --scale SCALE --field value``: a table or figure from one command."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from horst.cli.destination import check_free
from horst.cli.recipes import RecipeOptions, parse_recipe, recipe_completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RecipeOptions):
    """A recipe with its config, and where its result goes."""


parse = functools.partial(parse_recipe, Options)
completion = functools.partial(recipe_completion, Options)


def main(options: Any) -> None:
    """Run it; under ``torchrun`` the first process alone saves the result, prints its rows and draws its figures."""
    from horst.lab.experiments.recipes import RECIPES
    from horst.lab.experiments.result import is_first_process

    if is_first_process():  # another that begins late would find the file that this one has written
        check_free(options.result_file, options.overwrite, "file")
    result = RECIPES[options.recipe].run(options.config)
    if not is_first_process():
        return
    options.save(result, f"{result.seconds:.0f} s")
