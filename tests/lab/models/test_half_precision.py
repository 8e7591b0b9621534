"""The short form of GELU against torch's, in float64 and in half precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from horst.lab.models.half_precision import GELU, short_gelu

WIDE = torch.cat([torch.linspace(-12, 12, 20_001), torch.tensor([0.0, -0.0, 1e-6, -1e-6, -40.0, 40.0])])


def value_and_slope(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), slope


def test_it_is_gelu_to_the_formulas_precision_and_so_is_its_derivative():
    x = WIDE.double()
    expected, expected_slope = value_and_slope(F.gelu, x)
    y, slope = value_and_slope(short_gelu, x)
    assert ((y - expected).abs() <= 0.5 * 1.5e-7 * x.abs().clamp(min=1)).all()
    assert (slope - expected_slope).abs().max() <= 0.5 * 1.5e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_gelu_of_float64_rounded_once(dtype):
    x = WIDE.to(dtype)
    expected, expected_slope = value_and_slope(F.gelu, x.double())
    y, slope = value_and_slope(short_gelu, x)
    assert y.dtype == slope.dtype == dtype
    step = torch.finfo(dtype).eps
    assert ((y.double() - expected).abs() <= 0.51 * step * expected.abs() + 1e-6).all()
    assert ((slope.double() - expected_slope).abs() <= 0.51 * step * expected_slope.abs() + 1e-6).all()


def test_infinity_and_nan():
    y = short_gelu(torch.tensor([float("inf"), float("nan")]))
    assert y[0] == float("inf")
    assert y[1].isnan()


def test_the_module_computes_as_torchs_does_where_nothing_is_compiled():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, dtype=dtype)
        assert torch.equal(GELU()(x), nn.GELU()(x))


def test_compiled_it_takes_the_short_form_in_half_precision_only():
    x = torch.linspace(-6, 6, 4001)
    compiled = torch.compile(GELU(), fullgraph=True, backend="aot_eager")
    half = x.bfloat16()
    assert torch.equal(compiled(half), short_gelu(half))
    assert torch.equal(compiled(x), F.gelu(x))
    assert not torch.equal(short_gelu(x), F.gelu(x))  # else the lines above would not tell


def test_compiled_gradients_are_those_of_the_short_form():
    x = torch.linspace(-6, 6, 4001).bfloat16()
    compiled = torch.compile(GELU(), fullgraph=True, backend="aot_eager")
    assert_close(value_and_slope(compiled, x), value_and_slope(short_gelu, x), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_the_compiled_kernel_is_the_short_form_rounded_once(dtype):
    x = WIDE.to(dtype).cuda()
    expected, expected_slope = value_and_slope(F.gelu, x.double())
    y, slope = value_and_slope(torch.compile(GELU(), fullgraph=True), x)
    step = torch.finfo(dtype).eps
    assert ((y.double() - expected).abs() <= 0.51 * step * expected.abs() + 1e-6).all()
    assert ((slope.double() - expected_slope).abs() <= 0.51 * step * expected_slope.abs() + 1e-6).all()
