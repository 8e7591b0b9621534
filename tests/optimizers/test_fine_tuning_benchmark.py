"""The benchmark of fine-tuning runs on a CPU with a tiny model."""

import json
import pathlib
import runpy
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_fine_tuning.py"


def test_the_benchmark_writes_a_row_per_optimizer_seed_and_count_of_steps(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = {letter: i for i, letter in enumerate("abcdefgh ")}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(tmp_path / "tiny")
    config = transformers.GPT2Config(vocab_size=9, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "tiny")
    data, out = tmp_path / "articles.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"text": "abcdefgh " * 10}) + "\n" for _ in range(60)))
    words = [str(SCRIPT), str(tmp_path / "tiny"), "--data", str(data), "--out", str(out), "--context", "16"]
    monkeypatch.setattr(sys, "argv", [*words, "--steps", "0", "2", "--seeds", "0"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(out.read_text())
    assert [(row["optimizer"], row["step"]) for row in result["rows"]] == [
        (name, step) for name in ("AdamW", "HORST, alpha 5", "HORST, alpha auto") for step in (0, 2)
    ]
    assert len({row["perplexity"] for row in result["rows"] if row["step"] == 0}) == 1
    assert result["config"]["model"] == "tiny"
    assert "/" not in result["config"]["data"]
