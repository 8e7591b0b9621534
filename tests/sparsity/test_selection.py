"""Exact selection: against a stable sort, under ties, NaN and equal weights, in every floating type."""

import logging
import math
from fractions import Fraction
from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings

from horst.parameters.sharding import Shard, mix, random_scores
from horst.sparsity import selection
from horst.sparsity.selection import exact_floor, kth_magnitude, smallest

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HARD = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.0, math.inf, -math.inf, math.nan]


def by_sorting(tensors, k, among=None):
    """The definition: a stable sort by magnitude, NaN last, and the first k go."""
    flat = torch.cat([t.flatten() for t in tensors]).double().abs()
    keys = torch.where(flat.isnan(), math.inf, flat)
    order = sorted(range(flat.numel()), key=lambda i: (bool(flat[i].isnan()), float(keys[i]), i))
    if among is not None:
        allowed = torch.cat([a.flatten() for a in among])
        order = [i for i in order if allowed[i]]
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[order[:k]] = True
    return [m.view(t.shape) for m, t in zip(mask.split([t.numel() for t in tensors]), tensors, strict=True)]


@st.composite
def selections(draw):
    dtype = draw(st.sampled_from(DTYPES))
    values = st.one_of(st.sampled_from(HARD), st.floats(-4.0, 4.0, width=16))
    lists = draw(st.lists(st.lists(values, min_size=1, max_size=40), min_size=1, max_size=3))
    tensors = [torch.tensor(v, dtype=torch.float64).to(dtype) for v in lists]
    among = None
    if draw(st.booleans()):
        among = [torch.tensor(draw(st.lists(st.booleans(), min_size=len(v), max_size=len(v)))) for v in lists]
    candidates = sum(len(v) for v in lists) if among is None else sum(int(a.sum()) for a in among)
    return tensors, draw(st.integers(0, candidates)), among


@given(selections(), st.sampled_from([0, 3, 1 << 21]))
@settings(max_examples=300, deadline=None)
def test_selection_is_the_head_of_a_stable_sort(case, few):
    tensors, k, among = case
    with mock.patch.object(selection, "_FEW", few):  # from this many candidates on, passes read a copy of them
        got = smallest(tensors, k, among=among)
    assert all(torch.equal(a, b) for a, b in zip(got, by_sorting(tensors, k, among), strict=True))


@pytest.mark.parametrize("few", [0, 1 << 21])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 1 << 18, (1 << 18) + 1, 600_000])
def test_selection_of_many_chunks(n, dtype, few, monkeypatch):
    monkeypatch.setattr(selection, "_FEW", few)
    weights = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    k = exact_floor(0.9, n)
    mask = smallest([weights], k)[0]
    order = weights.double().abs().argsort(stable=True)
    assert int(mask.sum()) == k
    assert torch.equal(mask.nonzero().squeeze(1), order[:k].sort().values)


def test_equal_scores_go_from_the_lowest_index_on_layer_after_layer():
    a, b = torch.ones(2, 2), torch.ones(3)
    got = smallest([a, b], 5)
    assert got[0].all()
    assert got[1].tolist() == [True, False, False]


@pytest.mark.parametrize("few", [0, 1 << 21])
def test_ties_across_chunks_are_told_apart_by_index(few, monkeypatch):
    monkeypatch.setattr(selection, "_FEW", few)
    n = 700_000
    mask = smallest([torch.full((n,), 0.5)], 500_001)[0]
    assert mask[:500_001].all()
    assert not mask[500_001:].any()


