"""A run is itself and no other: neither its checkpoint nor its outcome serves other settings or other data."""

import dataclasses
import itertools
import json
import shutil
import typing

import numpy as np
import PIL.Image
import pytest
import torch

from horst.lab.baselines.contenders import Name, Optimization
from horst.lab.data.tokenization import tokenize
from horst.lab.experiments import identity, language_model, table1_deit_acdc, table6_gpt2_one_shot, vision_model
from horst.lab.experiments.language_model import LanguageConfig
from horst.lab.experiments.recipes import RECIPES
from horst.lab.experiments.result import to_json
from horst.lab.experiments.vision_model import VisionConfig
from horst.lab.models.deit import DeiTConfig
from horst.lab.models.gpt2 import GPT2, GPT2Config
from horst.training import CheckpointError, World
from horst.training.checkpoint import find_checkpoint


def changed(config, **changes):
    """A config with fields of its run, or of the run's model or loop, changed."""
    run = config.run
    for part in ("model", "loop"):
        inner = {name: changes.pop(name) for name in list(changes) if hasattr(getattr(run, part), name)}
        run = dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **inner)})
    return dataclasses.replace(config, run=dataclasses.replace(run, **changes))


def tiny_vision(folder, **changes):
    config = RECIPES["table1"].scales["cpu"]()
    model = DeiTConfig(image_size=8, patch_size=4, channels=1, classes=10, width=16, depth=1, heads=2)
    config = dataclasses.replace(config, directory=folder, optimizers=("adamw",), sparsities=(0.5,))
    return changed(dataclasses.replace(config, run=dataclasses.replace(config.run, model=model)), epochs=1, **changes)


def tiny_language(folder, data, **changes):
    config = RECIPES["table6"].scales["cpu"]()
    model = dataclasses.replace(config.run.model, layers=3, width=16, heads=2, context=16)
    run = dataclasses.replace(config.run, data=data, model=model, steps=4, warmup_steps=2, batch_size=4)
    config = dataclasses.replace(config, run=run, directory=folder, optimizers=("adamw",), sparsities=(0.5,))
    return changed(config, **changes)


