"""Results of the frontier studies and the comparisons with made-up numbers: nothing is trained."""

import dataclasses
import math

import pytest

from horst.lab.experiments import frontier
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result, environment, to_json

OWN = {"adamw-l1": 0.3, "horst-l1": 0.05}
METHODS = {"magnitude": 1.0, "sparsegpt": 0.5}
# Larger grids than those of the recipes: three budgets, and AdamW tuned over its weight decay too.
POINTS = {
    "frontier_language": (
        "adamw steps=1600 lr=5e-4,2e-3,4e-3,8e-3,1.6e-2 weight_decay=0.1,0.3,1",
        "horst steps=1600 lr=5e-4,2e-3,8e-3 alpha=5,auto",
        "horst steps=1600 lr=5e-4,2e-3,8e-3 alpha_lr=0.02,0.1",
        "adamw-l1 steps=1600 lr=2e-3,8e-3 l1=0.02,0.05,0.1",
        "horst-l1 steps=1600 lr=2e-3,8e-3 l1=0.02,0.05,0.1 alpha=auto",
        "adamw steps=400 width=128 lr=5e-4,2e-3,4e-3,8e-3 weight_decay=0.1,0.3,1",
        "horst steps=400 width=128 lr=5e-4,2e-3,8e-3 alpha=5,auto",
        "horst steps=400 width=128 lr=5e-4,2e-3,8e-3 alpha_lr=0.02,0.1",
        "adamw steps=400 lr=5e-4,2e-3,4e-3,8e-3,1.6e-2 weight_decay=0,0.01,0.1,0.3,1",
        "horst steps=400 lr=5e-4,2e-3,8e-3,1.6e-2 alpha=5,auto",
        "horst steps=400 lr=5e-4,2e-3,8e-3,1.6e-2 alpha_lr=0.005,0.02,0.05,0.1,0.2",
    ),
    "frontier_vision": (
        "adamw lr=1e-3,3e-3,1e-2,3e-2 weight_decay=0,0.1,0.5 sparsity=0.9,0",
        "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=auto sparsity=0.9,0",
        "horst lr=1e-3,3e-3,1e-2,3e-2 alpha=5",
        "horst lr=1e-3,3e-3,1e-2,3e-2 alpha_lr=0.02,0.05,0.1",
    ),
}
# One part of the step at a time, beside the whole.
PARTS = (
    "adamw lr=8e-3 methods=all",
    "horst lr=8e-3 alpha=auto methods=all",
    "adamw lr=8e-3 norm_lr_ratio=6 methods=all",
    "horst lr=8e-3 alpha=0 max_step=0.002 methods=all",
    "horst lr=8e-3 alpha=27.3 no_mirror=matrix+embedding+position methods=all",
    "horst lr=2e-3 alpha=auto",
)


def cost(row):
    """Less is better: a bowl in the learning rate and in alpha * lr, better with length and width, worse with zeros."""
    product = 0.05 if row["alpha"] == "auto" else row["alpha_lr"]
    gain = 2.0 / (1 + abs(math.log(product / 0.06))) if product else 0.0
    length = row.get("steps", 400) / 400
    start = 10.0 + abs(math.log(row["lr"] / 4e-3)) + abs(row["weight_decay"] - 0.1) - gain
    start += OWN.get(row["optimizer"], 0.0) - math.log(length) - math.log(row["width"] / 64)
    return start + 20 * row["sparsity"] ** 4 * METHODS.get(row["method"], 0.4) / (1 + gain) + 0.1 * row["seed"]


def made_up(name, points):
    """What a study would write."""
    config = dataclasses.replace(RECIPES[name].scales["cpu"](), points=points, seeds=(0, 1))
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
    """By name, the two studies."""
    return {name: made_up(name, points) for name, points in POINTS.items()}


@pytest.fixture(scope="session")
def parts():
    """A language study of parts of the step."""
    return made_up("frontier_language", PARTS)


