"""The comparisons end to end at toy size: tries, winners, fresh seeds, a kill in between, a breakdown."""

import dataclasses

import pytest

from horst.lab.data.token_files import open_tokens
from horst.lab.experiments import compare, compare_runs, table6_gpt2_one_shot
from horst.lab.experiments.compare_text import HELD_OUT, LEAST, PIECE, SCORED, byte_tokens
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import Result
from horst.lab.models.deit import DeiTConfig
from horst.lab.models.gpt2 import GPT2
from horst.training import NonFiniteLoss

LINES = ("adamw lr=1e-3,4e-3", "horst-l1 lr=4e-3 l1=0.05,0.2")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(2 * LEAST):
        (folder / f"{i}.txt").write_text(f"{i} is followed by {i + 1}, and {i + 1} by {i + 2}. " * 8)
    return folder


def language(text, folder, **changes):
    config = RECIPES["compare_language"].scales["cpu"]()
    model = dataclasses.replace(config.run.model, layers=2, width=8, heads=2, context=16)
    run = dataclasses.replace(config.run, data=text, model=model, steps=4, warmup_steps=2, batch_size=4, eval_batches=1)
    small = {"contenders": LINES, "tries": 2, "seeds": (1,), "sparsities": (0.5, 0.7)}
    return dataclasses.replace(config, run=run, directory=folder, **{**small, **changes})


