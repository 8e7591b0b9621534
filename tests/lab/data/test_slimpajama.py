"""SlimPajama-6B's cut, on a small dataset with its columns."""

import json

import numpy as np
import pytest

from horst.lab.data.tokenization import tokenize_slimpajama

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def small():
    texts = [f"document {i}" for i in range(4000)]
    meta = [{"redpajama_set_name": "RedPajamaC4"}] * len(texts)
    return datasets.Dataset.from_dict({"text": texts, "meta": meta, "__index_level_0__": range(len(texts))})


def documents(path):
    tokens = np.fromfile(path, dtype="<u2")
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)  # each closed by its end-of-text; the last is empty
    return [bytes(part[:-1].astype(np.uint8)).decode() for part in parts[:-1]]


def test_the_cut_and_the_order_are_those_of_train_test_split(small, tmp_path):
    out = tokenize_slimpajama(tmp_path / "slim", dataset=small, tokenizer="bytes")
    parts = small.train_test_split(test_size=0.0005, seed=2357)
    assert documents(out / "train.bin") == parts["train"]["text"][:]
    assert documents(out / "val.bin") == parts["test"]["text"][:]
    assert len(parts["test"]) == 2
    meta = json.loads((out / "meta.json").read_text())
    assert meta["split"] == {
        "rule": "datasets.train_test_split of the train split", "test_size": 0.0005, "seed": 2357,
    }  # fmt: skip
    assert meta["sources"][0]["rows"] == 4000


def test_by_its_name_the_train_split_is_loaded(small, tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return small

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    out = tokenize_slimpajama(tmp_path / "slim", tokenizer="bytes")
    assert asked == [("DKYoon/SlimPajama-6B", "train")]
    assert json.loads((out / "meta.json").read_text())["sources"][0]["dataset"] == "DKYoon/SlimPajama-6B"


def test_a_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"must be a datasets\.Dataset or its name on the Hub, got the file"):
        tokenize_slimpajama(tmp_path / "slim", dataset=tmp_path / "a.txt")
