"""Schedules against torch's own, and as pure functions of the step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from horst.training.lr_schedules import Constant, OneCycle, Triangular, WarmupCosine, set_learning_rate


def rates(scheduler_of, steps, lr=0.3):
    """The learning rate of each step under one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=lr)
    scheduler = scheduler_of(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step() if len(found) < steps else None
    return found


@pytest.mark.parametrize(("warmup", "steps"), [(3000, 25_000), (2, 5), (7, 40), (39, 40)])
def test_one_cycle_is_torchs_as_the_papers_code_calls_it(warmup, steps):
    def scheduler_of(optimizer):
        share = warmup / steps
        return OneCycleLR(
            optimizer, 0.3, steps, pct_start=share, cycle_momentum=False, div_factor=100.0, final_div_factor=1.0
        )

    mine = [0.3 * OneCycle(warmup_steps=warmup).factor(step, steps) for step in range(steps)]
    assert mine == pytest.approx(rates(scheduler_of, steps), rel=1e-9)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own, until torch 2.11
def test_warm_up_and_cosine_are_torchs_in_sequence():
    def scheduler_of(optimizer):
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=6)
        cosine = CosineAnnealingLR(optimizer, T_max=34, eta_min=0.3 * 0.02)
        return SequentialLR(optimizer, [warmup, cosine], milestones=[6])

    schedule = WarmupCosine(warmup_steps=6, start=0.1, end=0.02)
    theirs = rates(scheduler_of, 40)
    assert [0.3 * schedule.factor(step, 40) for step in range(40)] == pytest.approx(theirs, rel=1e-6)


def test_triangular_by_hand():
    found = [Triangular().factor(step, 10) for step in range(11)]
    assert found == pytest.approx([0.2, 0.6, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0])


@given(st.integers(2, 5000), st.data())
def test_factors_lie_between_zero_and_one_and_rise_before_they_fall(steps, data):
    warmup = data.draw(st.integers(0, steps - 1))
    schedule = data.draw(
        st.sampled_from([Constant(), OneCycle(warmup_steps=warmup), Triangular(), WarmupCosine(warmup_steps=warmup)])
    )
    at = sorted(data.draw(st.lists(st.integers(0, steps), min_size=3, max_size=3)))
    factors = [schedule.factor(step, steps) for step in at]
    assert all(-1e-12 <= f <= 1 + 1e-12 for f in factors)
    assert not factors[0] - 1e-12 > factors[1] < factors[2] - 1e-12


def test_it_can_drive_torchs_lambda_lr():
    schedule = Triangular()
    found = rates(lambda optimizer: LambdaLR(optimizer, lambda step: schedule.factor(step, 20)), 20)
    assert found == pytest.approx([0.3 * schedule.factor(step, 20) for step in range(20)])


def test_each_group_keeps_its_own_rate_and_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": rate}], capturable=True, foreach=True)
    optimizer.add_param_group({"params": [torch.zeros(2)], "lr": 0.25, "foreach": False})
    for factor in (0.1, 0.5, 1.0, 0.5):
        set_learning_rate(optimizer, factor)
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(0.5 * factor)
        assert optimizer.param_groups[1]["lr"] == 0.25 * factor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OneCycle(warmup_steps=-1), "warmup_steps must be at least 0, got -1"),
        (lambda: OneCycle(warmup_steps=3, start=1e-5, end=2.0), r"end must lie in \[0, 1\], got 2.0"),
        (lambda: Triangular(peak=float("nan")), "peak must lie in"),
        (lambda: OneCycle(warmup_steps=10).factor(0, 10), "warm-up of 10 steps leaves nothing of a run of 10"),
        (lambda: WarmupCosine(warmup_steps=11).factor(0, 10), "Lower warmup_steps"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
