"""Results of the frontier studies with made-up numbers: the runs are those of the recipes, nothing is trained."""

import dataclasses
import math

import pytest

from horst.lab.experiments import frontier
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, environment, to_json

OWN = {
    "hyperbolic": 0.1,
    "muon": 0.4,
    "horst-muon": -0.2,
    "adamw-penalty": 0.2,
    "adamw-l1": 0.3,
    "horst-l1": 0.05,
    "spred": 0.6,
}
METHODS = {
    "magnitude": 1.0,
    "magnitude-owl": 0.9,
    "wanda": 0.8,
    "wanda-owl": 0.7,
    "sparsegpt": 0.5,
    "sparsegpt-owl": 0.4,
}


def cost(row):
    """Less is better: a bowl in the learning rate and in alpha * lr, better with length and width, worse with zeros."""
    product = 0.05 if row["alpha"] == "auto" else row["alpha_lr"]
    gain = 2.0 / (1 + abs(math.log(product / 0.06))) if product else 0.0
    length = row.get("steps", 400) / 400
    start = 10.0 + abs(math.log(row["lr"] / 4e-3)) + abs(row["weight_decay"] - 0.1) - gain
    start += OWN.get(row["optimizer"], 0.0) - math.log(length) - math.log(row["width"] / 64)
    return start + 20 * row["sparsity"] ** 4 * METHODS.get(row["method"], 0.4) / (1 + gain) + 0.1 * row["seed"]


def made_up(name):
    """What a study would write."""
    config = RECIPES[name].scales["cpu"]()
    rows = []
    for point in {point.name: point for point in frontier.points(config) if point.seed in config.seeds}.values():
        about = frontier.about_optimizer(point.optimizer, point.run.optimization)
        about |= {"width": point.run.model.width, "seed": point.seed}
        language = name != "frontier_vision"
        about |= {"steps": point.run.steps} if language else {"epochs": point.run.epochs}
        levels = (
            [("dense", 0.0), *((method, level) for method in point.methods for level in config.sparsities)]
            if (language)
            else [(point.methods[0] if point.sparsity else "dense", point.sparsity)]
        )
        for method, level in levels:
            row = {**about, "method": method, "sparsity": level}
            quality = {"perplexity": cost(row)} if language else {"top1": 1 - cost(row) / 100}
            product = 0.05 if row["alpha"] == "auto" else row["alpha_lr"]
            rows.append({**row, **quality, "largest": 0.5 + 100 * product**2, "std": 0.05, "kurtosis": 3.0})
    return Result(
        experiment=name,
        config=to_json(dataclasses.asdict(config)),
        rows=to_json(rows),
        curves={},
        notes=["Nothing was trained."],
        environment=environment(),
        seconds=1.0,
    )


@pytest.fixture(scope="session")
def studies():
    """By name, the three studies."""
    return {name: made_up(name) for name in ("frontier_language", "frontier_vision", "frontier_compositions")}