def vision(folder, **changes):
    config = RECIPES["compare_vision"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    run = dataclasses.replace(config.run, model=model, epochs=1)
    lines = ("adamw lr=1e-3,1e-2 sparsity=0", "horst lr=1e-2 alpha=5,auto methods=rigl")
    small = {"contenders": lines, "tries": 2, "seeds": (1,)}
    return dataclasses.replace(config, run=run, directory=folder, **{**small, **changes})


def run(config):
    name = "compare_language" if isinstance(config, compare.LanguageComparison) else "compare_vision"
    return RECIPES[name].run(config)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A comparison that ran without a break."""
    return run(language(text, tmp_path_factory.mktemp("whole")))


def without_clocks(result):
    costs = {name: cost["bytes_per_weight"] for name, cost in result.curves["costs"].items()}
    return [result.rows, {**result.curves, "costs": costs}]


def test_every_contender_is_tuned_on_one_seed_and_shown_on_another(whole, tmp_path):
    tries = whole.curves["tries"]
    assert [(each["contender"], each["settings"]) for each in tries] == [
        ("adamw", {"lr": 1e-3}),
        ("adamw", {"lr": 4e-3}),
        ("horst-l1", {"lr": 4e-3, "l1": 0.05}),
        ("horst-l1", {"lr": 4e-3, "l1": 0.2}),
    ]
    for name in ("adamw", "horst-l1"):
        own = [each for each in tries if each["contender"] == name]
        (best,) = [each for each in own if each["chosen"]]
        assert best["criterion"] == min(each["criterion"] for each in own)
        shown = [row for row in whole.rows if row["contender"] == name]
        assert [(row["stage"], row["seed"], row["method"], row["sparsity"]) for row in shown] == [
            (stage, seed, *level)
            for stage, seed in (("try", 0), ("seed", 1))
            for level in (("dense", 0.0), *((m, s) for m in ("magnitude", "sparsegpt") for s in (0.5, 0.7)))
        ]
        (criterion,) = [r for r in shown if (r["stage"], r["method"], r["sparsity"]) == ("try", "sparsegpt", 0.7)]
        assert criterion["perplexity"] == best["criterion"]
        for row in shown:
            assert 0 <= row["sparsity_of_all_weights"] <= row["sparsity_of_pruned_layers"] < 1
            assert row["sparsity_of_pruned_layers"] >= row["sparsity"] - 0.01
    assert whole.curves["runs"] == {"done": 6, "planned": 6}
    assert all(cost["milliseconds_per_step"] > 0 for cost in whole.curves["costs"].values())
    assert Result.load(whole.save(tmp_path / "c.json")).curves["tries"] == tries


def test_a_comparison_that_is_killed_between_runs_loses_nothing(whole, text, tmp_path, monkeypatch):
    original, trained = table6_gpt2_one_shot.train_and_prune, []

    def dies(config, optimizer, seed, *rest):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((optimizer, seed))
        return original(config, optimizer, seed, *rest)

    monkeypatch.setattr(table6_gpt2_one_shot, "train_and_prune", dies)
    config = language(text, tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert trained == [("adamw", 0), ("horst-l1", 0), ("adamw", 0)], "one try of each in turn"

    monkeypatch.setattr(table6_gpt2_one_shot, "train_and_prune", lambda *_: pytest.fail("trained"))
    partial = run(dataclasses.replace(config, train=False))
    assert partial.curves["runs"] == {"done": 3, "planned": 6}
    assert partial.notes[0] == "Partial: 3 of 6 runs are done."
    assert [each["done"] for each in partial.curves["tries"]] == [True, True, True, False]
    assert {(row["contender"], row["stage"]) for row in partial.rows} == {("adamw", "try"), ("horst-l1", "try")}

    again = []
    monkeypatch.setattr(
        table6_gpt2_one_shot, "train_and_prune", lambda *given: again.append(given[1:3]) or original(*given)
    )
    assert without_clocks(run(config)) == without_clocks(whole)
    assert again == [("horst-l1", 0), ("adamw", 1), ("horst-l1", 1)]


def test_what_was_done_on_other_data_is_not_taken(text, tmp_path):
    config = language(text, tmp_path / "runs", contenders=LINES[:1])
    (first, _) = next(compare.contenders_of(config)).tries
    tokens = byte_tokens(text, tmp_path / "runs" / "text")
    point = dataclasses.replace(first, run=dataclasses.replace(first.run, data=tokens))
    assert not compare_runs.is_done(point, config.directory)
    compare_runs.attempt(point, config.sparsities, config.directory, "cpu")
    assert compare_runs.is_done(point, config.directory)
    other = tmp_path / "other"
    other.mkdir()
    for i in range(LEAST):
        (other / f"{i}.txt").write_text(f"another text of {i} words. " * 9)
    elsewhere = byte_tokens(other, tmp_path / "tokens")
    point = dataclasses.replace(point, run=dataclasses.replace(point.run, data=elsewhere))
    assert not compare_runs.is_done(point, config.directory)


def test_a_contender_that_breaks_down_or_fails_is_a_row_that_says_so(text, tmp_path, monkeypatch):
    original = table6_gpt2_one_shot.train_and_prune

    def breaks(config, optimizer, seed, *rest):
        if optimizer == "ham":
            raise NonFiniteLoss("the loss is nan at step 3; all was finite until step 2.")
        if optimizer == "muon":
            raise TypeError("no such option")
        if config.run.optimization.lr == 1e-3:
            raise NonFiniteLoss("the loss is inf at step 1; all was finite until step 0.")
        return original(config, optimizer, seed, *rest)

    monkeypatch.setattr(table6_gpt2_one_shot, "train_and_prune", breaks)
    lines = ("adamw lr=1e-3,4e-3", "ham ham_alpha=50,200", "muon lr=2e-3,4e-3")
    config = language(text, tmp_path / "runs", contenders=lines)
    result = run(config)
    reasons = {
        name: {row.get("broke_down") for row in result.rows if row["contender"] == name}
        for name in result.curves["costs"]
    }
    assert reasons == {"adamw": {None}, "ham": {"the loss is nan at step 3"}, "muon": {"TypeError: no such option"}}
    assert [each["chosen"] for each in result.curves["tries"]] == [False, True, False, False, False, False]
    assert {row["stage"] for row in result.rows if row["contender"] != "adamw"} == {"try"}, "nothing to run again"

    monkeypatch.setattr(table6_gpt2_one_shot, "train_and_prune", original)
    mended = run(config)
    assert all(row["perplexity"] > 1 for row in mended.rows if row["contender"] == "muon"), "an error is tried again"
    assert [row for row in mended.rows if row["contender"] == "ham"] == [
        row for row in result.rows if row["contender"] == "ham"
    ]


def test_the_comparison_of_vision_models_trains_sparse_or_prunes_at_the_end(tmp_path):
    result = run(vision(tmp_path / "runs"))
    found = [(row["contender"], row["stage"], row["method"], row["sparsity"]) for row in result.rows]
    assert found == [
        *(
            ("adamw+one-shot", stage, *level)
            for stage in ("try", "seed")
            for level in (("dense", 0), ("one-shot", 0.9))
        ),
        *(("horst+rigl", stage, "rigl", 0.9) for stage in ("try", "seed")),
    ]
    for row in result.rows:
        assert 0 <= row["top1"] <= 1
        assert row["sparsity_of_pruned_layers"] == pytest.approx(row["sparsity"], abs=0.01)
        assert row["sparsity_of_all_weights"] <= row["sparsity_of_pruned_layers"]
    for name in ("adamw+one-shot", "horst+rigl"):
        own = [each for each in result.curves["tries"] if each["contender"] == name]
        assert next(e["criterion"] for e in own if e["chosen"]) == max(e["criterion"] for e in own)
    assert run(vision(tmp_path / "runs", train=False)).rows == result.rows


def test_given_settings_are_not_tuned(text, tmp_path):
    result = run(language(text, tmp_path, contenders=("adamw lr=1e-3",), tries=1, seeds=(0, 1)))
    assert {(row["stage"], row["seed"]) for row in result.rows} == {("seed", 0), ("seed", 1)}
    assert result.curves["runs"] == {"done": 2, "planned": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": ("adamw lr=1e-3,2e-3,3e-3",)}, "tries=2 over at most two settings; .* has 3 over lr"),
        ({"contenders": ("adamw lr=1e-3,2e-3", "adamw lr=1e-3,4e-3")}, "two lines are for adamw"),
        ({"contenders": ()}, "at least one contender"),
        ({"seeds": (0, 1)}, "tuning_seed=0 must not be among the fresh seeds"),
        ({"tuned_at": 0.6}, "tuned_at=0.6.*must be among sparsities"),
        ({"contenders": ("sgd",)}, "a point begins with a contender"),
    ],
)
def test_a_comparison_that_cannot_be_fair_is_refused(text, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        language(text, tmp_path, **changes)


def test_three_settings_are_too_many(text, tmp_path):
    with pytest.raises(ValueError, match="at most two settings"):
        language(text, tmp_path, contenders=("horst lr=1e-3,2e-3 alpha=5,6 weight_decay=0.1,0.2",), tries=8)


def test_a_name_stands_for_its_line(text, tmp_path):
    config = language(text, tmp_path, contenders=("adamw", "horst-l1"), tries=6)
    found = list(compare.contenders_of(config))
    assert [each.name for each in found] == ["adamw", "horst-l1"]
    assert {len(each.tries) for each in found} == {6}


@pytest.mark.parametrize(
    ("name", "scale"), [("compare_language", "cpu"), ("compare_vision", "cpu"), ("compare_vision", "gpu")]
)
def test_the_recipes_give_every_contender_as_many_tries(name, scale):
    config = RECIPES[name].scales[scale]()
    found = list(compare.contenders_of(config))
    assert found[0].name.startswith("adamw"), "costs are relative to the first"
    assert {len(each.tries) for each in found} == {config.tries} == {6 if scale == "cpu" else 1}
    runs = [point.name for each in found for point in each.tries]
    assert len(set(runs)) == len(runs), "two tries are the same run"
    budgets = {(p.run.batch_size, getattr(p.run, "steps", 0) or p.run.epochs) for c in found for p in c.tries}
    assert len(budgets) == 1


def test_the_gpu_recipe_gives_each_optimizer_the_settings_that_suit_it():
    found = compare.contenders_of(RECIPES["compare_vision"].scales["gpu"]())
    given = {each.name: each.tries[0].run.optimization for each in found}
    assert given["adamw+set"].betas == (0.9, 0.999)
    assert given["adamw+set"].weight_decay == 0.1
    assert {(o.betas, o.weight_decay) for name, o in given.items() if "horst" in name} == {((0.9, 0.95), 1.0)}


def test_the_state_of_adamw_is_two_numbers_per_weight(text, tmp_path):
    adamw, horst = compare.contenders_of(language(text, tmp_path))
    model = GPT2(adamw.tries[0].run.model)
    tensors, weights = len(list(model.parameters())), sum(p.numel() for p in model.parameters())
    expected = 8 + 4 * tensors / weights  # and a counter for each tensor
    assert compare_runs.bytes_per_weight(adamw.tries[0]) == pytest.approx(expected)
    assert compare_runs.bytes_per_weight(horst.tries[0]) == pytest.approx(expected, abs=0.01)


def test_a_folder_of_text_becomes_token_files_once(text, tmp_path):
    tokens = byte_tokens(text, tmp_path / "tokens")
    opened = {split: open_tokens(tokens / f"{split}.bin") for split in ("train", "val")}
    documents = sum(file.documents for file in opened.values())
    assert documents == 2 * LEAST
    assert opened["val"].documents == documents / HELD_OUT
    assert len(opened["val"].tokens) <= (SCORED + 1) * opened["val"].documents
    stamp = (tokens / "train.bin").stat().st_mtime_ns
    assert byte_tokens(text, tmp_path / "tokens") == tokens
    assert (tokens / "train.bin").stat().st_mtime_ns == stamp
    assert byte_tokens(tokens, tmp_path / "elsewhere") == tokens, "a folder of token files is used as it is"


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("not enough")
    with pytest.raises(FileNotFoundError, match=f"1 texts in 1 files .*at least {LEAST}"):
        byte_tokens(tmp_path, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="0 texts in 0 files"):
        byte_tokens(tmp_path / "nowhere", tmp_path / "out")


def test_one_large_file_is_cut_into_pieces(tmp_path):
    (tmp_path / "one.txt").write_text("0123456789" * (PIECE // 10 + 1) * LEAST)
    tokens = byte_tokens(tmp_path, tmp_path / "out")
    counts = [open_tokens(tokens / f"{split}.bin").documents for split in ("train", "val")]
    assert counts[1] >= LEAST / HELD_OUT
    assert sum(counts) > LEAST
