"""DeiT: timm's weights, counts and outputs, and the fields that change how it is computed."""

import dataclasses
import inspect
import pickle
import types

import pytest
import timm
import torch
from torch import nn
from torch.testing import assert_close

from horst.export import export_onnx
from horst.lab.models.deit import DeiTConfig, PatchConv2d, ShortAttention, build_deit
from horst.sparsity.layers import find_layers

DEIT = {
    "deit_tiny_patch16_224": DeiTConfig(width=192, heads=3),
    "deit_small_patch16_224": DeiTConfig(width=384, heads=6),
    "deit_base_patch16_224": DeiTConfig(width=768, heads=12),
    "deit_base_patch16_384": DeiTConfig(width=768, heads=12, image_size=384),
}
SMALL = DeiTConfig(image_size=8, patch_size=2, classes=5, width=16, depth=2, heads=2)


def weights(layers):
    return sum(layer.param.numel() for layer in layers)


def on_meta(config):
    with torch.device("meta"):
        return build_deit(config)


@pytest.mark.parametrize(
    ("name", "blocks", "head"),
    [
        ("deit_tiny_patch16_224", 5_308_416, 192_000),
        ("deit_small_patch16_224", 21_233_664, 384_000),
        ("deit_base_patch16_224", 84_934_656, 768_000),
    ],
)
def test_prunable_weights_of_the_paper(name, blocks, head):
    model = on_meta(DEIT[name])
    assert weights(find_layers(model, "blocks")) == blocks
    assert weights(find_layers(model, "all_linear")) == blocks + head


@pytest.mark.parametrize("name", DEIT)
def test_a_named_model_has_the_parameters_of_timms(name):
    with torch.device("meta"):
        reference = timm.create_model(name)
    ours = on_meta(DEIT[name])
    assert [(n, p.shape) for n, p in ours.named_parameters()] == [(n, p.shape) for n, p in reference.named_parameters()]


def test_a_seed_gives_timms_initial_weights_and_its_logits():
    config = DeiTConfig(width=192, heads=3, image_size=32, patch_size=8, classes=7)
    torch.manual_seed(3)
    reference = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=7).eval()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = build_deit(config).eval()
    assert torch.equal(torch.get_rng_state(), state)
    for (name, p), (_, q) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    x = torch.randn(2, 3, 32, 32)
    assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)


def test_weights_go_to_timm_and_back():
    config = DeiTConfig(width=192, heads=3, image_size=32, patch_size=8, depth=1, classes=7)
    ours = build_deit(config).eval()
    reference = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=7).eval()
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert_close(ours(x), reference(x), rtol=1e-5, atol=1e-5)
    build_deit(config).load_state_dict(reference.state_dict())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_patches_as_a_matrix_product_are_the_convolution(bias, memory_format):
    conv = nn.Conv2d(3, 5, kernel_size=(2, 3), stride=(2, 3), bias=bias, dtype=torch.float64)
    patch = PatchConv2d.from_conv(conv)
    x = torch.randn(4, 3, 8, 6, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    upstream = torch.randn(4, 5, 4, 2, dtype=torch.float64)
    expected = torch.autograd.grad((conv(x) * upstream).sum(), [x, *conv.parameters()])
    assert_close(patch(x), conv(x))
    assert_close(torch.autograd.grad((patch(x) * upstream).sum(), [x, *patch.parameters()]), expected)


def test_patches_share_the_convolutions_parameters():
    conv = nn.Conv2d(3, 5, kernel_size=2, stride=2)
    patch = PatchConv2d.from_conv(conv)
    assert patch.weight is conv.weight
    assert patch.bias is conv.bias


@pytest.mark.parametrize(
    ("attention", "dtype"), [("matmul", torch.float64), ("short", torch.float64), ("short", torch.float32)]
)
def test_all_attentions_are_one_function(attention, dtype, device):
    fused = build_deit(SMALL).to(device, dtype)
    other = build_deit(dataclasses.replace(SMALL, attention=attention)).to(device, dtype)
    other.load_state_dict(fused.state_dict())
    x = torch.randn(3, 3, 8, 8, dtype=dtype, device=device)
    for model in (fused, other):
        model(x).square().sum().backward()
    assert_close(other(x), fused(x))
    for (name, p), q in zip(other.named_parameters(), fused.parameters(), strict=True):
        assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_short_attention_is_for_few_tokens_and_knows_no_masks():
    with pytest.raises(ValueError, match=r"at most 128 tokens .* got 197 and 64"):
        DeiTConfig(attention="short")
    with pytest.raises(ValueError, match="at most 128 wide, got 17 and 192"):
        dataclasses.replace(SMALL, attention="short", width=192, heads=1)
    model = build_deit(dataclasses.replace(SMALL, attention="short"))
    with pytest.raises(ValueError, match="no masks"):
        model.blocks[0].attn(torch.zeros(1, 17, 16), attn_mask=torch.ones(17, 17))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"qk_norm": True, "norm_layer": nn.LayerNorm}, "q_norm=LayerNorm"),
        ({"scale_norm": True, "norm_layer": nn.LayerNorm}, "norm=LayerNorm"),
        ({"gated": True}, "gate=Linear"),
        ({"attn_drop": 0.1}, r"attn_drop=Dropout\(p=0.1"),
        ({"proj_drop": 0.2}, r"proj_drop=Dropout\(p=0.2"),
    ],
)
def test_short_attention_refuses_what_it_would_leave_out(changes, part):
    known = inspect.signature(timm.layers.Attention).parameters
    if not changes.keys() <= known.keys():
        pytest.skip(f"this timm's attention has no {', '.join(changes.keys() - known.keys())}")
    with pytest.raises(ValueError, match=rf"no norms, dropout or gate, got {part}.*Use attention='fused'"):
        ShortAttention(timm.layers.Attention(16, num_heads=2, **changes))