def test_nan_goes_last_and_is_reported(caplog):
    weights = torch.tensor([math.nan, 1.0, math.inf, -math.nan, 0.5])
    with caplog.at_level(logging.WARNING):
        assert smallest([weights], 3)[0].tolist() == [False, True, True, False, True]
    assert "3 non-finite scores" in caplog.text
    # All NaN are equal, whatever their bits, so the index decides.
    payload = torch.tensor([0x7FFFFFFF, 0x7FC00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert smallest([payload], 2)[0].tolist() == [True, True, False]


def test_finite_scores_are_not_reported(caplog):
    smallest([torch.tensor([torch.finfo(torch.float32).max, 1.0])], 1)
    assert caplog.text == ""


def test_tensors_of_different_types_are_compared_by_value():
    mask_a, mask_b = smallest([torch.tensor([1.0, 3.0], dtype=torch.bfloat16), torch.tensor([2.0, 0.5])], 2)
    assert mask_a.tolist() == [True, False]
    assert mask_b.tolist() == [False, True]


def test_memory_layout_does_not_matter():
    weights = torch.randn(4, 6, 3, 3, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    channels_last = weights.contiguous(memory_format=torch.channels_last)
    assert torch.equal(smallest([weights], 100)[0], smallest([channels_last], 100)[0])
    assert torch.equal(smallest([weights[0, 0].t()], 4)[0], smallest([weights[0, 0].t().contiguous()], 4)[0])


def test_empty_tensors_take_part():
    assert [m.tolist() for m in smallest([torch.empty(0), torch.tensor([2.0, 1.0])], 1)] == [[], [False, True]]


def test_bad_selections_say_what_is_allowed():
    with pytest.raises(ValueError, match=r"between 0 and the number of candidates, 2, got 3"):
        smallest([torch.ones(2)], 3)
    with pytest.raises(ValueError, match=r"between 0 and the number of candidates, 1, got 2"):
        smallest([torch.ones(2)], 2, among=[torch.tensor([True, False])])
    with pytest.raises(TypeError, match="floating point"):
        smallest([torch.ones(2, dtype=torch.int32)], 1)
    with pytest.raises(ValueError, match=r"between 1 and the number of candidates, 2, got 0"):
        kth_magnitude([torch.ones(2)], 0)


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50),
    st.data(),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=100, deadline=None)
def test_kth_magnitude_is_that_of_the_sorted_list(values, data, dtype):
    k = data.draw(st.integers(1, len(values)))
    assert kth_magnitude([torch.tensor(values, dtype=dtype)], k) == sorted(map(abs, values))[k - 1]


@pytest.mark.parametrize(
    ("sparsity", "n", "floor"),
    [(0.29, 100, 29), (0.9, 10, 9), (0.7, 10, 7), (0.57, 100, 57), (0.1, 3, 0), (0.999, 1000, 999), (0.0, 5, 0)],
)
def test_exact_floor_by_hand(sparsity, n, floor):
    assert exact_floor(sparsity, n) == floor


@given(st.integers(0, 999), st.integers(0, 10**10))
@example(29, 100)
def test_exact_floor_reads_decimals_as_written(thousandths, n):
    assert exact_floor(thousandths / 1000, n) == math.floor(Fraction(thousandths, 1000) * n)


@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 5), st.integers(0, 2), st.integers(1, 4))
def test_positions_are_those_of_the_whole_tensor(a, b, c, dim, ranks):
    shape = (a, b, c)
    whole = torch.arange(a * b * c).view(shape)
    rows, offset, seen = -(-shape[dim] // ranks), 0, []
    for _ in range(ranks):
        length = min(rows, shape[dim] - offset)
        shard = Shard(shape, dim, offset, length, None)
        part = whole.narrow(dim, offset, length)
        assert torch.equal(shard.positions(torch.arange(part.numel())).view(part.shape), part)
        seen.append(part.numel())
        offset += length
    assert sum(seen) == whole.numel()


def test_random_scores_do_not_depend_on_the_sharding():
    whole = random_scores(Shard((6, 4), 0, 0, 6, None), key=7, device=torch.device("cpu"))
    halves = [random_scores(Shard((6, 4), 0, start, 3, None), key=7, device=torch.device("cpu")) for start in (0, 3)]
    columns = [random_scores(Shard((6, 4), 1, start, 2, None), key=7, device=torch.device("cpu")) for start in (0, 2)]
    assert torch.equal(torch.cat(halves), whole)
    assert torch.equal(torch.cat(columns, 1), whole)
    assert not torch.equal(whole, random_scores(Shard((6, 4), 0, 0, 6, None), key=8, device=torch.device("cpu")))


def test_random_scores_are_uniform():
    scores = random_scores(Shard((100_000,), 0, 0, 100_000, None), key=1, device=torch.device("cpu"))
    counts = torch.histc(scores, bins=20, min=0.0, max=1.0)
    chi_squared = float(((counts - 5000).square() / 5000).sum())
    assert chi_squared < 43.8  # 99.9 % of the chi-squared distribution with 19 degrees of freedom
    assert float(scores.min()) >= 0.0
    assert float(scores.max()) < 1.0


def test_mix_is_splitmix64():  # the generator's published first outputs for the states 0 and 1234567
    state, outputs = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    states = [(state + i * gamma) % 2**64 for i in range(3)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    assert [int(x) % 2**64 for x in mix(signed)] == outputs