COMPARED = (0.5, 0.7)
# perplexity at every level by seed; 0 is the tuning seed
BY_SEED = {
    "adamw": {0: 12.0, 1: 12.0, 2: 12.4},
    "horst": {0: 10.0, 1: 10.0, 2: 11.0},
    "muon": {0: 10.1, 1: 10.2, 2: 10.9},  # worse than horst in one seed, better in the other
    "spred": {0: 14.0},  # no fresh seed yet
    "ham": {0: None},
}


def made_up_comparison(name, rows, tries, costs, **changes):
    config = dataclasses.replace(RECIPES[name].scales["cpu"](), seeds=(1, 2), **changes)
    return Result(
        experiment=name,
        config=to_json(dataclasses.asdict(config)),
        rows=rows,
        curves={
            "tries": tries,
            "costs": costs,
            "runs": {"done": 14, "planned": 20},
            "less_is_better": name == "compare_language",
        },
        notes=[],
        environment=environment(),
        seconds=1.0,
    )


def attempt(name, criterion, *, chosen=False, **more):
    settings = {"lr": 0.002 if chosen else 0.004, "weight_decay": 0.1}
    return {"contender": name, "settings": settings, "chosen": chosen, "criterion": criterion, "done": True, **more}


@pytest.fixture(scope="session")
def compared_language():
    """A comparison with a contender that broke down, and one without fresh seeds."""
    rows, tries = [], []
    for name, seeds in BY_SEED.items():
        for seed, value in seeds.items():
            stage = {"contender": name, "stage": "seed" if seed else "try", "seed": seed}
            for method, level in (("dense", 0.0), *((m, s) for m in ("magnitude", "sparsegpt") for s in COMPARED)):
                row = {**stage, "method": method, "sparsity": level, "perplexity": value}
                if value is None:
                    rows.append({**row, "broke_down": "the loss is nan at step 7"})
                    continue
                row["perplexity"] += 10 * level * (method == "magnitude")
                share = max(level, 0.6 if name == "spred" else 0.0)
                shares = {"sparsity_of_pruned_layers": share, "sparsity_of_all_weights": 0.9 * share}
                rows.append({**row, **shares})
        broke = {"broke_down": "the loss is nan at step 7"} if name == "ham" else {}
        tries += [attempt(name, seeds[0], chosen=name != "ham", **broke), attempt(name, 20.0, **broke)]
    tries[-3]["done"] = False  # one of spred's
    costs = {name: {"bytes_per_weight": 8.0, "milliseconds_per_step": 30.0} for name in BY_SEED}
    costs["muon"] = {"bytes_per_weight": 4.39, "milliseconds_per_step": 45.0}
    costs["ham"]["milliseconds_per_step"] = None
    return made_up_comparison("compare_language", rows, tries, costs, sparsities=COMPARED)


@pytest.fixture(scope="session")
def compared_vision():
    rows = []
    for name, values in {"adamw+one-shot": (0.8, 0.82), "horst+acdc": (0.9, 0.93), "adamw+rigl": (0.1, 0.09)}.items():
        for seed, value in enumerate(values, 1):
            row = {"contender": name, "stage": "seed", "seed": seed, "method": name.partition("+")[2]}
            share = {"sparsity_of_pruned_layers": 0.9, "sparsity_of_all_weights": 0.84}
            if name == "adamw+one-shot":
                rows.append({**row, "method": "dense", "sparsity": 0.0, "top1": 0.97, **dict.fromkeys(share, 0.0)})
            rows.append({**row, "sparsity": 0.9, "top1": value, **share})
    names = list(dict.fromkeys(row["contender"] for row in rows))
    tries = [attempt(name, 0.9, chosen=True) for name in names]
    costs = {name: {"bytes_per_weight": 8.0, "milliseconds_per_step": 10.0} for name in names}
    return made_up_comparison("compare_vision", rows, tries, costs)
