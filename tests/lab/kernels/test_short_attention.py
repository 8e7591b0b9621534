"""Attention over few tokens, against the formula in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.testing import assert_close

import horst.lab.kernels.short_attention as package
from horst.lab.kernels.short_attention import short_attention, short_attention_reference
from horst.lab.kernels.short_attention.reference import split_heads

# torch's own forward mode is written in it
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


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


def forward_mode(function, qkv, tangent):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(qkv, tangent))).tangent


DERIVATIVES = {
    "jvp": lambda function, qkv, tangent: torch.func.jvp(function, (qkv,), (tangent,))[1],
    "forward mode": forward_mode,
    "gradient": lambda function, qkv, _: torch.func.grad(lambda x: function(x).square().sum())(qkv),
    "gradient a sample": lambda function, qkv, _: torch.func.vmap(
        torch.func.grad(lambda x: function(x[None]).square().sum())
    )(qkv),
    "hessian": lambda function, qkv, _: torch.func.hessian(lambda x: function(x).square().sum())(qkv[:1, :2]),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # what the kernel takes, and what torch computes
def test_every_derivative_of_torch_func_and_forward_mode_is_that_of_the_formula(derivative, dtype, device):
    qkv, _ = random(2, 5, 2, 8, device, dtype)
    expected = derivative(lambda x: short_attention_reference(x, 2), qkv, torch.ones_like(qkv))
    assert_close(derivative(lambda x: short_attention(x, 2), qkv, torch.ones_like(qkv)), expected)


def test_derivatives_of_torch_func_compile_without_a_break(device):
    qkv, _ = random(2, 5, 2, 8, device, torch.float32)
    for name in ("jvp", "gradient a sample"):
        compiled = torch.compile(DERIVATIVES[name], fullgraph=True, backend="aot_eager")
        expected = DERIVATIVES[name](lambda x: short_attention_reference(x, 2), qkv, torch.ones_like(qkv))
        assert_close(compiled(lambda x: short_attention(x, 2), qkv, torch.ones_like(qkv)), expected)


def test_a_compiled_function_called_in_forward_mode_has_a_tangent(device):
    qkv, tangent = torch.randn(2, 2, 5, 48, device=device)
    compiled = torch.compile(lambda x: short_attention(x, 2), backend="aot_eager")
    compiled(qkv)
    expected = forward_mode(lambda x: short_attention_reference(x, 2), qkv, tangent)
    assert_close(forward_mode(compiled, qkv, tangent), expected)


def test_a_second_derivative_is_refused_with_what_to_use(device):
    qkv = torch.randn(2, 5, 48, device=device, requires_grad=True)
    (grad,) = torch.autograd.grad(short_attention(qkv, 2).square().sum(), [qkv], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiable once.*short_attention_reference.*attention='matmul'"):
        grad.sum().backward()


class Attends(torch.nn.Module):
    def forward(self, qkv):
        return short_attention(qkv, 2)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the checks of shapes
def test_a_graph_for_export_has_torchs_operators_and_a_compiled_one_the_kernel(device):
    qkv = torch.randn(2, 5, 48, device=device)
    for strict in (False, True):
        exported = torch.export.export(Attends(), (qkv,), strict=strict)
        assert "scaled_dot_product_attention" in str(exported.graph)
        assert_close(exported.module()(qkv), short_attention(qkv, 2), rtol=1e-5, atol=1e-5)
    traced = torch.jit.trace(Attends(), (qkv,))
    assert traced.graph.findNode("aten::scaled_dot_product_attention") is not None
    graphs = []
    torch.compile(Attends(), fullgraph=True, backend=lambda module, _: graphs.append(module.graph) or module)(qkv)
    (graph,) = graphs
    assert torch.ops.horst.short_attention.default in [node.target for node in graph.nodes]


@pytest.mark.parametrize("tokens", [5, 65])  # what the kernel takes, and what torch computes
def test_the_dtype_stays_under_autocast(tokens, device):
    qkv, upstream = random(2, tokens, 2, 8, device, torch.float32)
    expected = value_and_gradient(short_attention_reference, qkv, 2, upstream)
    with torch.autocast(device.type, torch.bfloat16):
        for function in (short_attention, torch.compile(short_attention, fullgraph=True, backend="aot_eager")):
            assert_close(value_and_gradient(function, qkv, 2, upstream), expected, rtol=1e-5, atol=1e-5)
        each = torch.func.vmap(lambda x: short_attention(x[None], 2)[0])
        for function in (each, torch.export.export(Attends(), (qkv,)).module()):
            assert_close(function(qkv), expected[0], rtol=1e-5, atol=1e-5)


def test_shapes_are_known_without_values():
    assert short_attention(torch.zeros(2, 5, 48, device="meta"), 2).shape == (2, 5, 16)


@pytest.mark.parametrize("heads", [2.0, "2", None])
def test_heads_that_are_no_int_are_told(heads):
    with pytest.raises(TypeError, match=f"heads must be an int, got {heads!r}"):
        short_attention(torch.zeros(2, 5, 48), heads)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_numbers_without_a_softmax_are_told(dtype):
    with pytest.raises(TypeError, match=f"qkv must be of a floating-point dtype, got {dtype}"):
        short_attention(torch.zeros(2, 5, 48, dtype=dtype), 2)


@pytest.mark.parametrize(
    ("shape", "heads", "message"),
    [
        ((2, 5, 32), 2, r"3 \* width\) with a width that 2 heads can share, got \(2, 5, 32\)"),
        ((5, 48), 2, r"got \(5, 48\)"),
        ((2, 5, 48), 0, "0 heads"),
        ((2, 129, 48), 2, "at most 128 tokens and heads at most 128 wide, got 129 and 8"),
        ((2, 129, 48), 2, "Use scaled_dot_product_attention, or attention='fused' in a DeiTConfig"),
        ((2, 5, 3 * 129), 1, "got 5 and 129"),
        ((2, 0, 48), 2, "got 0 and 8"),
    ],
)
def test_bad_shapes_are_told(shape, heads, message):
    with pytest.raises(ValueError, match=message):
        short_attention(torch.zeros(shape), heads)