def tokens(folder, word):
    text = folder / "text.jsonl"
    text.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"id": i, "text": f"{word} {i:03} is followed by {i + 1:03}. " * 8} for i in range(60)]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tokenize(text, folder / "tokens", tokenizer="bytes", validation=0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A vision and a language run with their checkpoints: folders, the data, and their rows."""
    folder = tmp_path_factory.mktemp("runs")
    data = tokens(folder, "one")
    vision = table1_deit_acdc.run(tiny_vision(folder / "vision", checkpoint_every=1)).rows
    language = table6_gpt2_one_shot.run(tiny_language(folder / "language", data, checkpoint_every=4)).rows
    return folder, data, vision, language


@pytest.mark.parametrize(
    "change",
    [
        {"mixup": 0.8}, {"cutmix": 1.0}, {"smoothing": 0.1}, {"padding": 2}, {"flip": True}, {"restore": "values"},
        {"heads": 4}, {"drop_path": 0.1}, {"class_token": False},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_vision_run_is_not_relabelled(trained, change):
    folder, *_ = trained
    ((name, value),) = change.items()
    with pytest.raises(CheckpointError, match=rf"belongs to another run: .*{name} was .*, is {value!r}.*directory"):
        table1_deit_acdc.run(tiny_vision(folder / "vision", checkpoint_every=1, **change))


@pytest.mark.parametrize(
    "change", [{"heads": 4}, {"gelu": "tanh"}, {"dropout": 0.1}, {"eval_batches": 1}], ids=lambda c: next(iter(c))
)
def test_a_language_run_is_not_relabelled(trained, change):
    folder, data, *_ = trained
    with pytest.raises(CheckpointError, match="belongs to another run"):
        table6_gpt2_one_shot.run(tiny_language(folder / "language", data, checkpoint_every=4, **change))


def without_clocks(rows):
    return [{key: value for key, value in row.items() if "second" not in key} for row in rows]


def test_what_does_not_change_the_numbers_may_change(trained):
    folder, data, vision, language = trained
    again = tiny_vision(folder / "vision", checkpoint_every=1, compile="off", workers=1, eval_every=1)
    assert without_clocks(table1_deit_acdc.run(again).rows) == without_clocks(vision)
    again = tiny_language(folder / "language", data, checkpoint_every=2, log_every=1, loss_rows=64, eval_batch_size=9)
    found = without_clocks(table6_gpt2_one_shot.run(again).rows)
    assert [row["perplexity"] for row in found] == pytest.approx([row["perplexity"] for row in language], rel=1e-6)


def test_what_only_logs_and_loads_leaves_a_finished_run_as_it_is(trained, tmp_path, monkeypatch):
    _, data, *_ = trained
    vision = table1_deit_acdc.run(tiny_vision(tmp_path / "vision")).rows
    language = table6_gpt2_one_shot.run(tiny_language(tmp_path / "language", data)).rows
    monkeypatch.setattr(table1_deit_acdc, "train_sparse_vision_model", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(table6_gpt2_one_shot, "train_language_model", lambda *_: pytest.fail("trained again"))
    silent = {"log_every": 7, "keep_checkpoints": 5, "tensorboard": True, "compile": "off"}
    assert table1_deit_acdc.run(tiny_vision(tmp_path / "vision", workers=3, **silent)).rows == vision
    assert table6_gpt2_one_shot.run(tiny_language(tmp_path / "language", data, **silent)).rows == language


def test_weights_of_an_earlier_step_are_not_those_of_the_run(trained, tmp_path):
    _, data, *_ = trained
    table6_gpt2_one_shot.run(tiny_language(tmp_path, data, checkpoint_every=2))
    (run,) = tmp_path.glob("adamw-*")
    earlier, last = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 4))
    assert find_checkpoint(run) == last
    shutil.rmtree(last)
    with pytest.raises(ValueError, match="is of step 2 of 4: the run was interrupted there, or broke down later"):
        find_checkpoint(run)
    assert find_checkpoint(earlier) == earlier, "asked for by itself it is taken"
    shutil.rmtree(earlier)
    assert find_checkpoint(run) is None


def test_a_beginning_of_the_validation_file_is_the_same_text_on_any_number_of_processes(trained):
    _, data, *_ = trained
    config = tiny_language("unused", data, eval_batch_size=4, eval_batches=3).run

    def scored(size):
        worlds = [World(rank=rank, size=size, device=torch.device("cpu")) for rank in range(size)]
        shares = [list(itertools.islice(language_model._validation(config, world), 3)) for world in worlds]
        return sum(int((targets != -100).sum()) for share in shares for _, targets in share)

    assert scored(1) == scored(2) == scored(4) > 0


def test_a_run_under_other_settings_is_made_again_where_there_is_no_checkpoint(tmp_path):
    first, other = (table1_deit_acdc.run(tiny_vision(tmp_path, padding=padding)).rows for padding in (1, 2))
    assert first[0]["top1"] != other[0]["top1"]


def test_tokens_in_a_folder_of_the_same_name_are_other_data(trained, tmp_path):
    folder, _, _, rows = trained
    other = tokens(tmp_path, "two")  # as many bytes
    found = table6_gpt2_one_shot.run(tiny_language(tmp_path / "runs", other)).rows
    with pytest.raises(CheckpointError, match=r"task\.data\.digest was"):
        table6_gpt2_one_shot.run(tiny_language(folder / "language", other, checkpoint_every=4))
    again = table6_gpt2_one_shot.run(tiny_language(tmp_path / "runs", tokens(tmp_path / "deeper", "six"))).rows
    assert len({rows[0]["perplexity"], found[0]["perplexity"], again[0]["perplexity"]}) == 3


def test_images_in_a_file_of_the_same_name_are_other_data(tmp_path):
    random = np.random.default_rng(0)
    labels = np.arange(128) % 10
    found = []
    for name in ("a", "b"):
        images = random.integers(256, size=(128, 8, 8), dtype=np.uint8)
        (tmp_path / name).mkdir()
        file = tmp_path / name / "images.npz"
        np.savez(file, images=images, labels=labels, test_images=images[:50], test_labels=labels[:50])
        config = tiny_vision(tmp_path / "runs", dataset="npz", data=file, batch_size=4)
        found.append(table1_deit_acdc.run(config).curves["histograms"]["0.5"]["adamw"]["density"])
    assert found[0] != found[1]


def test_folders_of_images_are_told_apart_without_being_read(tmp_path):
    def made(name, shape=(8, 8), last="2"):
        for split in ("train", "val"):
            for file in ("cat/1", f"dog/{last}"):
                path = tmp_path / name / split / f"{file}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                PIL.Image.new("RGB", shape).save(path)
        return identity.image_folders(tmp_path / name)

    first = made("imagenet")
    assert first["files"] == {"train": 2, "val": 2}
    assert made("elsewhere/imagenet") == first, "where the folder lies does not matter"
    assert made("renamed", last="3") != first
    assert made("resized", shape=(300, 300)) != first


def test_shards_are_told_apart_by_names_and_sizes(tmp_path):
    for name, size in (("a", 10), ("b", 10), ("c", 20)):
        for split in ("train", "val"):
            (tmp_path / name / split).mkdir(parents=True)
            (tmp_path / name / split / "0.tar").write_bytes(bytes(size))
    a, b, c = (identity.image_folders(tmp_path / name) for name in "abc")
    assert a == b != c


def test_another_contenders_strength_does_not_make_a_run_another():
    """What the settings of a contender leave out, its optimizer does not have either; and the other way round."""

    def groups(optimization, name):
        torch.manual_seed(0)
        model = GPT2(GPT2Config(layers=2, heads=2, width=8, context=8, vocabulary=16))
        optimizer = optimization.make(model, name, steps=10)
        masks = optimization.masks(model, optimizer, name)
        weights = [p.detach().tolist() for p in model.parameters()]  # some draw their own
        found = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
        return found, weights, masks and masks.sparsity

    assert {"alpha", "beta", "l1", "penalty"} < identity.STRENGTHS
    others = {"dwf_depth": 4, "sign_in_every": 7}
    for name in typing.get_args(Name):
        if name == "pat":  # of another package
            continue
        for field in identity.STRENGTHS:
            one, other = Optimization(), Optimization(**{field: others.get(field, 0.031)})
            same = one.settings(name) == other.settings(name)
            assert same == (name not in Optimization.__dataclass_fields__[field].metadata["read_by"])
            assert same == (groups(one, name) == groups(other, name)), (name, field)


def test_a_table_with_another_alpha_keeps_adamws_runs(tmp_path, monkeypatch):
    config = tiny_vision(tmp_path)
    rows = table1_deit_acdc.run(config).rows
    config = changed(config, optimization=dataclasses.replace(config.run.optimization, alpha=20.0))
    monkeypatch.setattr(table1_deit_acdc, "train_sparse_vision_model", lambda *_: pytest.fail("trained again"))
    assert table1_deit_acdc.run(config).rows == rows


def test_what_does_not_decide_is_what_may_change_when_a_run_is_resumed():
    left_out = {
        "compile", "parallel", "workers", "log_every", "keep_checkpoints", "tensorboard", "wandb", "accumulate",
        "attention", "loss_rows", "deterministic", "eval_batch_size", "eval_batches", "eval_every", "checkpoint_every",
    }  # fmt: skip
    for kind in (LanguageConfig, VisionConfig):
        config = dataclasses.asdict(kind())
        assert names(config) - names(identity.deciding(config)) == left_out & names(config)
    table = to_json(dataclasses.asdict(RECIPES["table1"].scales["paper"]()))
    assert {*table} - {*identity.deciding(table)} == {"seeds", "optimizers", "sparsities", "directory"}


def names(config):
    found = {name for value in config.values() if isinstance(value, dict) for name in names(value)}
    return found | set(config)


def test_a_data_set_is_read_and_hashed_once(tmp_path, monkeypatch):
    reads, hashes = [], []
    read, hashed = vision_model.read_digits, identity.image_data
    monkeypatch.setattr(vision_model, "read_digits", lambda: reads.append(1) or read())
    monkeypatch.setattr(identity, "image_data", lambda data: hashes.append(1) or hashed(data))
    vision_model._read.cache_clear()
    config = dataclasses.replace(tiny_vision(tmp_path), optimizers=("adamw", "horst"))
    assert len(table1_deit_acdc.run(config).rows) == 2
    assert (reads, hashes) == ([1], [1])


def test_tokens_that_changed_in_their_folder_are_hashed_again(tmp_path):
    first = identity.token_data(tokens(tmp_path, "one"))
    shutil.rmtree(tmp_path / "tokens")
    assert identity.token_data(tokens(tmp_path, "two")) != first
