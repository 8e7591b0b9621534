"""The frontier studies end to end at toy size: every contender, every study, side by side, resumed."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import get_args

import pytest
import torch

from horst.lab.baselines.contenders import Optimization
from horst.lab.data.tokenization import tokenize
from horst.lab.experiments import frontier, mask_methods, table6_gpt2_one_shot
from horst.lab.experiments.frontier import about_optimizer, grid
from horst.lab.experiments.frontier_processes import side_by_side
from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.experiments.weight_histogram import weight_spread
from horst.lab.models.deit import DeiTConfig
from horst.optimizers import auto_alpha
from horst.training import NonFiniteLoss


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.jsonl"
    documents = [{"id": i, "text": f"{i} is followed by {i + 1}, and {i + 1} by {i + 2}. " * 8} for i in range(60)]
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return tokenize(text, folder / "tokens", tokenizer="bytes", validation=0.1)


def tiny(name, tokens, folder, **changes):
    config = RECIPES[name].scales["cpu"]()
    model = dataclasses.replace(config.run.model, layers=2, width=8, heads=2, context=16)
    run = dataclasses.replace(config.run, data=tokens, model=model, steps=4, warmup_steps=2, batch_size=4)
    small = {"run": run, "directory": folder, "sparsities": (0.5,), "seeds": (0,)}
    return dataclasses.replace(config, **{**small, **changes})


def without_clocks(rows):
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


def test_a_point_is_a_contender_with_a_grid_of_settings():
    assert grid("adamw") == ("adamw", [{}])
    name, found = grid("horst lr=1e-3,4e-3 alpha=5,auto no_mirror=embedding seeds=2")
    assert name == "horst"
    assert [(each["lr"], each["alpha"]) for each in found] == [(1e-3, 5.0), (1e-3, "auto"), (4e-3, 5.0), (4e-3, "auto")]
    assert {each["no_mirror"] for each in found} == {("embedding",)}
    assert {each["seeds"] for each in found} == {2}
    assert grid("horst no_mirror=matrix+head") == ("horst", [{"no_mirror": ("matrix", "head")}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sgd lr=1", "a point begins with a contender .*got 'sgd lr=1'"),
        ("horst rate=1", "KEY=VALUE.*alpha_lr.*got 'rate=1'"),
        ("horst lr", "KEY=VALUE.*got 'lr'"),
        ("horst lr=fast", "lr of a point must be a number, got 'fast'"),
        ("horst alpha=5 alpha_lr=0.1", "alpha or alpha_lr.*not both"),
        ("horst methods=guess", "methods of a point must be known ones, got 'guess'"),
    ],
)
def test_a_point_that_cannot_be_is_refused_before_anything_is_trained(text, message):
    with pytest.raises(ValueError, match=message):
        frontier.LanguageStudy(points=(text,))


def test_a_point_changes_what_it_names_and_nothing_else(tokens, tmp_path):
    config = tiny("frontier_language", tokens, tmp_path, seeds=(3, 4), points=(
        "adamw steps=8 width=16 weight_decay=0.3",
        "horst lr=4e-3 alpha_lr=0.02 seeds=7",
    ))  # fmt: skip
    first, second, third = frontier.points(config)
    assert (first.seed, second.seed, third.seed) == (3, 4, 7)
    assert (first.run.steps, first.run.warmup_steps, first.run.model.width) == (8, 4, 16)
    assert first.run.optimization == dataclasses.replace(config.run.optimization, weight_decay=0.3)
    assert third.run == dataclasses.replace(
        config.run, optimization=dataclasses.replace(config.run.optimization, lr=4e-3, alpha=5.0)
    )


def test_the_language_study_has_every_run_once_and_goes_on_from_its_files(tokens, tmp_path, monkeypatch):
    points = (
        "adamw steps=6 lr=1e-3,2e-3 weight_decay=0.1,0.3",
        "horst-l1 lr=4e-3 l1=0.05 alpha=auto",
        "horst width=16 alpha=5,auto",
        "horst lr=4e-3 alpha=5",
        "horst lr=4e-3 alpha_lr=0.02",  # the same run
    )
    config = tiny("frontier_language", tokens, tmp_path / "runs", points=points)
    result = RECIPES["frontier_language"].run(config)
    dense = [row for row in result.rows if row["method"] == "dense"]
    asked = [(row["optimizer"], row["alpha"], row["lr"], row["weight_decay"]) for row in dense]
    assert asked == [
        *(("adamw", 0.0, lr, decay) for lr in (1e-3, 2e-3) for decay in (0.1, 0.3)),
        ("horst-l1", "auto", 4e-3, 0.1),
        *(("horst", alpha, config.run.optimization.lr, 0.1) for alpha in (5.0, "auto")),
        ("horst", 5.0, 4e-3, 0.1),
    ]
    assert [(row["width"], row["steps"]) for row in dense[3:6]] == [(8, 6), (8, 4), (16, 4)]
    for row in result.rows:
        assert row["perplexity"] > 1
        assert row["largest"] > row["std"] > 0
        assert row["alpha_lr"] == (None if row["alpha"] == "auto" else pytest.approx(row["alpha"] * row["lr"]))
    assert {(row["method"], row["sparsity"]) for row in result.rows} == {("dense", 0.0), ("magnitude", 0.5)}
    assert Result.load(result.save(tmp_path / "study.json")).rows == result.rows

    monkeypatch.setattr(frontier.one_shot, "train_and_prune", lambda *_: pytest.fail("trained again"))
    assert RECIPES["frontier_language"].run(config).rows == result.rows
    again = dataclasses.replace(config, sparsities=(0.6,))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        RECIPES["frontier_language"].run(again)


def test_two_workers_find_what_one_finds(tokens, tmp_path):
    points = ("adamw", "horst alpha=5,auto")
    rows = [
        RECIPES["frontier_language"].run(tiny("frontier_language", tokens, tmp_path / str(n), workers=n, points=points))
        for n in (1, 2)
    ]
    assert without_clocks(rows[0].rows) == without_clocks(rows[1].rows)
    assert len(rows[0].rows) == 2 * 3


STUDY = """
import os, pathlib, sys, time
from horst.lab.experiments.frontier_processes import side_by_side

