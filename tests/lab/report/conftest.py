"""Results of the frontier studies with made-up numbers: the runs are those of the recipes, nothing is trained."""

import dataclasses
import math

import pytest

from horst.lab.experiments import frontier_compositions, frontier_language, frontier_vision
from horst.lab.experiments.frontier import about_optimizer
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, environment, to_json

OWN = {
    "hyperbolic": 0.1,
    "muon": 0.4,
    "horst-muon": -0.2,
    "adamw-l1": 0.2,
    "adamw-proximal": 0.3,
    "horst-proximal": 0.05,
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


def cost(row, *, seed=0):
    """Less is better: a bowl in the learning rate and in alpha * lr, better with length and width, worse with zeros."""
    product = 0.05 if row["alpha"] == "auto" else row["alpha_lr"]
    gain = 2.0 / (1 + abs(math.log(product / 0.06))) if product else 0.0
    length = row.get("steps", 400) / 400
    start = 10.0 + abs(math.log(row["lr"] / 4e-3)) + abs(row["weight_decay"] - 0.1) - gain
    start += OWN.get(row["optimizer"], 0.0) - math.log(length) - math.log(row["width"] / 64)
    return start + 20 * row["sparsity"] ** 4 * METHODS.get(row["method"], 0.4) / (1 + gain) + 0.1 * seed


def spread_of(row):
    product = 0.05 if row["alpha"] == "auto" else row["alpha_lr"]
    return {"largest": 0.5 + 100 * product**2, "std": 0.05, "kurtosis": 3.0 + 1e4 * product**2}


def asked_once(points):
    """As the studies do: a run that is asked for twice is one."""
    found = {}
    for point in points:
        found.setdefault(point.name, point)
    return found.values()


def language(module, name):
    config = RECIPES[name].scales["cpu"]()
    if name == "frontier_language":
        config = dataclasses.replace(config, rule_seeds=config.seeds)
    rows = []
    for point in asked_once(module.points(config)):
        about = {
            "study": point.study,
            **about_optimizer(point.optimizer, point.run.optimization),
            "width": point.run.model.width,
            "steps": point.run.steps,
            "seed": point.seed,
        }
        levels = [("dense", 0.0), *((method, level) for method in point.methods for level in config.sparsities)]
        for method, level in levels:
            row = {**about, "method": method, "sparsity": level}
            rows.append({**row, "perplexity": cost(row, seed=point.seed), **spread_of(row)})
    return made_up(name, config, rows)


def vision(config):
    rows = []
    for point in asked_once(frontier_vision.points(config)):
        row = {
            "study": point.study,
            **about_optimizer(point.optimizer, point.run.optimization),
            "width": point.run.model.width,
            "epochs": point.run.epochs,
            "seed": point.seed,
            "method": point.method if point.sparsity else "dense",
            "sparsity": point.sparsity,
        }
        rows.append({**row, "top1": 1 - cost(row, seed=point.seed) / 100, **spread_of(row)})
    return made_up("frontier_vision", config, rows)


def made_up(name, config, rows):
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
def frontier():
    """By name, the three studies."""
    return {
        "frontier_language": language(frontier_language, "frontier_language"),
        "frontier_vision": vision(RECIPES["frontier_vision"].scales["cpu"]()),
        "frontier_compositions": language(frontier_compositions, "frontier_compositions"),
    }


@pytest.fixture(scope="session")
def made_up_vision():
    """The study of vision for a config."""
    return vision
