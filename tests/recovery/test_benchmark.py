"""The benchmark of recovery runs on a CPU with a tiny model."""

import json
import pathlib
import runpy
import sys

import pytest
import torch

from horst.lab.data.tokenization import write_token_files

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_sparsify.py"


@pytest.fixture
def words(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
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
