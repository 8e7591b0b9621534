"""The benchmark of generation on a GPU: its ways and rows, here with a small model on a CPU."""

import importlib.util
import itertools
import pathlib

import pytest
import torch
from torch import nn

from horst.export import Plan, SparseLinear
from horst.export.gpu_kernels import LAUNCHES

pytest.importorskip("transformers")
SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "sparse_gpu_models.py"
KERNEL = next(iter(LAUNCHES))
PLAN = Plan({1: {"dense": 1.0, KERNEL: 0.1}})  # for any number of tokens: the interpreter of Triton is slow


def sparse(model):
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and ".layers." in name:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SparseLinear(layer, PLAN))
    return model.eval().requires_grad_(False)


class Report:
    def __init__(self):
        self.rows, self.notes = [], []
        self.add, self.note = self.rows.append, self.notes.append


@torch.no_grad()
def test_each_way_has_a_row_per_form_and_a_failure_leaves_a_note(monkeypatch):
    spec = importlib.util.spec_from_file_location("sparse_gpu_models", SCRIPT)
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    counter = itertools.count(1)
    monkeypatch.setattr(models, "device", torch.device("cpu"))
    monkeypatch.setattr(models, "sparsify", sparse)
    monkeypatch.setattr(models, "NEW_TOKENS", 3)
    monkeypatch.setattr(models, "ROUNDS", 2)
    monkeypatch.setitem(models.MODELS, "1b", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(counter))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fails(found, prompt):
        raise RuntimeError("no such cache\nand more")

    monkeypatch.setitem(models.WAYS, "compiled", ("compiled graph", fails))
    report = Report()
    models.bench_model(report, "1b", 0.9, ["generate", "static", "graph", "compiled"])
    ways = [(row["way"], row["form"]) for row in report.rows]
    assert ways == list(itertools.product(["generate", "generate, static cache", "graph"], ["dense", "sparse"]))
    assert all(row["tokens_per_second"] > 0 and row["sparse_layers"] == 7 for row in report.rows)
    assert report.notes[-1] == "Llama 1b, compiled graph: RuntimeError: no such cache"