def work(folder, number):
    (pathlib.Path(folder) / f"{number}.pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)

if __name__ == "__main__":
    side_by_side(work, {"first": (sys.argv[1], 1), "second": (sys.argv[1], 2)}, workers=2)
"""


def test_workers_end_when_their_study_is_killed(tmp_path):
    (tmp_path / "study.py").write_text(STUDY)
    study = subprocess.Popen([sys.executable, str(tmp_path / "study.py"), str(tmp_path)])
    files = [tmp_path / "1.pid", tmp_path / "2.pid"]
    assert wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    workers = [int(file.read_text()) for file in files]
    study.kill()
    study.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in workers))


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = pathlib.Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")  # a zombie has ended


def test_a_run_that_breaks_down_is_a_row_and_not_the_end(tokens, tmp_path, monkeypatch):
    original = table6_gpt2_one_shot.train_and_prune

    def breaks(config, optimizer, *rest):
        if optimizer == "adamw":
            raise NonFiniteLoss("the loss is nan at step 3; all was finite until step 2.")
        return original(config, optimizer, *rest)

    monkeypatch.setattr(frontier.one_shot, "train_and_prune", breaks)
    config = tiny("frontier_language", tokens, tmp_path / "runs", points=("adamw", "horst"))
    rows = RECIPES["frontier_language"].run(config).rows
    broken = [row for row in rows if row["optimizer"] == "adamw"]
    assert [(row["sparsity"], row["perplexity"]) for row in broken] == [(0.0, None), (0.5, None)]
    assert {row["broke_down"] for row in broken} == {"the loss is nan at step 3"}
    assert all(row["perplexity"] > 1 for row in rows if row["optimizer"] == "horst")
    assert RECIPES["frontier_language"].run(config).rows == rows


def test_a_language_study_has_every_contender_mirror_and_method(tokens, tmp_path):
    points = (
        "adamw lr=1e-3 methods=all",
        "horst lr=1e-3 alpha=5,auto",
        "horst lr=1e-3 alpha_lr=0.05 methods=all",
        "horst-muon lr=1e-3 alpha_lr=0.05",
        "hyperbolic lr=1e-3 alpha_lr=0.05",
        "muon lr=1e-3 muon_lr_ratio=2",
        "adamw-penalty lr=1e-3 penalty=1e-4",
        "adamw-l1 lr=1e-3 l1=0.2",
        "spred lr=1e-3 spred_decay=0.3",
        "horst-l1 lr=1e-3 alpha=auto l1=0.2",
        "horst lr=1e-3 alpha_lr=0.05 mirror=blocks,matrices",
        "horst lr=1e-3 alpha_lr=0.05 no_mirror=matrix",
    )
    config = tiny("frontier_language", tokens, tmp_path / "runs", points=points)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, eval_batches=1))
    result = RECIPES["frontier_language"].run(config)
    dense = [row for row in result.rows if row["method"] == "dense"]
    assert [(row["optimizer"], row["strength"], row["mirror"]) for row in dense] == [
        ("adamw", 0.0, "all"),
        ("horst", 0.005, "all"),
        ("horst", None, "all"),
        ("horst", 0.05, "all"),
        ("horst-muon", 0.05, "all"),
        ("hyperbolic", 0.05, "all"),
        ("muon", 2.0, "all"),
        ("adamw-penalty", 1e-4, "all"),
        ("adamw-l1", 0.2, "all"),
        ("spred", 0.3, "all"),
        ("horst-l1", 0.2, "all"),
        ("horst", 0.05, "blocks"),
        ("horst", 0.05, "matrices"),
        ("horst", 0.05, "all, not matrix"),
    ]
    # four steps are too few for auto's bound to be felt: it may equal a fixed alpha
    fixed = [row["perplexity"] for row in dense if row["alpha"] != "auto"]
    assert len(set(fixed)) == len(fixed), "two contenders trained the same model"
    pruned = {(row["optimizer"], row["strength"], row["mirror"]): [] for row in dense}
    for row in result.rows:
        if row["method"] != "dense":
            pruned[row["optimizer"], row["strength"], row["mirror"]].append(row["method"])
            assert row["sparsity_of_pruned_layers"] == pytest.approx(0.5, abs=0.01)
    assert pruned["horst", 0.05, "all"] == pruned["adamw", 0.0, "all"] == list(config.methods)
    assert pruned["spred", 0.3, "all"] == ["magnitude"]


RIVALS = [method for method in get_args(mask_methods.Method) if method not in ("acdc", "gmp", "rigl")]


def test_the_vision_study_trains_dense_and_sparse_in_every_way(tmp_path):
    config = RECIPES["frontier_vision"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, model=model, epochs=1, batch_size=64),
        points=(
            "adamw width=8 sparsity=0.9,0",
            "horst lr=1e-3 alpha_lr=0.02",
            "horst alpha=auto sparsity=0.9,0",
            "horst alpha=5,auto methods=gmp,rigl",
            "adamw methods=" + ",".join(RIVALS),
        ),
        seeds=(0,),
        directory=tmp_path / "runs",
    )
    result = RECIPES["frontier_vision"].run(config)
    found = [(row["width"], row["optimizer"], row["alpha"], row["method"]) for row in result.rows]
    assert found == [
        *((8, "adamw", 0.0, method) for method in ("acdc", "dense")),
        (16, "horst", 20.0, "acdc"),
        *((16, "horst", "auto", method) for method in ("acdc", "dense")),
        *((16, "horst", alpha, method) for alpha in (5.0, "auto") for method in ("gmp", "rigl")),
        *((16, "adamw", 0.0, method) for method in RIVALS),
    ]
    for row in result.rows:
        assert 0.0 <= row["top1"] <= 1.0
        weights = 12 * row["width"] ** 2
        if row["method"] in ("set", "svite"):  # weights that grow start at zero, and may get no gradient or no step
            assert row["zeros"] >= row["sparsity"] - 4 / weights
            continue
        assert row["zeros"] == pytest.approx(row["sparsity"], abs=4 / weights), "four layers may round by one each"
    again = RECIPES["frontier_vision"].run(config)
    assert again.rows == result.rows, "runs that were finished are taken from their files"


def test_a_row_has_the_second_beta_and_the_decay_of_its_own_point(tokens, tmp_path):
    points = ("adamw lr=1e-3 beta2=0.9,0.99", "adamw lr=1e-3 decay=matrices")
    rows = RECIPES["frontier_language"].run(tiny("frontier_language", tokens, tmp_path / "runs", points=points)).rows
    found = [(row["beta2"], row["decay"]) for row in rows if row["method"] == "dense"]
    assert found == [(0.9, "all"), (0.99, "all"), (0.95, "matrices")]


def test_the_recipes_compare_like_with_like():
    """At each length AdamW has every learning rate that HORST has, or as many."""
    points = list(frontier.points(RECIPES["frontier_language"].scales["cpu"]()))
    assert {(p.run.model.width, p.run.steps) for p in points} == {(64, 800), (64, 3200)}
    for steps in (800, 3200):
        rates = {
            name: {p.run.optimization.lr for p in points if p.optimizer == name and p.run.steps == steps}
            for name in ("adamw", "horst", "adamw-l1", "horst-l1")
        }
        assert rates["adamw"] > rates["horst"]
        assert len(rates["adamw-l1"]) == len(rates["horst-l1"]) == 2
        l1s = [
            {p.run.optimization.l1 for p in points if p.optimizer == name and p.run.steps == steps}
            for name in ("adamw-l1", "horst-l1")
        ]
        assert l1s[0] == l1s[1]
    assert max(p.run.optimization.lr for p in points) / min(p.run.optimization.lr for p in points) > 30
    assert {p.seed for p in points} == {0, 1, 2}
    gpu = list(frontier.points(RECIPES["frontier_vision"].scales["gpu"]()))
    assert len({p.name for p in gpu}) == len(gpu) == 5


def test_the_recipes_have_the_runs_of_the_committed_results():
    """A committed file holds what its recipe asks for."""
    root = pathlib.Path(__file__).parents[3] / "results/transformers"
    for name in ("frontier_language", "frontier_vision"):
        keys = ("optimizer", "alpha", "lr", "beta2", "weight_decay", "strength", "mirror", "width", "seed")
        committed = {tuple(row[key] for key in keys) for row in Result.load(root / f"{name}.json").rows}
        asked = set()
        for point in frontier.points(RECIPES[name].scales["cpu"]()):
            row = about_optimizer(point.optimizer, point.run.optimization)
            row |= {"width": point.run.model.width, "seed": point.seed}
            asked.add(tuple(float(f"{row[k]:.9g}") if isinstance(row[k], float) else row[k] for k in keys))
        assert asked == committed, name


def test_a_folder_tells_runs_apart(tokens, tmp_path):
    points = ("adamw", "horst", "horst alpha=auto", "horst width=16", "horst steps=5", "adamw methods=all")
    config = tiny("frontier_language", tokens, tmp_path, points=points)
    assert len({point.name for point in frontier.points(config)}) == len(points)
    adamw = [dataclasses.replace(p, run=dataclasses.replace(p.run, optimization=Optimization(alpha=alpha)))
             for p in list(frontier.points(config))[:1] for alpha in (5.0, 20.0)]  # fmt: skip
    assert len({point.name for point in adamw}) == 1, "AdamW has no alpha"
    assert about_optimizer("spred", Optimization(spred_decay=0.7))["strength"] == 0.7


def test_workers_must_be_some():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        side_by_side(dict, {}, 0)


def test_the_spread_of_weights():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    spread = weight_spread([x[:300], torch.zeros(5), x[300:].view(7, 100)], nonzero=True)
    double = x.double()
    assert spread["largest"] == double.abs().max()
    assert spread["std"] == pytest.approx(math.sqrt(double.square().mean()))
    assert spread["kurtosis"] == pytest.approx(double.pow(4).mean() / double.square().mean() ** 2)
    with pytest.raises(ValueError, match="there is no weight to count"):
        weight_spread([torch.zeros(3)], nonzero=True)


def test_what_auto_found_by_another_rule_is_not_taken_for_this_one(tmp_path, monkeypatch):
    path = tmp_path / "outcome.json"
    assert load_or_run(path, {"alpha": "auto"}, lambda: {"found": 1})["found"] == 1
    assert load_or_run(path, {"alpha": "auto"}, lambda: {"found": 2})["found"] == 1
    monkeypatch.setattr(auto_alpha, "NOISE_IN_LOG", 2 * auto_alpha.NOISE_IN_LOG)
    assert load_or_run(path, {"alpha": "auto"}, lambda: {"found": 2})["found"] == 2
