"""The benchmark of sentence embeddings runs on a CPU with a tiny encoder, and training brings it closer to dense."""

import json
import pathlib
import runpy
import sys

import pytest
import torch
import transformers

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_sentence_embeddings.py"


@pytest.fixture
def words(tmp_path):
    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(45)), "."]
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
    model.save_pretrained(folder)
    numbers = torch.randint(45, (40, 8), generator=torch.Generator().manual_seed(0)).tolist()
    sentences = [" ".join(f"word{i}" for i in row) + "." for row in numbers]
    texts = [" ".join(sentences[i : i + 4]) for i in range(0, 40, 4)]
    data = tmp_path / "text.jsonl"
    data.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)))
    sizes = ("--steps", "40", "--batch", "8", "--length", "16", "--held-out", "4", "--sparsity", "0.5")
    out = ("--device", "cpu", "--out", str(tmp_path / "out.json"))
    return [str(SCRIPT), str(folder), "--data", str(data), *sizes, "--lrs", "3e-3", "--seeds", "0", *out]


def test_training_brings_the_embeddings_closer_to_the_dense_models(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(pathlib.Path(words[-1]).read_text())
    found = {(row["method"], row["training"]): row["test"] for row in result["rows"]}
    ways = [
        ("magnitude", "none"),
        ("wanda", "none"),
        ("sparsegpt", "none"),
        ("sparsegpt", "adamw"),
        ("sparsegpt", "horst"),
    ]
    assert list(found) == ways
    assert all(row["sparsity_of_pruned_layers"] == 0.5 for row in result["rows"])
    assert max(found.values()) <= 1.0 + 1e-6
    assert min(found[way] for way in ways[3:]) > found["sparsegpt", "none"]
    assert result["config"]["sentences"] == 32
