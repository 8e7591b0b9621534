"""ONNX: the graph computes what the model computes."""

import pytest
import torch
from torch import nn

from horst.export import SparseLinear, export_onnx
from horst.export.plan import Plan

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return torch.from_numpy(session.run(None, dict(zip(names, (t.numpy() for t in inputs.values()), strict=True)))[0])


def test_gpt2(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            p.data.masked_fill_(torch.rand(p.shape) < 0.9, 0)
    tokens = torch.randint(0, 64, (2, 8))
    path = export_onnx(model, {"input_ids": tokens, "use_cache": False}, tmp_path / "new" / "gpt2.onnx")
    assert model.training
    assert model.transformer.h[0].training
    assert [p.name for p in path.parent.iterdir()] == ["gpt2.onnx"]
    other = torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        torch.testing.assert_close(run(path, input_ids=other), model.eval()(other).logits, rtol=0, atol=1e-4)


def test_vision_transformer_with_any_batch(tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3, num_classes=10
    ).eval()
    batch = {"x": {0: torch.export.Dim("batch")}}
    path = export_onnx(model, torch.randn(2, 3, 32, 32), tmp_path / "vit.onnx", dynamic_shapes=batch)
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(run(path, x=images), model(images), rtol=0, atol=1e-4)


def test_a_failed_export_writes_nothing(tmp_path):
    class Refuses(nn.Module):
        def forward(self, x):
            raise ArithmeticError("no")

    with pytest.raises(Exception, match="no"):
        export_onnx(Refuses(), torch.zeros(2), tmp_path / "model.onnx")
    sparse = SparseLinear(nn.Linear(4, 4), Plan({1: {"dense": 1.0, "bag": 0.1}}))
    with pytest.raises(ValueError, match="Export the dense model, before sparsify"):
        export_onnx(sparse, torch.zeros(2, 4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
