"""A recipe and its config from words: ``RECIPE --scale SCALE --field value``, for ``horst run`` and ``horst sweep``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from horst.cli.output import nearest, show, table, write
from horst.cli.parsing import parse
from horst.cli.report import draw_figures
from horst.extras import load_extra

if TYPE_CHECKING:
    from horst.lab.experiments.result import Result

# Fields of a config that decide which runs there are.
_LISTS = (
    *("seeds", "optimizers", "sparsities", "points", "methods"),
    *("models", "setups", "p_values", "variants", "alphas"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What every command on recipes takes. ``recipe``, ``scale`` and ``config`` are added by :func:`parse_recipe`."""

    out: Path | None = None
    """Result file; runs/RECIPE_SCALE.json by default."""
    overwrite: bool = False
    """Replace an existing result file."""
    json: bool = False
    """Print the rows as JSON."""
    figures: bool = True
    """Draw the figures of the result into a folder beside it; --no-figures leaves them out."""

    @property
    def result_file(self) -> Path:
        """Where the result goes."""
        chosen: Any = self
        return self.out or Path("runs") / f"{chosen.recipe}_{chosen.scale}.json"

    def save(self, result: Result, cost: str) -> None:
        """Write the result, show its rows below the recipe's name and what they cost, and draw its figures."""
        chosen: Any = self
        path = result.save(self.result_file)
        show(result.rows, f"{chosen.recipe}, {cost}", as_json=self.json, more=f"-> {path}")
        if self.figures:
            draw_figures(path, sys.stderr if self.json else None)


def parse_recipe(options: type[RecipeOptions], arguments: Sequence[str], prog: str) -> Any:
    """The options of a command, with the recipe's name, its scale and its config, whose fields are options too."""
    from horst.lab.experiments.recipes import RECIPES

    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        write(f"usage: {prog} RECIPE [--scale SCALE] [options]\n\nRecipes, with their default scale first:")
        write(f"{table(recipe_rows())}\n\n{prog} RECIPE --scale SCALE --help shows the options of a recipe.")
        raise SystemExit(0)
    if not name or name.startswith("-"):
        raise ValueError(f"name a recipe first: {', '.join(RECIPES)}.")
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}.{nearest(name, RECIPES)} There are: {', '.join(RECIPES)}.")
    scales = RECIPES[name].scales
    scale = _scale(arguments) or next(iter(scales))
    if scale not in scales:
        raise ValueError(f"{name} has the scales {', '.join(scales)}, not {scale!r}.{nearest(scale, scales)}")
    about = f"{RECIPES[name].about} ({scale})."
    parsed = parse(_with_config(options, name, scale), arguments[1:], prog=f"{prog} {name}", description=about)
    _check_lists(parsed.config)
    _check_effect(parsed.config, arguments)
    return parsed


def _check_lists(config: Any) -> None:
    """Refuse a list that decides which runs there are and is empty: the result would be empty, too."""
    for field in dataclasses.fields(config):
        if field.name in _LISTS and field.default and not getattr(config, field.name):
            raise ValueError(f"--{field.name.replace('_', '-')} needs at least one value, got none.")


def _check_effect(config: Any, arguments: Sequence[str]) -> None:
    """Refuse options that were given and change nothing."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    parts: list[Any] = [part for part in (config, getattr(config, "run", None)) if hasattr(part, "without_effect")]
    for name, why in [entry for part in parts for entry in part.without_effect().items()]:
        words = name.replace("_", "-")
        if found := {f"--{words}", f"--no-{words}"} & given:
            raise ValueError(f"{found.pop()} has no effect here: {why}")


def recipe_rows() -> list[dict[str, str]]:
    """The recipes with their scales, for a table."""
    from horst.lab.experiments.recipes import RECIPES

    return [{"recipe": n, "scales": ", ".join(r.scales), "about": r.about} for n, r in RECIPES.items()]


def recipe_completion(options: type[RecipeOptions]) -> Any:
    """What a shell can complete: the recipes as subcommands, each with its options."""
    from horst.lab.experiments.recipes import RECIPES

    subcommand = load_extra("tyro").conf.subcommand
    kinds = [Annotated[_with_config(options, n, next(iter(r.scales))), subcommand(n)] for n, r in RECIPES.items()]
    return Union[tuple(kinds)]  # noqa: UP007 - there is no other way for so many


def _with_config(options: type[RecipeOptions], recipe: str, scale: str) -> Any:
    from horst.lab.experiments.recipes import RECIPES

    scales = RECIPES[recipe].scales
    default = scales[scale]()
    fields: list[Any] = [
        ("recipe", str, dataclasses.field(init=False, default=recipe)),
        ("scale", Literal[tuple(scales)], scale),
        ("config", type(default), default),
    ]
    return dataclasses.make_dataclass("Options", fields, bases=(options,), frozen=True, kw_only=True)


def _scale(arguments: Sequence[str]) -> str:
    """The last ``--scale`` among the words: it decides which options there are, so it is read before them."""
    found = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--scale":
            found = following
        elif word.startswith("--scale="):
            found = word.partition("=")[2]
    return found
