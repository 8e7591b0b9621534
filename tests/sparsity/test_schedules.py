"""Phase tables against the reference's, and schedules that cannot be."""

import math
from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from horst.sparsity import Cubic, DropGrow, Phases, Rounds, acdc_epochs, acdc_steps, rigl_steps
from horst.sparsity.schedules import Refresh
from horst.sparsity.selection import exact_floor


def test_acdc_100_epochs_is_the_reference_table():
    schedule = acdc_epochs(100)
    assert schedule.prune_at == (10, 20, 30, 40, 50, 60, 70, 85)
    assert schedule.restore_at == (15, 25, 35, 45, 55, 65, 75)


def test_acdc_200_epochs_is_the_reference_table():
    schedule = acdc_epochs(200)
    assert schedule.prune_at == (*range(10, 171, 10), 185)
    assert schedule.restore_at == (*range(15, 166, 10), 175)


def test_acdc_300_epochs_extends_the_rule():
    schedule = acdc_epochs(300)
    assert schedule.prune_at == (*range(10, 271, 10), 285)
    assert schedule.restore_at == (*range(15, 266, 10), 275)


def test_acdc_for_cifar_is_the_reference_table():
    schedule = acdc_epochs(200, sparse=20, dense=20, last_dense=20, last_sparse=30)
    assert schedule.prune_at == (10, 50, 90, 130, 170)
    assert schedule.restore_at == (30, 70, 110, 150)


@pytest.mark.parametrize("epochs", range(40, 140))
def test_every_length_keeps_the_rule(epochs):
    schedule = acdc_epochs(epochs)
    bounds = (0, *schedule.changes, epochs)
    lengths = [b - a for a, b in pairwise(bounds)]
    assert lengths[0] == 10
    assert lengths[1:-2] == [5] * len(lengths[1:-2])
    assert lengths[-2] == 10
    assert 15 <= lengths[-1] < 25


def test_epochs_become_steps():
    schedule = acdc_epochs(100, steps_per_epoch=1251)
    assert schedule.changes == tuple(c * 1251 for c in acdc_epochs(100).changes)
    assert schedule.end == 100 * 1251
    assert schedule.change(10 * 1251) == "prune"
    assert schedule.change(15 * 1251) == "restore"
    assert schedule.change(10 * 1251 + 1) is None


def test_steps_scale_the_hundred_epoch_table():
    assert acdc_steps(1000).changes == tuple(10 * c for c in acdc_epochs(100).changes)
    assert acdc_steps(20).prune_at[0] == 2
    with pytest.raises(ValueError, match="at least 20 steps, got 19"):
        acdc_steps(19)


def test_the_table_is_printed_in_epochs():
    table = acdc_epochs(40, steps_per_epoch=7).table().splitlines()
    assert table[0].split() == ["phase", "from", "to", "length"]
    assert [line.split() for line in table[1:]] == [
        ["dense", "0", "10", "10"],
        ["sparse", "10", "15", "5"],
        ["dense", "15", "25", "10"],
        ["sparse", "25", "40", "15"],
    ]
    assert Phases((0, 3, 5), end=9).table().splitlines()[1].split() == ["sparse", "0", "3", "3"]


def test_cubic_by_hand():
    schedule = Cubic(begin=10, end=20, every=4, initial=0.2)
    assert [s for s in range(40) if schedule.is_due(s)] == [10, 14, 18, 20]
    assert schedule.sparsity(10, 0.9) == pytest.approx(0.2, abs=1e-15)
    assert schedule.sparsity(15, 0.9) == pytest.approx(0.9 - 0.7 / 8, abs=1e-15)
    assert schedule.sparsity(20, 0.9) == 0.9
    assert schedule.sparsity(35, 0.9) == 0.9
    assert len(schedule.table(0.9).splitlines()) == 5


@given(
    length=st.integers(1, 200), done=st.floats(0.0, 1.0), thousandths=st.integers(1, 999), initial=st.integers(0, 999)
)
@example(length=55, done=0.6, thousandths=500, initial=0)  # 0.468, which floating point puts below
def test_cubic_is_the_nearest_number_to_the_exact_target(length, done, thousandths, initial):
    step = round(done * length)
    exact_final, exact_initial = Fraction(thousandths, 1000), Fraction(min(initial, thousandths), 1000)
    exact = exact_final + (exact_initial - exact_final) * (1 - Fraction(step, length)) ** 3
    schedule = Cubic(begin=4, end=4 + length, initial=float(exact_initial))
    assert schedule.sparsity(4 + step, thousandths / 1000) == float(exact)


