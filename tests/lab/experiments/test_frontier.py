"""The frontier studies end to end at toy size: every contender, every study, side by side, resumed."""

import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch

from horst.lab.baselines.contenders import Optimization
from horst.lab.data.tokenization import tokenize
from horst.lab.experiments import frontier_compositions, frontier_language, frontier_vision, table6_gpt2_one_shot
from horst.lab.experiments.frontier import about_optimizer, alphas, folder_name, side_by_side
from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.experiments.weight_histogram import weight_spread
from horst.lab.models.deit import DeiTConfig
from horst.lab.training import NonFiniteLoss
from horst.optimizers import auto_alpha


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
    return dataclasses.replace(config, **{"run": run, "directory": folder, "sparsities": (0.5,), **changes})


def without_clocks(rows):
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


def language(tokens, folder, **changes):
    small = {
        "lrs": (1e-3, 4e-3),
        "tuning_lrs": (2e-3,),
        "alpha_lrs": (0.02,),
        "weight_decays": (0.0, 0.1),
        "widths": (8, 16),
        "wide_lrs": (1e-3,),
        "wide_alpha_lrs": (),
        "wide_weight_decays": (),
        "long_steps": 6,
        "long_lrs": (1e-3,),
        "long_alpha_lrs": (),
        "long_weight_decays": (),
        "l1s": (0.05,),
        "l1_lrs": (4e-3,),
        "seeds": (0,),
        "rule_seeds": (0,),
    }
    return tiny("frontier_language", tokens, folder, **{**small, **changes})


ADAMW = (("adamw", 0.0),)


def test_the_language_study_has_every_run_once_and_goes_on_from_its_files(tokens, tmp_path, monkeypatch):
    config = language(tokens, tmp_path / "runs")
    result = RECIPES["frontier_language"].run(config)
    dense = [row for row in result.rows if row["method"] == "dense"]
    asked = [(row["study"], row["optimizer"], row["alpha"], row["lr"], row["weight_decay"]) for row in dense]
    assert asked == [
        *(("length", *who, 1e-3, 0.1) for who in (*ADAMW, ("horst", 5.0), ("horst", "auto"))),
        *(("l1", *who, 4e-3, 0.1) for who in (("adamw-l1", 0.0), ("horst-l1", "auto"))),
        *(("width", *who, 1e-3, 0.1) for who in (*ADAMW, ("horst", 5.0), ("horst", "auto"))),
        *(("alpha", *who, 1e-3, 0.1) for who in (*ADAMW, ("horst", 5.0), ("horst", 20.0), ("horst", "auto"))),
        # alpha 5 at this rate is 0.02 over it: one run, not two
        *(("alpha", *who, 4e-3, 0.1) for who in (*ADAMW, ("horst", 5.0), ("horst", "auto"))),
        ("decay", "adamw", 0.0, 1e-3, 0.0),
        *(("decay", "adamw", 0.0, 2e-3, decay) for decay in (0.0, 0.1)),
        ("decay", "adamw", 0.0, 4e-3, 0.0),
    ]
    assert [(row["width"], row["steps"]) for row in dense[5:12:3]] == [(8, 6), (16, 4), (8, 4)]
    for row in result.rows:
        assert row["perplexity"] > 1
        assert row["largest"] > row["std"] > 0
        assert row["alpha_lr"] == (None if row["alpha"] == "auto" else pytest.approx(row["alpha"] * row["lr"]))
    assert {(row["method"], row["sparsity"]) for row in result.rows} == {("dense", 0.0), ("magnitude", 0.5)}
    assert Result.load(result.save(tmp_path / "study.json")).rows == result.rows

    monkeypatch.setattr(frontier_language.one_shot, "train_and_prune", lambda *_: pytest.fail("trained again"))
    assert RECIPES["frontier_language"].run(config).rows == result.rows
    again = dataclasses.replace(config, sparsities=(0.6,))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        RECIPES["frontier_language"].run(again)


