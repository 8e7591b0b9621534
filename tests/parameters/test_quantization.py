"""The quantizer: against a loop in float64, and on a grid it returns what it was given."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horst.parameters import quantization
from horst.parameters.quantization import Grid, dequantize, parse_values, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def scale_by_hand(group, bits, precision):
    """The definition, on a list of Python numbers: of 21 scales the first with the least squared error."""
    largest_code, largest = 2 ** (bits - 1) - 1, max(map(abs, group))
    best, best_error = 0.0, math.inf
    for i in range(1 if bits == 8 else 21):
        wanted = (1 - i / 32) * largest / largest_code
        if wanted == 0.0:
            return 0.0, 0.0
        step = 2.0 ** (math.frexp(wanted)[1] - precision)
        s = math.ceil(wanted / step) * step
        codes = [max(-largest_code, min(largest_code, round(w / s))) for w in group]
        error = sum((c * s - w) ** 2 for c, w in zip(codes, group, strict=True))
        if error < best_error:
            best, best_error = s, error
    return best, best_error


@pytest.mark.parametrize(
    ("dtype", "bits", "precision"),
    [(torch.float32, 8, 8), (torch.float32, 4, 8), (torch.float32, 3, 8), (torch.float32, 2, 8),
     (torch.bfloat16, 8, 1), (torch.bfloat16, 4, 5), (torch.float16, 8, 4), (torch.float16, 4, 8)],
)  # fmt: skip
def test_the_quantizer_is_the_loop_over_groups(dtype, bits, precision):
    W = (torch.randn(6, 20, generator=torch.Generator().manual_seed(bits)) * 0.02).to(dtype)
    W[2, 8:16] = 0.0
    codes, scales = quantize(W, bits, group_size=8)
    assert codes.dtype == torch.int8
    assert scales.shape == (6, 3)
    found = dequantize(codes, scales, 8, dtype).double()
    for row in range(6):
        for k, start in enumerate((0, 8, 16)):
            group = W[row, start : start + 8].double()
            s, error = scale_by_hand(group.tolist(), bits, precision)
            assert float((found[row, start : start + 8] - group).square().sum()) == pytest.approx(error, rel=1e-4)
            # Where no code is odd, say, twice the scale gives the same weights, and that is the one returned.
            assert float(scales[row, k]) / s == round(float(scales[row, k]) / s) if s else float(scales[row, k]) == 0.0


@st.composite
def weights(draw):
    """Any finite bits of any of the dtypes, a random share of them zero."""
    dtype = draw(st.sampled_from(DTYPES))
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    width = {torch.float64: 64, torch.float32: 32, torch.float16: 16, torch.bfloat16: 32}[dtype]
    limit = float(torch.finfo(torch.float32 if dtype == torch.float64 else dtype).max)
    close = draw(st.floats(2.0**-20, 2.0**10, width=32))
    number = st.one_of(
        st.just(0.0), st.floats(-limit, limit, width=width), st.floats(-1, 1, width=width).map(close.__mul__)
    )
    numbers = draw(st.lists(number, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(numbers, dtype=torch.float64).clamp(-limit, limit).to(dtype).view(rows, columns)


@settings(max_examples=400)
@given(W=weights(), bits=st.sampled_from([8, 4, 3, 2]), group_size=st.integers(1, 10))
def test_what_was_rounded_once_is_found_again(W, bits, group_size):
    codes, scales = quantize(W, bits, group_size)
    once = dequantize(codes, scales, group_size, W.dtype)
    assert int(codes.abs().max() if codes.numel() else 0) <= 2 ** (bits - 1) - 1
    assert once.isfinite().all()
    assert torch.equal(once.double(), dequantize(codes, scales, group_size, torch.float64)), "exact in its dtype"
    assert (once[W == 0] == 0).all()
    again, same_scales = quantize(once, bits, group_size)
    assert torch.equal(again, codes)
    assert torch.equal(same_scales, scales)


@settings(max_examples=300)
@given(
    codes=st.lists(st.integers(-127, 127), min_size=1, max_size=8),
    significand=st.integers(1, 255),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_grid_is_found_however_little_of_it_is_used(codes, significand, exponent, dtype):
    """As SparseGPT leaves it, where the largest code of a group need not be 127."""
    W = torch.tensor([codes], dtype=dtype) * (significand * 2.0**exponent)
    assert torch.equal(dequantize(*quantize(W, 8, 8), 8, dtype), W)


@settings(max_examples=300)
@given(
    codes=st.lists(st.integers(-7, 7), min_size=1, max_size=8),
    significand=st.integers(1, 31),
    exponent=st.integers(-12, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_any_grid_of_four_bits_is_found_in_every_dtype(codes, significand, exponent, dtype):
    W = torch.tensor([codes]).to(dtype) * (significand * 2.0**exponent)
    assert torch.equal(dequantize(*quantize(W, 4, 8), 8, dtype), W)


def test_clipping_pays_with_few_bits():
    """With one outlier in the group the others are worth more than it."""
    W = torch.cat([torch.linspace(-1, 1, 127), torch.tensor([2.0])])[None]
    _, scales = quantize(W, 4)
    assert float(scales) * 7 < 1.8
    _, scales = quantize(W, 8)
    assert float(scales) * 127 >= 2.0


def test_pieces_make_no_difference(monkeypatch):
    W = torch.randn(7, 3, 30)
    whole = quantize(W, 4, 16)
    monkeypatch.setattr(quantization, "_PIECE", 31)
    pieces = quantize(W, 4, 16)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    assert torch.equal(dequantize(*pieces, 16), Grid(4, 16).round(W))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(torch.ones(2, 2), 5), "bits must be one of 8, 4, 3, 2, got 5"),
        (lambda: quantize(torch.ones(2, 2), 4, 0), "group_size must be at least 1 column, got 0"),
        (lambda: quantize(torch.ones(2, 2).int(), 4), "takes floating-point weights, got torch.int32"),
        (lambda: quantize(torch.tensor(1.0), 4), "got a single number"),
        (lambda: quantize(torch.tensor([1.0, math.nan]), 4), "with NaN or infinity"),
        (lambda: quantize(torch.tensor([1e300], dtype=torch.float64), 4), r"infinity \(in float32\)"),
        (lambda: parse_values("int5"), "values must be one of float32, bfloat16, int8, int4, int3, int2, or None"),
        (lambda: parse_values("q8", name="head_values"), "head_values must be one of .*, got 'q8'"),
    ],
)
def test_what_cannot_be_quantized_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
