"""The benchmark of file sizes runs on a CPU with a tiny model."""

import json
import pathlib
import runpy
import sys

import numpy as np
import pytest
import transformers

from horst.lab.data.token_files import new_token_folder

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_sizes.py"


@pytest.mark.parametrize("more", [[], ["--sequential"]], ids=["one calibration", "sequential"])
def test_the_benchmark_writes_its_rows(tmp_path, monkeypatch, capsys, more):
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with new_token_folder(tmp_path / "tokens", {"tokenizer": "any", "vocabulary": 64, "end_of_text": 0}) as writer:
        for split in ("train", "test"):
            writer.append(split, np.random.default_rng(0).integers(64, size=600), documents=1)
    words = [tmp_path / "gpt2", "--train", tmp_path / "tokens/train.bin", "--test", tmp_path / "tokens/test.bin"]
    words += ["--sparsities", 0.0, 0.5, 0.9, "--samples", 8, "--context", 16, "--device", "cpu", "--group-size", 32]
    out = tmp_path / "sizes.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words), "--out", str(out), *more])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(capsys.readouterr().out.splitlines()) == 6 + 4 + 2 * 4
    by = {(row["rounding"], row["sparsity"], row["values"]): row for row in rows}
    dense = by["nearest", 0.0, "float32"]
    assert dense["of_float32_in_matrices"] == 1.0
    assert dense["of_dense_float32"] == pytest.approx(1.0, abs=0.1)  # the header of a small file
    assert by["nearest", 0.0, "bfloat16"]["bytes"] / dense["bytes"] == pytest.approx(0.5, abs=0.05)
    assert by["nearest", 0.0, "int3"]["bits_per_weight_in_matrices"] == 3 + 16 / 32
    for values in ("float32", "int8", "int4"):
        sizes = [by["sparsegpt", sparsity, values]["bytes"] for sparsity in (0.5, 0.9)]
        assert sizes[1] < sizes[0] < by["nearest", 0.0, "float32"]["bytes"]
    assert by["sparsegpt", 0.9, "int4"]["zeros_in_matrices"] >= 0.9
    assert all(row["perplexity"] > 1 for row in rows)