def test_adamw_is_tuned_at_every_budget_and_the_rule_has_seeds_of_its_own(tokens, tmp_path):
    wider = {"tuning_lrs": (2e-3,), "wide_weight_decays": (0.1, 0.3)}
    longer = {"long_tuning_lrs": (8e-3,), "long_weight_decays": (0.3,)}
    config = language(tokens, tmp_path, **wider, **longer, seeds=(0, 1), rule_seeds=(0, 1, 2))
    points = frontier_language.points(config)

    def tried(width, steps):
        own = [p for p in points if p.study == "decay" and (p.run.model.width, p.run.steps) == (width, steps)]
        assert {p.optimizer for p in own} == {"adamw"}
        return [(p.run.optimization.lr, p.run.optimization.weight_decay, p.seed) for p in own]

    assert tried(8, 6) == [(lr, 0.3, seed) for lr in (1e-3, 8e-3) for seed in (0, 1)]
    assert tried(16, 4) == [(lr, decay, seed) for lr in (1e-3, 2e-3) for decay in (0.1, 0.3) for seed in (0, 1)]
    assert tried(8, 4) == [(lr, d, seed) for lr in (1e-3, 2e-3, 4e-3) for d in (0.0, 0.1) for seed in (0, 1)]
    seeds = {(p.optimizer, p.run.optimization.alpha): [] for p in points if p.study == "alpha"}
    for p in points:
        if p.study == "alpha" and p.run.optimization.lr == 1e-3:
            seeds[p.optimizer, p.run.optimization.alpha].append(p.seed)
    assert seeds == {
        ("adamw", 5.0): [0, 1],
        ("horst", 5.0): [0, 1, 2],
        ("horst", 20.0): [0, 1],
        ("horst", "auto"): [0, 1, 2],
    }


def test_two_workers_find_what_one_finds(tokens, tmp_path):
    small = {"lrs": (1e-3,), "tuning_lrs": (), "weight_decays": (), "widths": (8,), "long_steps": None}
    rows = [
        RECIPES["frontier_language"].run(language(tokens, tmp_path / str(n), workers=n, **small)).rows for n in (1, 2)
    ]
    assert without_clocks(rows[0]) == without_clocks(rows[1])
    assert len(rows[0]) == 2 * 5


