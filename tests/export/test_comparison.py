"""The comparison: rows with the right sizes, and plain words about what did not get faster."""

import pytest
import torch
import transformers
from torch import nn

from horst.cli.export_report import best_first
from horst.export import compare, comparison, forms, sparse_linear
from horst.export.plan import Plan


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


def test_inputs_that_fail_leave_no_hooks_behind():
    model = pruned_model()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compare(model, torch.randn(3, 5))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_notes_say_what_does_not_get_faster(monkeypatch):
    seen = []

    def always(weight, tokens):
        seen.append(tuple(tokens))
        return Plan({1: {"dense": 1.0, "bag": 0.1}})

    monkeypatch.setattr(sparse_linear, "plan_for", always)
    times = [2.0, 1.0, 9.0]
    monkeypatch.setattr(comparison, "interleaved_times", lambda calls, seconds: dict.fromkeys(calls, times))
    result = compare(pruned_model(), torch.randn(3, 4, 256))
    assert set(seen) == {(12,)}  # the tokens of the example
    text = result.markdown()
    assert "| dense | 0.53 MB | 1.000 | 0.53 MB | 1.000 | 2000.000 | 1.00 | 0.0e+00 |" in text
    assert "- sparse-linear is not faster than dense for these inputs in one call: 1.00 times." in text
    assert "- sparse-linear runs 2 layers with 100% of the parameters sparse" in text
    assert "Loaded, the model is dense again: same memory, same time." in text


def test_a_form_that_changes_nothing_has_no_speed_of_its_own(monkeypatch):
    monkeypatch.setattr(sparse_linear, "plan_for", lambda weight, tokens: Plan({1: {"dense": 1.0, "bag": 2.0}}))
    result = compare(pruned_model(), torch.randn(3, 4, 256), seconds=0.01)
    dense, _, sparse = result.rows
    assert dense["milliseconds"] > 0
    assert (sparse["milliseconds"], sparse["speedup"], sparse["max_error"]) == (None, None, 0.0)
    assert any(note.startswith("sparse-linear changes nothing here: no layer was") for note in result.notes)
    assert not any("not faster" in note for note in result.notes)
    rows = [{**row, "inputs_per_s": row["milliseconds"] and 1e3 / row["milliseconds"]} for row in result.rows]
    assert [row["form"] for row in best_first(rows)] == ["sparse-safetensors", "dense", "sparse-linear"]


def test_onnx_is_measured_too():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = compare(pruned_model(), [torch.randn(3, 256)], forms=("onnx",), seconds=0.01)
    assert [row["form"] for row in result.rows] == ["dense", "onnx"]
    assert result.rows[1]["max_error"] < 1e-4
    assert 0.9 < result.rows[1]["file_ratio"] < 1.1
    assert "onnx stores and multiplies the zeros" in result.markdown()


def tiny_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).eval()
    for name, parameter in model.named_parameters():
        if "c_" in name and parameter.dim() == 2:
            parameter.data.masked_fill_(torch.rand(parameter.shape) < 0.9, 0)
    return model


def test_language_models_generate_in_every_form_that_runs(monkeypatch):
    seen = []

    def always(weight, tokens):
        seen.append(tuple(tokens))
        return Plan({1: {"dense": 1.0, "bag": 0.1}})

    monkeypatch.setattr(sparse_linear, "plan_for", always)
    model, tokens = tiny_gpt2(), torch.randint(100, (1, 12))
    names = ("dense-bfloat16", "sparse-safetensors", "sparse-linear", "sparse-linear-int8-head")
    result = compare(
        model, {"input_ids": tokens, "use_cache": False}, forms=names, seconds=0.01, new_tokens=3,
        evaluate=lambda one: {"mean": float(one(tokens).logits.double().mean())},
    )  # fmt: skip
    rows = {row["form"]: row for row in result.rows}
    assert list(rows) == ["dense", *names]
    assert set(seen) == {(1, 12)}  # one token when generating, twelve in the call
    assert all((row["tokens_per_s"] is None) == (name == "sparse-safetensors") for name, row in rows.items())
    assert rows["sparse-linear"]["generation_speedup"] == (
        rows["sparse-linear"]["tokens_per_s"] / rows["dense"]["tokens_per_s"]
    )
    assert rows["dense-bfloat16"]["file_ratio"] == pytest.approx(0.5, abs=0.05)
    assert 0 < rows["sparse-linear-int8-head"]["max_error"] < 0.05
    assert rows["sparse-linear-int8-head"]["memory_bytes"] < rows["sparse-linear"]["memory_bytes"]
    assert rows["sparse-safetensors"]["mean"] == rows["dense"]["mean"]
    assert rows["dense-bfloat16"]["mean"] not in (None, rows["dense"]["mean"])
    assert "| tokens per s | times faster | mean |" in result.markdown()


def test_what_cannot_be_made_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(forms, "load_extra", lambda name: (_ for _ in ()).throw(ImportError(f"no {name}\nat all")))
    result = compare(
        pruned_model(), torch.zeros(2, 256), forms=("sparse-linear-int8-head", "onnx", "2:4"), seconds=0.01
    )
    assert [row["form"] for row in result.rows] == ["dense"]
    left_out = [note for note in result.notes if "left out" in note]
    assert left_out[0].startswith("sparse-linear-int8-head is left out: quantize_head takes a language model")
    assert left_out[1] == "onnx is left out: no onnxruntime."
    assert left_out[2].startswith("2:4 is left out: ")


@pytest.mark.parametrize("values", ["bfloat16", "int8", "int4"])
def test_rounded_files_are_measured_as_loaded(values):
    name = f"sparse-safetensors-{values}"
    model = pruned_model()
    result = compare(model, torch.randn(3, 256), forms=("sparse-safetensors", name), seconds=0.01)
    _, exact, rounded = result.rows
    assert rounded["file_bytes"] < exact["file_bytes"]
    assert rounded["max_error"] > 0
    assert rounded["milliseconds"] is None


def test_a_file_whose_head_is_rounded_too_is_smaller():
    config = transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=256, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    names = ("sparse-safetensors-int8", "sparse-safetensors-int8-int8-head")
    result = compare(model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)}, forms=names, seconds=0.01)
    _, matrices, both = result.rows
    assert both["file_bytes"] < matrices["file_bytes"]
    assert both["max_error"] > matrices["max_error"] > 0


def test_generation_needs_a_model_that_generates():
    with pytest.raises(ValueError, match="new_tokens is for models with a method generate"):
        compare(pruned_model(), torch.zeros(1, 256), new_tokens=2)


def test_unknown_forms_are_refused():
    with pytest.raises(ValueError, match=r"forms must be among dense, .*got \['csv'\]"):
        compare(pruned_model(), torch.zeros(1, 256), forms=("csv",))