def test_short_attention_keeps_timms_names():
    attention = timm.layers.Attention(16, num_heads=2)
    assert ShortAttention(attention).num_heads == 2
    older = types.SimpleNamespace(qkv=attention.qkv, proj=attention.proj, num_heads=2)  # knows no norm and no gate
    assert ShortAttention(older).qkv is attention.qkv


def test_short_attention_goes_to_onnx(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build_deit(dataclasses.replace(SMALL, attention="short")).eval()
    x = torch.randn(2, 3, 8, 8)
    session = onnxruntime.InferenceSession(str(export_onnx(model, x, tmp_path / "deit.onnx")))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(found), model(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("attention", ["fused", "matmul"])
def test_the_field_decides_on_attention_and_not_timms_environment(monkeypatch, attention):
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or sdpa(*a, **k)
    )
    timm.layers.set_fused_attn(attention != "fused")
    try:
        build_deit(dataclasses.replace(SMALL, attention=attention))(torch.zeros(1, 3, 8, 8))
    finally:
        timm.layers.set_fused_attn(True)
    assert len(calls) == (SMALL.depth if attention == "fused" else 0)


def test_without_class_token_the_head_reads_the_mean_over_the_patches():
    config = dataclasses.replace(SMALL, class_token=False)
    model = build_deit(config).eval()
    assert model.cls_token is None
    assert model.pos_embed.shape[1] == config.tokens == 16
    x = torch.randn(2, 3, 8, 8)
    features = model.forward_features(x)
    assert_close(model(x), model.head(model.fc_norm(features.mean(dim=1))))


def residual_dtype(config):
    model = build_deit(config)
    seen = []
    model.blocks[-1].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 3, 8, 8))
    model(torch.zeros(1, 3, 8, 8))
    return seen


def test_the_residual_stream_has_the_precision_asked_for():
    assert residual_dtype(SMALL) == [torch.float32, torch.float32]
    assert residual_dtype(dataclasses.replace(SMALL, residual="autocast")) == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    "changes", [{}, {"class_token": False, "attention": "matmul", "residual": "autocast", "drop_path": 0.1}]
)
def test_a_model_is_one_graph_under_autocast(changes):
    model = build_deit(dataclasses.replace(SMALL, **changes))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x).float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_drop_path_grows_to_the_last_block():
    model = build_deit(dataclasses.replace(SMALL, drop_path=0.1, depth=3))
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0.0, 0.05, 0.1])


def test_a_model_is_pickled():
    model = build_deit(SMALL).eval()
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"image_size": 30}, "image_size must be a multiple of patch_size, got 30 and 4"),
        ({"heads": 7}, "width must be a multiple of heads, got 384 and 7"),
        ({"drop_path": 1.0}, r"drop_path must lie in \[0, 1\), got 1.0"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"mlp_ratio": 0.0}, "mlp_ratio must be positive"),
        ({"attention": "flash"}, "attention must be one of fused, matmul, short, got 'flash'"),
        ({"residual": "bf16"}, "residual must be one of float32, autocast, got 'bf16'"),
    ],
)
def test_bad_configs_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        DeiTConfig(**{"image_size": 32, "patch_size": 4, **changes})
