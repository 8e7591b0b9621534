"""The comparison: rows with the right sizes, and plain words about what did not get faster."""

import pytest
import torch
from torch import nn

from horst.export import compare, comparison, sparse_linear
from horst.export.cpu_kernels import Plan


def pruned_model():
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(), nn.Linear(256, 256, bias=False)).train()
    for layer in (model[0], model[3]):
        layer.weight.data.masked_fill_(torch.rand(256, 256) < 0.9, 0)
    return model


def test_rows_are_sizes_and_ratios(monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: Plan({1: {"dense": 1.0, "bag": 0.1}}))
    model = pruned_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = compare(model, torch.randn(3, 4, 256), seconds=0.01)
    dense, file, sparse = result.rows
    assert [row["form"] for row in result.rows] == ["dense", "sparse-safetensors", "sparse-linear"]
    nnz = sum(int((model[i].weight != 0).sum()) for i in (0, 3))
    assert dense["memory_bytes"] == 4 * (2 * 256 * 256 + 256)
    assert sparse["memory_bytes"] == 8 * nnz + 4 * (2 * 257 + 256)
    assert 4 * nnz + 2 * 256 * 256 // 8 < file["file_bytes"] < 0.15 * dense["file_bytes"]
    assert file["file_ratio"] == file["file_bytes"] / dense["file_bytes"]
    assert (dense["speedup"], dense["max_error"], file["milliseconds"]) == (1.0, 0.0, None)
    assert sparse["speedup"] == dense["milliseconds"] / sparse["milliseconds"]
    assert sparse["max_error"] < 1e-5
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_notes_say_what_does_not_get_faster(monkeypatch):
    seen = []

    def never(weight, tokens):
        seen.append(tuple(tokens))
        return Plan({1: {"dense": 1.0, "bag": 2.0}})

    monkeypatch.setattr(sparse_linear, "plan_for", never)
    times = [2.0, 1.0, 9.0]
    monkeypatch.setattr(comparison, "interleaved_times", lambda calls, seconds: dict.fromkeys(calls, times))
    result = compare(pruned_model(), torch.randn(3, 4, 256))
    assert set(seen) == {(12,)}  # the tokens of the example
    text = result.markdown()
    assert "| dense | 0.53 MB | 1.000 | 0.53 MB | 1.000 | 2000.000 | 1.00 | 0.0e+00 |" in text
    assert "- sparse-linear is not faster than dense here: 1.00 times." in text
    assert "- sparse-linear runs 0 layers with 0% of the parameters sparse" in text
    assert "Loaded, the model is dense again: same memory, same time." in text


def test_onnx_is_measured_too():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = compare(pruned_model(), [torch.randn(3, 256)], forms=("onnx",), seconds=0.01)
    assert [row["form"] for row in result.rows] == ["dense", "onnx"]
    assert result.rows[1]["max_error"] < 1e-4
    assert 0.9 < result.rows[1]["file_ratio"] < 1.1
    assert "onnx stores and multiplies the zeros" in result.markdown()


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match=r"forms must be among dense, .*got \['csv'\]"):
        compare(pruned_model(), torch.zeros(1, 256), forms=("csv",))
