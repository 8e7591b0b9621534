"""Patterns: hand-written tables of masks, N:M and blocks, packing, hashes."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from horst.parameters.sharding import Shard, as_shard_of, part_of
from horst.sparsity import magnitude_mask
from horst.sparsity.masks import NM, Block, mask_hash, pack, parse_pattern, unpack


@pytest.mark.parametrize(
    ("weights", "sparsity", "kept"),
    [
        ([4.0, -3.0, 2.0, -1.0], 0.5, [1, 1, 0, 0]),
        ([4.0, -3.0, 2.0, -1.0], 0.0, [1, 1, 1, 1]),
        ([4.0, -3.0, 2.0, -1.0], 0.74, [1, 1, 0, 0]),  # floor(2.96)
        ([4.0, -3.0, 2.0, -1.0], 0.75, [1, 0, 0, 0]),
        ([1.0, 1.0, 1.0, 1.0], 0.5, [0, 0, 1, 1]),  # ties: the lower index goes
        ([0.0, -0.0, 0.0, 5.0], 0.5, [0, 0, 1, 1]),
        ([2.0, float("nan"), 1.0, 3.0], 0.75, [0, 1, 0, 0]),
    ],
)
def test_magnitude_masks_by_hand(weights, sparsity, kept):
    assert magnitude_mask(torch.tensor(weights), sparsity).int().tolist() == kept


@pytest.mark.parametrize(
    ("n", "m", "weights", "kept"),
    [
        (2, 4, [4, -3, 2, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1]),
        (1, 4, [1, 1, 2, 2, -9, 8, 7, 6], [0, 0, 0, 1, 1, 0, 0, 0]),
        (3, 4, [5, 5, 5, 5, 1, 2, 3, 4], [0, 1, 1, 1, 0, 1, 1, 1]),
        (1, 2, [1, 2, 4, 3, -5, 5, 0, 0], [0, 1, 1, 0, 0, 1, 0, 1]),
        (2, 4, [float("nan"), 1, 2, 3, float("inf"), float("nan"), 1, 2], [1, 0, 0, 1, 1, 1, 0, 0]),
    ],
)
def test_nm_masks_by_hand(n, m, weights, kept):
    row = torch.tensor([weights], dtype=torch.float32)
    assert NM(n, m).mask(row, input_dim=1).int().tolist() == [kept]
    assert NM(n, m).mask(row.t(), input_dim=0).int().t().tolist() == [kept]


@given(st.integers(2, 16), st.data())
@settings(max_examples=60, deadline=None)
def test_every_group_keeps_exactly_n(m, data):
    n = data.draw(st.integers(1, m - 1))
    levels = data.draw(st.sampled_from([1, 2, 5, 1000]))
    weights = torch.randint(-levels, levels + 1, (3, 4 * m), generator=torch.Generator().manual_seed(m)).float()
    kept = NM(n, m).mask(weights, input_dim=1)
    assert (kept.view(-1, m).sum(1) == n).all()
    # No removed weight is larger than a kept one of its group.
    magnitude = weights.abs().view(-1, m)
    smallest_kept = magnitude.masked_fill(~kept.view(-1, m), torch.inf).amin(1)
    largest_removed = magnitude.masked_fill(kept.view(-1, m), -torch.inf).amax(1)
    assert (largest_removed <= smallest_kept).all()


@pytest.mark.parametrize(
    ("dtype", "small", "large"),
    [
        (torch.bfloat16, [1.0] * 64, [1.0078125] + [1.0] * 63),  # in bfloat16 both sums are 64
        (torch.float16, [2000.0] * 64, [4000.0] * 64),  # in float16 both sums are infinite
    ],
)
def test_sums_over_blocks_do_not_round_to_the_weights_type(dtype, small, large):
    mask = magnitude_mask(torch.tensor([large, small], dtype=dtype), 0.5, pattern=(1, 64))
    assert mask[:, 0].tolist() == [True, False]


def test_nm_of_a_convolution_groups_input_channels():
    weight = torch.arange(1.0, 1 + 2 * 4 * 1 * 1).view(2, 4, 1, 1)
    assert magnitude_mask(weight, pattern="2:4").flatten().int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_block_masks_by_hand():
    weight = torch.tensor([[1.0, 1.0, 9.0, 0.0], [1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0], [0.0, 5.0, 2.0, 2.0]])
    mask = magnitude_mask(weight, 0.5, pattern=(2, 2))  # block sums 4, 9 / 5, 8
    assert mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1001])
def test_packing_round_trip(n):
    mask = torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.3
    packed = pack(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-n // 8)
    assert torch.equal(unpack(packed, (n,)), mask)


def test_hash_adds_up_over_shards_and_sees_single_bits():
    mask = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    whole = mask_hash([mask], [Shard((6, 4), 0, 0, 6, None)])
    parts = [mask_hash([mask[s : s + 3]], [Shard((6, 4), 0, s, 3, None)]) for s in (0, 3)]
    assert sum(parts) % 2**64 == whole
    flipped = mask.clone()
    flipped[2, 1] = ~flipped[2, 1]
    assert mask_hash([flipped], [Shard((6, 4), 0, 0, 6, None)]) != whole


def test_patterns_are_parsed_or_refused():
    assert parse_pattern(None) == Block(1, 1)
    assert parse_pattern("1:16") == NM(1, 16)
    assert parse_pattern(NM(2, 4)) == NM(2, 4)
    for bad in ("2-4", "two:four", "", (1, 2, 3), 4):
        with pytest.raises(ValueError, match="pattern must be"):
            parse_pattern(bad)
    with pytest.raises(ValueError, match=r"0 < N < M, got 4:4"):
        parse_pattern("4:4")
    with pytest.raises(ValueError, match="at least one row"):
        Block(0, 4)


def test_bad_masks_are_refused_with_advice():
    with pytest.raises(TypeError, match=r"sparsity must be a number in \[0, 1\), got '90%'. Give a fraction"):
        magnitude_mask(torch.ones(4), "90%")
    with pytest.raises(ValueError, match=r"sparsity must lie in \[0, 1\), got 90. Give a fraction: 0.9, not 90."):
        magnitude_mask(torch.ones(4), 90)
    with pytest.raises(ValueError, match=r"sparsity must lie in \[0, 1\), got nan"):
        magnitude_mask(torch.ones(4), float("nan"))
    with pytest.raises(ValueError, match="multiple of 4, but the weight has 6"):
        magnitude_mask(torch.ones(2, 6), pattern="2:4")
    with pytest.raises(ValueError, match=r"2:4 fixes the sparsity at 0.5, got sparsity=0.9"):
        magnitude_mask(torch.ones(2, 8), 0.9, pattern="2:4")
    with pytest.raises(ValueError, match="do not tile the weight"):
        magnitude_mask(torch.ones(3, 8), 0.5, pattern=(2, 2))
    with pytest.raises(ValueError, match="sparsity is needed"):
        magnitude_mask(torch.ones(3))


def test_groups_and_blocks_may_not_cross_the_cut_between_ranks():
    with pytest.raises(ValueError, match="groups of 4 cross the cut between ranks: this one holds 6 of the 12 inputs"):
        NM(2, 4).check_shard("fc", Shard((8, 12), dim=1, offset=0, length=6, group=None), input_dim=1)
    NM(2, 4).check_shard("fc", Shard((8, 12), dim=0, offset=0, length=3, group=None), input_dim=1)
    with pytest.raises(ValueError, match="do not fit this rank's shard, 3 of 6 slices"):
        Block(2, 2).units(Shard((6, 4), dim=0, offset=0, length=3, group=None))


def test_a_whole_tensor_is_its_own_part_and_another_shape_is_refused():
    weight, saved = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    assert as_shard_of(weight, saved) is saved
    assert torch.equal(part_of(weight, saved), saved)
    with pytest.raises(ValueError, match=r"a saved tensor has shape \(3, 2\), here it is \(2, 3\)"):
        part_of(weight, saved.T)
