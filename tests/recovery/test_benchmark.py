"""The benchmark of recovery runs on a CPU with a tiny model."""

import json
import pathlib
import runpy
import sys

import pytest
import torch

import horst
from horst.cli.models import load_model
from horst.lab.data.token_files import open_tokens
from horst.lab.data.tokenization import write_token_files
from horst.training import LoopConfig, perplexity

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_sparsify.py"


@pytest.fixture
def words(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(  # as SmolLM2: grouped queries, a tied head, weights in bfloat16
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    texts = ((split, "the quick brown fox " * 60) for split in ["train"] * 4 + ["val"])
    write_token_files(texts, tmp_path / "tokens", tokenizer="bytes")
    files = ("--train", str(tmp_path / "tokens/train.bin"), "--test", str(tmp_path / "tokens/val.bin"))
    sizes = ("--tokens", "256", "--batch", "4", "--context", "16", "--device", "cpu")
    return [str(SCRIPT), str(tmp_path / "tiny"), *files, *sizes, "--out", str(tmp_path / "out.json")]


def rows(words, monkeypatch, *more):
    monkeypatch.setattr(sys, "argv", [*words, *more])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(pathlib.Path(words[-1]).read_text())["rows"]


def test_one_shot_pruning_has_a_row_per_method_and_pattern(words, monkeypatch):
    found = rows(words, monkeypatch, "--contender", "one-shot", "--then", "2:4")
    methods = ["magnitude", "wanda", "sparsegpt"]
    assert [(row["pattern"], row["method"]) for row in found] == [
        ("0", "dense"), *(("0.6", name) for name in methods), *(("2:4", name) for name in methods),
    ]  # fmt: skip
    assert all(row["sparsity_of_pruned_layers"] >= 0.5 for row in found[1:])


@pytest.mark.parametrize("contender", ["horst-l1", "admm", "cast"])
def test_the_learning_rate_of_the_first_pattern_serves_the_others(contender, words, monkeypatch):
    found = rows(
        words, monkeypatch, "--contender", contender, "--lrs", "1e-4", "1e-2", "--tune", "2:4", "--then", "0.5"
    )
    first, second, other = found
    best = min((first, second), key=lambda row: row["validation"])
    assert (first["lr"], second["lr"], other["lr"]) == (1e-4, 1e-2, best["lr"])
    assert all(row["sparsity_of_pruned_layers"] >= 0.5 for row in found)  # l1 makes more zeros
    assert first["test"] != second["test"]


def test_contenders_take_turns_and_share_what_one_pruning_left(words, monkeypatch):
    found = rows(
        words, monkeypatch, "--contender", "adamw", "horst", "one-shot", "--lrs", "1e-3", "3e-3", "--then", "2:4"
    )
    trained = [(row["contender"], row["pattern"]) for row in found if row["contender"] != "one-shot"]
    assert trained == [("adamw", "0.6"), ("horst", "0.6")] * 2 + [("adamw", "2:4"), ("horst", "2:4")]
    pruned = {row["pattern"]: row["test"] for row in found if row.get("method") == "sparsegpt"}
    assert all(row["pruned_test"] == pruned[row["pattern"]] for row in found if "lr" in row)
    assert all(row["tokens_per_second"] is None or row["tokens_per_second"] > 0 for row in found if "lr" in row)
    # the same as one call for the dense model
    row = next(row for row in found if row["contender"] == "horst")
    model = load_model(pathlib.Path(words[1])).model.float()
    tokens = open_tokens(words[3]).tokens
    windows = torch.from_numpy(tokens[: len(tokens) // 16 * 16].astype("int32")).view(-1, 16)
    loop = LoopConfig(precision="float32", clip_norm=1.0)
    horst.sparsify(model, windows, sparsity=0.6, lr=1e-3, tokens=256, batch_size=4, loop=loop)
    text = torch.from_numpy(open_tokens(words[5]).tokens.astype("int64"))
    text = text[: len(text) // 16 * 16].view(-1, 16)
    assert perplexity(model, [(text[:, :-1], text[:, 1:])])["perplexity"] == pytest.approx(row["test"], rel=1e-5)


def test_a_contender_takes_over_a_learning_rate(words, monkeypatch):
    also = ("--also", "horst-l1=horst@0.7", "ast=horst@2:4")
    found = rows(words, monkeypatch, "--contender", "horst", "--lrs", "1e-3", "1e-2", "--then", "2:4", *also)
    trained = [(row["contender"], row["pattern"]) for row in found]
    assert trained == [("horst", "0.6")] * 2 + [("horst", "2:4"), ("horst-l1", "0.7"), ("ast", "2:4")]
    best = min(found[:2], key=lambda row: row["validation"])
    assert {row["lr"] for row in found[2:]} == {best["lr"]}


def test_a_run_that_cannot_be_read_is_refused(words, monkeypatch):
    with pytest.raises(SystemExit, match=r"NAME=TUNED@PATTERN.*'sgd=adamw@2:4'"):
        rows(words, monkeypatch, "--contender", "adamw", "--lrs", "1e-3", "--also", "sgd=adamw@2:4")


def test_no_run_begins_when_the_time_is_up(words, monkeypatch):
    assert len(rows(words, monkeypatch, "--contender", "one-shot", "horst", "--seconds", "0")) == 1
    result = json.loads(pathlib.Path(words[-1]).read_text())
    assert result["notes"] == ["Stopped after 0 s: not all runs were made."]


def test_a_rate_that_breaks_down_is_noted_and_not_chosen(words, monkeypatch):
    broken, good, other = rows(words, monkeypatch, "--contender", "adamw", "--lrs", "1e30", "1e-3", "--then", "2:4")
    assert "Lower the learning rate" in broken["failed"]
    assert (good["lr"], other["lr"]) == (1e-3, 1e-3)