STUDY = """
import os, pathlib, sys, time
from horst.lab.experiments.frontier import side_by_side

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

    monkeypatch.setattr(frontier_language.one_shot, "train_and_prune", breaks)
    small = {"lrs": (1e-3,), "tuning_lrs": (), "weight_decays": (), "widths": (8,), "long_steps": None}
    config = language(tokens, tmp_path / "runs", **small)
    rows = RECIPES["frontier_language"].run(config).rows
    broken = [row for row in rows if row["optimizer"] == "adamw"]
    assert [(row["sparsity"], row["perplexity"]) for row in broken] == [(0.0, None), (0.5, None)]
    assert {row["broke_down"] for row in broken} == {"the loss is nan at step 3"}
    assert all(row["perplexity"] > 1 for row in rows if row["optimizer"] == "horst")
    assert RECIPES["frontier_language"].run(config).rows == rows


def test_the_study_of_compositions_has_every_contender_mirror_and_method(tokens, tmp_path):
    config = tiny(
        "frontier_compositions",
        tokens,
        tmp_path / "runs",
        lrs=(1e-3,),
        alpha_lrs=(0.05,),
        mirror_alpha_lr=0.05,
        muon_lr_ratios=(2.0,),
        penalties=(1e-4,),
        l1s=(0.2,),
        spred_decays=(0.3,),
        seeds=(0,),
    )
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, eval_batches=1))
    result = RECIPES["frontier_compositions"].run(config)
    dense = [row for row in result.rows if row["method"] == "dense"]
    found = [(row["optimizer"], row["strength"], row["mirror"]) for row in dense]
    assert found == [
        ("adamw", 0.0, "matrices"),
        ("horst", 0.005, "matrices"),
        ("horst", 0.05, "matrices"),
        ("horst-muon", 0.05, "matrices"),
        ("hyperbolic", 0.05, "matrices"),
        ("horst", None, "matrices"),
        ("horst-muon", None, "matrices"),
        ("muon", 2.0, "matrices"),
        ("adamw-penalty", 1e-4, "matrices"),
        ("adamw-l1", 0.2, "matrices"),
        ("spred", 0.3, "matrices"),
        ("horst-l1", 0.2, "matrices"),
        ("horst", 0.05, "blocks"),
        ("horst", 0.05, "all"),
        ("horst", 0.05, "matrices, not matrix"),
    ]
    # four steps are too few for auto's bound to be felt: it may equal a fixed alpha
    fixed = [row["perplexity"] for row in dense if row["alpha"] != "auto"]
    assert len(set(fixed)) == len(fixed), "two contenders trained the same model"
    pruned = {(row["optimizer"], row["strength"], row["mirror"]): [] for row in dense}
    for row in result.rows:
        if row["method"] != "dense":
            pruned[row["optimizer"], row["strength"], row["mirror"]].append(row["method"])
            assert row["sparsity_of_pruned_layers"] == pytest.approx(0.5, abs=0.01)
    assert pruned["horst", 0.05, "matrices"] == pruned["adamw", 0.0, "matrices"] == list(config.methods)
    assert pruned["spred", 0.3, "matrices"] == ["magnitude"]


def test_the_vision_study_trains_dense_and_sparse_in_every_way(tmp_path):
    config = RECIPES["frontier_vision"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, model=model, epochs=1, batch_size=64),
        lrs=(1e-3,),
        alpha_lrs=(0.02,),
        weight_decays=(0.0,),
        widths=(16, 8),
        wide_lrs=(1e-3,),
        wide_alpha_lrs=(),
        method_lr=2e-3,
        seeds=(0,),
        directory=tmp_path / "runs",
    )
    result = RECIPES["frontier_vision"].run(config)
    found = [(row["study"], row["width"], row["optimizer"], row["alpha"], row["method"]) for row in result.rows]
    both = ("acdc", "dense")
    assert found == [
        *(("width", 8, "adamw", 0.0, method) for method in both),
        ("width", 8, "horst", 5.0, "acdc"),
        *(("width", 8, "horst", "auto", method) for method in both),
        *(("alpha", 16, "adamw", 0.0, method) for method in both),
        *(("alpha", 16, "horst", alpha, "acdc") for alpha in (5.0, 20.0)),
        *(("alpha", 16, "horst", "auto", method) for method in both),
        *(("decay", 16, "adamw", 0.0, method) for method in both),
        *(
            ("method", 16, optimizer, alpha, method)
            for method in ("gmp", "rigl")
            for optimizer, alpha in (("adamw", 0.0), ("horst", 5.0), ("horst", "auto"))
        ),
    ]
    for row in result.rows:
        assert 0.0 <= row["top1"] <= 1.0
        weights = 12 * row["width"] ** 2
        assert row["zeros"] == pytest.approx(row["sparsity"], abs=4 / weights), "four layers may round by one each"
    again = RECIPES["frontier_vision"].run(config)
    assert again.rows == result.rows, "runs that were finished are taken from their files"


def test_the_recipes_compare_like_with_like():
    """At every budget AdamW's weight decay is tuned at every learning rate that HORST has, and at more."""
    config = RECIPES["frontier_language"].scales["cpu"]()
    points = frontier_language.points(config)
    decays = {(64, 400): config.weight_decays, (128, 400): (0.1, 0.3, 1.0), (64, 1600): (0.1, 0.3, 1.0)}
    for budget, tried in decays.items():
        own = [p for p in points if (p.run.model.width, p.run.steps) == budget]
        horst = {p.run.optimization.lr for p in own if p.optimizer == "horst"}
        tuned = {(p.run.optimization.lr, p.run.optimization.weight_decay) for p in own if p.study == "decay"}
        assert tuned == {(lr, decay) for lr, _ in tuned for decay in tried}
        assert {lr for lr, _ in tuned} > horst
    assert max(p.run.optimization.lr for p in points) / min(p.run.optimization.lr for p in points) > 30
    others = frontier_compositions.points(RECIPES["frontier_compositions"].scales["cpu"]())
    assert {p.seed for p in points} == {0, 1, 2, 3}
    assert {p.seed for p in others} == {0, 1}
    shared = {(p.run.batch_size, p.run.model.layers, p.run.model.context, p.run.eval_batches) for p in points + others}
    assert len(shared) == 1
    gpu = frontier_vision.points(RECIPES["frontier_vision"].scales["gpu"]())
    assert len({p.name for p in gpu}) == len(gpu) == 5


def test_a_folder_tells_runs_apart():
    assert alphas(0.01, [0.1]) == [5.0, 10.0, "auto"]
    names = {
        folder_name(optimizer, Optimization(lr=1e-3, alpha=alpha), "seed0", settings)
        for optimizer in ("adamw", "horst")
        for alpha in (5.0, "auto")
        for settings in ([1], [2])
    }
    assert len(names) == 6, "AdamW has no alpha"
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
    monkeypatch.setattr(auto_alpha, "MAX_RATE", 2 * auto_alpha.MAX_RATE)
    assert load_or_run(path, {"alpha": "auto"}, lambda: {"found": 2})["found"] == 2
