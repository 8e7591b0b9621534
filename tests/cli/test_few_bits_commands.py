"""``horst prune --values`` and ``horst export --values``: zeros and few bits from the shell."""

import json
import pathlib

import pytest
import torch

from horst.export import load_pretrained, read_layout, save_hugging_face


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_prune_and_export_in_few_bits_lose_nothing_between_them(horst, gpt2, texts, method):
    words = ["--method", method, "--sparsity", 0.7]
    if method == "sparsegpt":
        words += ["--data", texts / "text.jsonl", "--samples", 8, "--context", 16]
    assert horst("prune", gpt2, *words, "--values", "int4", "--group-size", 32, "--out", "pruned").code == 0
    record = json.loads(pathlib.Path("pruned/pruning.json").read_text())
    assert (record["values"], record["group_size"]) == ("int4", 32)
    few_bits = ["--values", "int4", "--head-values", "int8", "--group-size", 32]
    shown = horst("export", "pruned", "--to", "sparse-safetensors", *few_bits, "--out", "small", "--json").json
    assert shown["bytes"] == pathlib.Path("small/model.sparse.safetensors").stat().st_size
    rows = {row["tensor"]: row["values"] for row in read_layout("small/model.sparse.safetensors")}
    assert rows["transformer.h.0.mlp.c_fc.weight"] == "int4, groups of 32"
    assert rows["transformer.wte.weight"] == "int8, groups of 32"
    pruned, small = load_pretrained("pruned").state_dict(), load_pretrained("small").state_dict()
    for name, tensor in pruned.items():
        if ".h." in name:
            assert torch.equal(small[name], tensor), name
    assert horst("eval", "small", "--data", texts / "held_out.txt").code == 0


def test_the_directory_says_the_precision(horst, gpt2):
    assert horst("prune", gpt2, "--sparsity", 0.5, "--values", "int8", "--out", "x").code == 0
    assert horst("prune", "x", "--sparsity", 0.5, "--values", "int8").code == 0
    assert pathlib.Path("x-50-int8").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--to", "onnx", "--values", "int8"], "need --to sparse-safetensors, got --to onnx"),
        (["export", "--to", "hugging-face", "--head-values", "int8"], "need --to sparse-safetensors"),
        (["export", "--values", "int8", "--group-size", "0"], "group_size must be at least 1"),
        (["export", "--values", "int5"], "int5"),
        (["prune", "--sparsity", "0.5", "--values", "int8", "--group-size", "0"], "group_size must be at least 1"),
        (["prune", "--pattern", "2:4", "--values", "int8", "--group-size", "30"], "must be a multiple of 4"),
        (["prune", "--sparsity", "0.5", "--values", "q4"], "q4"),
    ],
)
def test_bad_options_are_one_line(horst, gpt2, words, said):
    outcome = horst(words[0], gpt2, *words[1:], "--out", "new")
    assert outcome.code != 0
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert not pathlib.Path("new").exists()


def test_values_need_the_sparse_file(gpt2, tmp_path):
    with pytest.raises(ValueError, match="give sparse=True, too"):
        save_hugging_face(load_pretrained(gpt2), tmp_path / "new", values="int8")
