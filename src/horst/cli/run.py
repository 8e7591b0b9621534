"""``horst run RECIPE --scale SCALE --field value``: a table or figure from one command."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from horst.cli.output import nearest, table
from horst.extras import load_extra


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A recipe with its config, and where its result goes."""

    recipe: str
    config: Any
    out: pathlib.Path
    json: bool


def parse(arguments: Sequence[str], prog: str) -> Options:
    """The recipe's name, its scale, and its config's fields as options."""
    from horst.experiments.recipes import RECIPES

    names = ", ".join(RECIPES)
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            sys.stdout.write(
                f"usage: {prog} RECIPE [--scale SCALE] [options]\n\nRecipes and scales:\n{_recipes()}\n\n"
                f"{prog} RECIPE --help shows a recipe's options.\n"
            )
            raise SystemExit(0)
        raise ValueError(f"name a recipe first: {names}.")
    name, *rest = arguments
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}.{nearest(name, RECIPES)} There are: {names}.")
    recipe = RECIPES[name]
    scale, rest = _take_scale(rest, next(iter(recipe.scales)))
    if scale not in recipe.scales:
        raise ValueError(
            f"{name} has the scales {', '.join(recipe.scales)}, not {scale!r}.{nearest(scale, recipe.scales)}"
        )
    default = recipe.scales[scale]()
    tyro = load_extra("tyro")

    def options(
        config: Any, out: pathlib.Path = pathlib.Path("runs") / f"{name}_{scale}.json", json: bool = False
    ) -> Options:
        return Options(recipe=name, config=config, out=out, json=json)

    options.__annotations__["config"] = type(default)
    options.__doc__ = (
        f"{recipe.about} ({scale}).\n\nArgs:\n    out: The result file.\n    json: Print the rows as JSON."
    )
    options.__defaults__ = (default, *options.__defaults__)  # type: ignore[misc]
    found: Options = tyro.cli(
        options,
        args=rest,
        prog=f"{prog} {name} --scale {scale}",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    return found


def main(options: Options) -> None:
    """Run it, save the result, print its rows."""
    from horst.experiments.recipes import RECIPES
    from horst.training.distributed import rank

    result = RECIPES[options.recipe].run(options.config)
    if rank() != 0:
        return
    path = result.save(options.out)
    if options.json:
        sys.stdout.write(json.dumps(json.loads(path.read_text())["rows"]) + "\n")
        return
    sys.stdout.write(table(result.rows, f"{options.recipe}, {result.seconds:.0f} s") + f"\n-> {path}\n")


def _take_scale(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    rest, scale = [], default
    words = iter(arguments)
    for word in words:
        if word == "--scale":
            scale = next(words, "")
        elif word.startswith("--scale="):
            scale = word.partition("=")[2]
        else:
            rest.append(word)
    return scale, rest


def _recipes() -> str:
    from horst.experiments.recipes import RECIPES

    return table([{"recipe": n, "scales": ", ".join(r.scales), "about": r.about} for n, r in RECIPES.items()])