def test_gradual_targets_remove_what_their_decimals_say():
    assert exact_floor(Cubic(begin=4, end=59).sparsity(37, 0.5), 1000) == 468
    assert exact_floor(Rounds(rounds=2, steps_per_round=10).sparsity(1, 0.99), 1000) == 900


def test_drop_fraction_is_a_cosine():
    schedule = DropGrow(every=100, end=1000, fraction=0.3)
    assert [s for s in range(2000) if schedule.is_due(s)] == list(range(100, 1000, 100))
    assert schedule.drop_fraction(0) == 0.3
    assert schedule.drop_fraction(500) == pytest.approx(0.15, abs=1e-15)
    assert DropGrow(every=100, end=1000, decay="constant").drop_fraction(900) == 0.3
    assert rigl_steps(1000) == DropGrow(every=100, end=750, fraction=0.3)
    assert len(schedule.table().splitlines()) == 10


def test_rounds_by_hand():
    schedule = Rounds(rounds=2, steps_per_round=10, rewind_to=4)
    assert [s for s in range(40) if schedule.starts_round(s)] == [10, 16]
    assert schedule.end == 22
    assert [schedule.training_step(s) for s in (0, 9, 10, 15, 16, 21)] == [0, 9, 4, 9, 4, 9]
    assert schedule.sparsity(1, 0.75) == 0.5
    assert schedule.sparsity(2, 0.75) == 0.75


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: acdc_epochs(39), "need at least 40 epochs .* got 39. Shorten the phases, or use acdc_steps"),
        (lambda: acdc_epochs(100, 0), "an epoch at least one step"),
        (lambda: Phases((5, 3, 8), end=9), r"in order and before the end, got \(5, 3, 8, 9\)"),
        (lambda: Phases((5, 6, 9), end=9), "before the end"),
        (lambda: Phases((5, 6), end=9), "must end in a sparse phase"),
        (lambda: Phases((-1,), end=9), "start at 0 or later"),
        (lambda: Phases((1,), end=9, steps_per_epoch=0), "steps_per_epoch must be at least 1"),
        (lambda: Cubic(begin=10, end=10), "must end after it begins, got begin=10, end=10"),
        (lambda: Cubic(begin=0, end=10, every=0), "every must be at least 1"),
        (lambda: Cubic(begin=0, end=10, initial=50), "Give a fraction: 0.5, not 50"),
        (lambda: DropGrow(every=100, end=100), "must come before end=100"),
        (lambda: DropGrow(fraction=0.0), r"fraction must lie in \(0, 1\]"),
        (lambda: DropGrow(decay="linear"), "decay must be 'cosine' or 'constant'"),
        (lambda: rigl_steps(1000, until=75), r"share of training in \(0, 1\], got 75"),
        (
            lambda: rigl_steps(20),
            r"20 steps are too few for an exchange every 100 steps, .* before step 15 .* Pass every=, as in rigl_steps",
        ),
        (lambda: Rounds(0, 10), "at least one round"),
        (lambda: Rounds(2, 10, rewind_to=10), r"must lie in a round, \[0, 10\), got 10"),
    ],
)
def test_schedules_that_cannot_be_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: acdc_epochs(100, 625 / 10), "steps_per_epoch must be a whole number, got 62.5"),
        (lambda: acdc_epochs(100, 3, warmup=2.5), "step must be a whole number, got 7.5"),
        (lambda: Phases((5,), end=9.5), "step must be a whole number, got 9.5"),
        (lambda: Cubic(begin=2.5, end=75), "begin must be a whole number, got 2.5"),
        (lambda: DropGrow(every=10.5, end=75), "every must be a whole number, got 10.5"),
        (lambda: Rounds(3, 25, rewind_to=2.5), "rewind_to must be a whole number, got 2.5"),
        (lambda: Refresh(every=32, end=1001 / 8), "steps must be a whole number, got 125.125"),
        (lambda: Refresh(every=32, end=math.inf), "steps must be a whole number, got inf"),
    ],
)
def test_fractions_of_steps_are_refused(make, text):
    with pytest.raises(ValueError, match=rf"{text}. Divide with //, or round."):
        make()


def test_whole_numbers_may_be_floats():
    floats, whole = Cubic(begin=250.0, end=1000 * 0.75, every=100), Cubic(begin=250, end=750, every=100)
    for step in range(1000):
        assert floats.is_due(step) == whole.is_due(step)
        assert floats.sparsity(step, 0.9) == whole.sparsity(step, 0.9)
