"""The order of samples: without replacement, resumable at any step, the same batches for every world size."""

from itertools import islice

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from horst.lab.data.epoch_order import EpochOrder, derive_seed, evaluation_parts


@st.composite
def orders(draw):
    world_size = draw(st.integers(1, 4))
    local = draw(st.integers(1, 5))
    samples = draw(st.integers(world_size * local, 60))
    return {"samples": samples, "batch_size": world_size * local, "seed": draw(st.integers(0, 2**40))}, world_size


def first(order, count, start=0):
    return [(step, epoch, index.tolist()) for step, epoch, index in islice(order.batches(start), count)]


@given(orders())
def test_an_epoch_sees_no_sample_twice_and_leaves_out_less_than_a_batch(case):
    order = EpochOrder(**case[0])
    for epoch in (0, 1):
        steps = order.steps_per_epoch
        batches = first(order, steps, start=epoch * steps)
        seen = [i for _, _, index in batches for i in index]
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(order.samples))
        assert order.samples - len(seen) < order.batch_size
        assert {e for _, e, _ in batches} == {epoch}


@given(orders(), st.integers(0, 40), st.integers(0, 40))
def test_batches_depend_on_their_number_alone(case, start, further):
    order = EpochOrder(**case[0])
    assert first(order, further + 2, start)[further:] == first(order, 2, start + further)
    assert [step for step, _, _ in first(order, 3, start)] == [start, start + 1, start + 2]


@given(orders(), st.integers(0, 30))
def test_the_parts_of_all_processes_are_the_batch_of_one(case, start):
    settings, world_size = case
    whole = first(EpochOrder(**settings), 3, start)
    parts = [first(EpochOrder(**settings, rank=rank, world_size=world_size), 3, start) for rank in range(world_size)]
    for k, (step, epoch, index) in enumerate(whole):
        assert [i for part in parts for i in part[k][2]] == index
        assert all(part[k][:2] == (step, epoch) for part in parts)


def test_epochs_and_seeds_have_orders_of_their_own():
    permutations = [
        EpochOrder(samples=50, batch_size=5, seed=seed).permutation(epoch) for seed in (0, 1) for epoch in (0, 1)
    ]
    assert len({tuple(p.tolist()) for p in permutations}) == 4


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 50), world_size=st.integers(1, 8))
def test_the_evaluation_sees_every_sample_once_in_as_many_batches_for_each_process(samples, batch_size, world_size):
    if samples < world_size:
        with pytest.raises(ValueError, match="Use fewer processes"):
            evaluation_parts(samples, batch_size, world_size=world_size)
        return
    parts = [evaluation_parts(samples, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(torch.cat([t for part in parts for t in part]).tolist()) == list(range(samples))
    assert len({len(part) for part in parts}) == 1
    for part in parts:
        sizes = {len(t) for t in part}
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= max(batch_size, 2)


def test_seeds_are_the_same_on_every_machine():
    assert derive_seed(0, "order", 3) == 10972076058678547974
    assert derive_seed(1, 11) != derive_seed(11, 1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"samples": 7}, "7 training samples make no batch of 8. Use a smaller batch_size"),
        ({"world_size": 3}, "must be a positive multiple of their number, got 8"),
        ({"batch_size": 0}, "positive multiple"),
        ({"rank": 2, "world_size": 2}, r"rank must lie in \[0, world_size\), got rank=2, world_size=2"),
    ],
)
def test_bad_orders_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        EpochOrder(**{"samples": 20, "batch_size": 8, **changes})


def test_a_negative_start_is_refused_at_once():
    with pytest.raises(ValueError, match="start is the number of steps done and must be at least 0, got -1"):
        EpochOrder(samples=20, batch_size=8).batches(-1)


@pytest.mark.parametrize(
    ("changes", "text"), [({"batch_size": 0}, "at least 1, got 0"), ({"rank": 1}, "rank must lie in")]
)
def test_bad_evaluations_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        evaluation_parts(**{"samples": 20, "batch_size": 8, **changes})
