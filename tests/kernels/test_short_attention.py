"""Attention over few tokens, against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import horst.kernels.short_attention as package
from horst.kernels.short_attention import short_attention, short_attention_reference
from horst.kernels.short_attention.reference import split_heads


def value_and_gradient(function, qkv, heads, upstream):
    qkv = qkv.detach().clone().requires_grad_()
    out = function(qkv, heads)
    out.backward(upstream.to(out.dtype))
    return out.detach(), qkv.grad


def random(batch, tokens, heads, head_width, device, dtype=torch.float64, spread=1.0):
    qkv = spread * torch.randn(batch, tokens, 3 * heads * head_width, dtype=torch.float64, device=device)
    upstream = torch.randn(batch, tokens, heads * head_width, dtype=torch.float64, device=device)
    return qkv.to(dtype), upstream.to(dtype)


# one token, fewer than a tile, a tile, one more, the most of the kernel, and what torch computes
@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64, 65, 128])
@pytest.mark.parametrize(("heads", "head_width"), [(1, 1), (2, 16), (3, 24), (1, 64), (1, 128)])
def test_agrees_with_the_formula(tokens, heads, head_width, device):
    qkv, upstream = random(2, tokens, heads, head_width, device, torch.float32)
    expected = value_and_gradient(short_attention_reference, qkv.double(), heads, upstream)
    found = value_and_gradient(short_attention, qkv, heads, upstream)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "head_width", "dtype", "ours"),
    [
        (64, 64, torch.float32, True),
        (65, 64, torch.float32, False),
        (64, 65, torch.float32, False),
        (128, 64, torch.float16, True),
        (64, 128, torch.float16, True),
        (65, 65, torch.float16, False),
        (4, 4, torch.float64, False),
    ],
)
def test_the_kernel_takes_what_fits_on_every_gpu(monkeypatch, tokens, head_width, dtype, ours, device):
    calls = []
    kernel = package._forward
    monkeypatch.setattr(package, "_forward", lambda *a: calls.append(1) or kernel(*a))
    qkv, _ = random(1, tokens, 1, head_width, device, dtype)
    assert short_attention(qkv, 1).shape == (1, tokens, head_width)
    assert len(calls) == ours


def sdpa(qkv, heads):
    return F.scaled_dot_product_attention(*split_heads(qkv, heads)).transpose(1, 2).flatten(2)


# Triton's interpreter cuts bfloat16 off instead of rounding, so that one needs a GPU
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "head_width"), [(64, 64), (65, 64), (128, 64), (30, 128)])
def test_in_half_precision_the_error_is_at_most_twice_that_of_torch(dtype, tokens, head_width, device):
    qkv, upstream = random(4, tokens, 2, head_width, device, dtype)
    expected = value_and_gradient(short_attention_reference, qkv.double(), 2, upstream)
    torchs = value_and_gradient(sdpa, qkv, 2, upstream)
    ours = value_and_gradient(short_attention, qkv, 2, upstream)
    for a, b, exact in zip(ours, torchs, expected, strict=True):
        assert a.dtype == dtype
        assert (a.double() - exact).square().mean().sqrt() <= 2 * (b.double() - exact).square().mean().sqrt()


def test_large_scores_neither_overflow_nor_vanish(device):
    qkv, upstream = random(1, 20, 2, 16, device, torch.float32, spread=40.0)  # scores in the thousands
    expected = value_and_gradient(short_attention_reference, qkv.double(), 2, upstream)
    for ours, theirs in zip(value_and_gradient(short_attention, qkv, 2, upstream), expected, strict=True):
        assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3 * float(theirs.abs().max()))


def test_layouts_and_empty_batches(device):
    qkv, upstream = random(4, 6, 2, 16, device, torch.float32)
    expected = value_and_gradient(short_attention, qkv, 2, upstream)
    strided = torch.stack([qkv, qkv], dim=3)[..., 0].requires_grad_()
    assert not strided.is_contiguous()
    out = short_attention(strided, 2)
    out.backward(torch.stack([upstream, upstream], dim=3)[..., 0])
    assert_close((out.detach(), strided.grad), expected, rtol=0, atol=0)
    assert short_attention(qkv[:0], 2).shape == (0, 6, 32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own check reads it
def test_it_is_registered_as_torch_wants_it(device):
    """Shapes without values, gradients, and what the compiler traces."""
    qkv, _ = random(2, 5, 2, 16, device, torch.float32)
    torch.library.opcheck(torch.ops.horst.short_attention, (qkv.requires_grad_(), 2))


def test_it_compiles_without_a_break_and_under_autocast(device):
    linear = torch.nn.Linear(32, 96, device=device)
    x = torch.randn(3, 5, 32, device=device)

    def attend(x):
        with torch.autocast(device.type, torch.float16):
            return short_attention(linear(x), 2)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert out.dtype == torch.float16
    assert_close(out, attend(x))
    (grad,) = torch.autograd.grad(compiled(x).float().square().sum(), [linear.weight])
    (expected,) = torch.autograd.grad(attend(x).float().square().sum(), [linear.weight])
    assert_close(grad, expected)


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        ((2, 5, 32), 2, r"3 \* width\) with a width that 2 heads can share, got \(2, 5, 32\)"),
        ((5, 48), 2, r"got \(5, 48\)"),
        ((2, 5, 48), 0, "0 heads"),
        ((2, 129, 48), 2, "at most 128 tokens and heads at most 128 wide, got 129 and 8"),
        ((2, 5, 3 * 129), 1, "got 5 and 129"),
        ((2, 0, 48), 2, "got 0 and 8"),
    ],
)
def test_bad_shapes_are_told(shape, heads, message):
    with pytest.raises(ValueError, match=message):
        short_attention(torch.zeros(shape), heads)
