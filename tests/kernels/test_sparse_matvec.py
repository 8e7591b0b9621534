"""Inputs times a sparse matrix: the storage round-trips, and each kernel is within rounding of float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from horst.kernels.sparse_matvec import (
    Launch,
    expand,
    pack,
    sparse_matvec,
    sparse_matvec_reference,
    unpack,
    why_not_packed,
)
from horst.kernels.sparse_matvec.layout import CHUNK, entries
from horst.kernels.sparse_matvec.operator import encode, sparse_linear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
STAGED = pytest.param(Launch(16, 256, 16, staged=True), marks=pytest.mark.gpu)


def pruned(rows, columns, sparsity, dtype, device="cpu"):
    weight = torch.randn(rows, columns) * (torch.rand(rows, columns) >= sparsity)
    return weight.to(device, dtype)


def assert_within_rounding(y, x, weight, bias=None):
    """A float32 sum of n products in any order, rounded once to the dtype of the result."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.t(), x.abs() @ weight.abs().t()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    sum_error = (int((weight != 0).sum(dim=1).max()) + 2) * 2**-24 * size
    rounding = torch.finfo(y.dtype).eps / 2 * (exact.abs() + sum_error)
    assert bool(((y.double() - exact).abs() <= sum_error + rounding + torch.finfo(y.dtype).tiny).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_is_the_dense_product(dtype):
    weight, x, bias = pruned(21, 130, 0.8, dtype), torch.randn(5, 130).to(dtype), torch.randn(21).to(dtype)
    exact = x.double() @ weight.double().t() + bias.double()
    found = sparse_matvec_reference(x.double(), pack(weight), bias.double())
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    assert_within_rounding(sparse_matvec_reference(x, pack(weight), bias), x, weight, bias)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 2 * CHUNK + 3),
    density=st.sampled_from([0.0, 0.1, 0.7, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_packed_weights_come_back_exactly(rows, columns, density, dtype, seed):
    torch.manual_seed(seed)
    weight = pruned(rows, columns, 1 - density, dtype)
    matrix = pack(weight)
    assert torch.equal(unpack(matrix), weight)
    lengths = matrix.starts.diff()
    assert torch.equal(lengths, lengths.sort(descending=True).values)
    assert int((entries(matrix)[2] != 0).sum()) == int(weight.count_nonzero())
    assert matrix.columns.numel() - int(weight.count_nonzero()) < matrix.align * rows + 1


def test_columns_of_all_16_bits_are_stored():
    weight = torch.zeros(2, 65535, dtype=torch.bfloat16)
    weight[0, [0, 32767, 32768, 65534]] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    for one in (weight, weight.float()):
        assert torch.equal(unpack(pack(one)), one)
    with pytest.raises(ValueError, match=r"65536 inputs are more than 16-bit columns can tell apart.*Keep it dense"):
        pack(torch.zeros(1, 65536))
    assert "torch.float64 has no sparse form" in why_not_packed(torch.zeros(1, 1, dtype=torch.float64))


def test_a_warps_gather_takes_neighbours_of_the_row():
    matrix = pack(torch.ones(1, CHUNK, dtype=torch.bfloat16))
    first_of_each_thread = (matrix.columns & 0xFFFF)[::4]
    assert first_of_each_thread.tolist() == list(range(32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 8, 16, 17])
@pytest.mark.parametrize("launch", [Launch(4, 64, 1), STAGED], ids=str)
def test_kernels_agree_with_float64(launch, tokens, dtype, device):
    if launch.staged and dtype == torch.float32:
        pytest.skip("the staged kernel is for 16-bit values")
    weight = pruned(19, 150, 0.7, dtype, device)
    weight[3] = 0
    weight[5] = 1
    bias = torch.randn(19).to(device, dtype) if tokens % 2 else None
    x = torch.randn(tokens, 150).to(device, dtype)
    y = sparse_matvec(x, pack(weight), bias, launch)
    assert y.shape == (tokens, 19)
    assert_within_rounding(y, x, weight, bias)
    assert torch.equal(y, sparse_matvec(x, pack(weight), bias, launch)), "the same sums in the same order"


@pytest.mark.parametrize("launch", [Launch(1, 16, 1), Launch(2, 32, 1), Launch(4, 128, 4), STAGED], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (3, 17), (5, 129), (33, 8)])
def test_any_shape_and_launch(launch, shape, device):
    weight = pruned(*shape, 0.4, torch.bfloat16, device)
    x = torch.randn(2, shape[1]).to(device, torch.bfloat16)
    assert_within_rounding(sparse_matvec(x, pack(weight), None, launch), x, weight)


@settings(max_examples=15)
@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 40),
    tokens=st.integers(1, 18),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_small_and_empty_rows(rows, columns, tokens, density, dtype, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    weight, x = pruned(rows, columns, 1 - density, dtype, device), torch.randn(tokens, columns).to(device, dtype)
    assert_within_rounding(sparse_matvec(x, pack(weight), None, Launch(2, 16, 1)), x, weight)


@pytest.mark.parametrize("launch", [Launch(2, 32, 1), STAGED], ids=str)
@pytest.mark.parametrize("tokens", [1, 4])
def test_what_is_not_kept_is_not_read(launch, tokens, device, monkeypatch):
    """Zero weights ignore infinite inputs, and every output is written."""
    weight = pruned(7, 50, 0.5, torch.bfloat16)
    weight[:, [0, 49]] = 0
    x = torch.randn(tokens, 50).bfloat16()
    expected = x.double()[:, 1:49] @ weight.double()[:, 1:49].t()
    x[:, 0], x[:, 49] = torch.inf, torch.nan
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    y = sparse_matvec(x.to(device), pack(weight.to(device)), None, launch)
    torch.testing.assert_close(y.double().cpu(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_8_bit_values_are_within_half_a_step(dtype, device):
    weight = pruned(9, 70, 0.6, dtype, device)
    weight[2] = 0
    matrix = pack(weight, int8=True)
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert bool((matrix.values.abs() <= 127).all())
    rounding = torch.finfo(dtype).eps * weight.float().abs()
    assert bool(((unpack(matrix).float() - weight.float()).abs() <= 0.5001 * step + rounding).all())
    x = torch.randn(3, 70).to(device, dtype)
    exact = sparse_matvec_reference(x.double(), matrix)
    y = sparse_matvec(x, matrix, None, Launch(2, 32, 1))
    allowed = 4 * torch.finfo(dtype).eps * (x.double().abs() @ weight.double().abs().t()) + 1e-12
    assert bool(((y.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True])
def test_expanding_equals_unpacking(dtype, int8, device, monkeypatch):
    weight = pruned(6, 1100, 0.5, dtype, device)
    weight[1] = 0
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(torch.nan))
    matrix = pack(weight, int8=int8)
    assert torch.equal(expand(matrix), unpack(matrix))
    assert int8 or torch.equal(expand(matrix), weight)


def test_wrong_inputs_are_refused():
    matrix = pack(torch.eye(4))
    with pytest.raises(ValueError, match=r"\(tokens, 4\) in torch.float32, got \(2, 5\) in torch.float32"):
        sparse_matvec(torch.ones(2, 5), matrix)
    with pytest.raises(ValueError, match=r"got \(2, 4\) in torch.float64"):
        sparse_matvec(torch.ones(2, 4).double(), matrix)


def tensors_of(matrix):
    return matrix.columns, matrix.values, matrix.starts, matrix.order, matrix.scales


def test_the_operator_chooses_by_tokens_and_keeps_leading_shapes(device, monkeypatch):
    weight, bias = pruned(12, 40, 0.5, torch.float32, device), torch.randn(12, device=device)
    matrix, seen = pack(weight), []
    monkeypatch.setattr(
        "horst.kernels.sparse_matvec.operator.sparse_matvec",
        lambda x, matrix, bias, launch: seen.append((len(x), launch)) or sparse_matvec_reference(x, matrix, bias),
    )
    small, large = Launch(1, 32, 1), Launch(4, 16, 1)
    form = encode(matrix, {1: small, 4: large})
    for shape in ((40,), (1, 40), (2, 2, 40), (3, 2, 40)):
        x = torch.randn(shape, device=device)
        torch.testing.assert_close(sparse_linear(x, *tensors_of(matrix), bias, form), x @ weight.t() + bias)
    assert seen == [(1, small), (1, small), (4, large)], "six tokens are for the expanded weight"


def test_the_operator_is_sound_for_the_compiler():
    matrix = pack(pruned(6, 10, 0.5, torch.float32))
    parts = (*tensors_of(matrix), torch.randn(6))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.horst.sparse_linear.default,
        (torch.randn(3, 10), *parts, encode(matrix, {1: Launch(1, 32, 1)})),
        test_utils=tests,
    )


@pytest.mark.parametrize("wrong", [torch.ones(2, 11), torch.ones(2, 10).double(), torch.tensor(1.0)], ids=str)
def test_the_operator_refuses_other_inputs_also_while_a_compiler_looks(wrong):
    matrix = pack(pruned(6, 10, 0.5, torch.float32))
    rest = (*tensors_of(matrix), None, encode(matrix, {1: Launch(1, 32, 1)}))
    with pytest.raises(ValueError, match=r"takes 10 inputs|computes in torch.float32 on cpu, got torch.float64"):
        sparse_linear(wrong, *rest)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(ValueError, match="this"):
        sparse_linear(mode.from_tensor(wrong), *rest)
