"""The settings: what they stand for, and what is refused before anything is computed."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from horst.recovery import SparsifyConfig
from horst.training import LoopConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "sparsity is needed unless the pattern is N:M"),
        ({"sparsity": 70}, r"sparsity must lie in \[0, 1\), got 70"),
        ({"sparsity": 0.7, "pattern": "2:4"}, "2:4 fixes the sparsity at 0.5, got sparsity=0.7"),
        ({"sparsity": 0.5, "pattern": "2/4"}, "pattern must be None"),
        ({"pattern": "2:4", "stages": (0.3,)}, "has no meaning with 2:4"),
        ({"sparsity": 0.7, "stages": (0.5, 0.5)}, r"stages must rise .* below the final sparsity 0.7"),
        ({"sparsity": 0.7, "stages": (0.8,)}, r"stages must rise .*, got 0\.8\. To reach 0\.7 in two steps give"),
        ({"sparsity": 0.7, "stages": (0.0,)}, r"stages must rise"),
        ({"sparsity": 0.5, "method": "obs"}, "method must be one of 'sparsegpt', 'wanda', 'magnitude', got 'obs'"),
        ({"sparsity": 0.5, "distribution": "erk"}, "distribution must be one of 'uniform', 'global', got 'erk'"),
        (
            {"pattern": "2:4", "distribution": "global"},
            "2:4 fixes the sparsity of every layer: .*distribution='global'",
        ),
        ({"sparsity": 0.5, "train": "ast", "distribution": "global"}, "train='ast' gives every layer the same share"),
        ({"sparsity": 0.5, "layers": "head"}, "layers must be 'blocks', 'all_linear', 'all', 'paper' or None"),
        ({"sparsity": 0.5, "train": "never"}, "train must be one of 'fixed', 'refresh'"),
        ({"sparsity": 0.5, "distill": "mse"}, "distill must be one of"),
        ({"sparsity": 0.5, "optimizer": "sgd"}, "optimizer must be one of 'horst', 'adamw', 'adams', got 'sgd'"),
        ({"sparsity": 0.5, "parallel": "pp"}, "parallel must be one of 'ddp', 'fsdp', got 'pp'"),
        ({"sparsity": 0.5, "tokens": 10, "steps": 10}, "tokens=10 and steps=10 both say how long to train"),
        ({"sparsity": 0.5, "batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"sparsity": 0.5, "steps": 2.5}, "steps must be a whole number"),
        ({"sparsity": 0.5, "lr": 0.0}, "lr must be positive"),
        ({"sparsity": 0.5, "betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"sparsity": 0.5, "warmup": 10}, "warmup must lie in .* a share of the steps"),
        ({"sparsity": 0.5, "temperature": float("nan")}, "temperature must be positive"),
        ({"sparsity": 0.5, "weight_decay": -1.0}, "weight_decay"),
        ({"sparsity": 0.5, "label_weight": -1.0}, "label_weight"),
        (
            {"sparsity": 0.5, "optimizer": "adamw", "l1": 0.1},
            "l1 0.1 is an option of HORST, and the optimizer is adamw",
        ),
        ({"sparsity": 0.5, "optimizer": "adamw", "alpha": 7.0}, "alpha 7.0 is an option of HORST, .*leave alpha out"),
        ({"sparsity": 0.5, "train": "cast", "optimizer": "adams", "alpha": "auto"}, "alpha auto is an option of HORST"),
        ({"sparsity": 0.5, "distill": "none", "label_weight": 0.0}, "leave no loss"),
        ({"sparsity": 0.5, "distill": "none", "distill_weight": 1.0}, "has no meaning with distill='none'"),
        ({"sparsity": 0.5, "refresh_every": 5}, "refresh_every=5 is for train='refresh'"),
        ({"sparsity": 0.5, "pattern": (4, 4)}, "sparsegpt prunes single weights or N:M, got blocks of 4 x 4"),
        ({"sparsity": 0.5, "lora": 4, "train": "refresh"}, "lora=4 trains with fixed masks"),
        ({"sparsity": 0.5, "lora": 4, "parallel": "fsdp"}, "lora=4 works with parallel='ddp'"),
        ({"sparsity": 0.5, "lora": 4, "l1": 0.1}, "lora=4 trains none"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SparsifyConfig(**settings)


def test_a_pattern_of_names_is_a_list():
    with pytest.raises(TypeError, match=r"exclude is a list of patterns"):
        SparsifyConfig(sparsity=0.5, exclude="head.*")


@pytest.mark.parametrize(("name", "value"), [("stages", 0.5), ("stages", 3), ("betas", 0.9)])
def test_a_number_where_a_list_belongs_is_refused(name, value):
    with pytest.raises(TypeError, match=rf"{name} is a list of .*: write \[{value}\], not {value}\."):
        SparsifyConfig(sparsity=0.7, **{name: value})


@given(sparsity=st.floats(0.05, 0.95), steps=st.integers(20, 500))
def test_stages_rise_to_the_sparsity_and_share_all_steps(sparsity, steps):
    config = SparsifyConfig(sparsity=sparsity)
    targets, parts = config.targets, config.steps_of_stages(steps)
    assert targets[-1] == sparsity
    assert list(targets) == sorted(set(targets))
    assert len(targets) == 1 if sparsity <= 0.6 else len(targets) > 2
    assert sum(parts) == steps
    assert len(parts) == len(targets)
    assert parts[-1] >= max(parts)


def test_stages_can_be_given_or_left_out():
    assert SparsifyConfig(sparsity=0.8, stages=[0.5]).targets == (0.5, 0.8)
    assert SparsifyConfig(sparsity=0.8, stages=()).targets == (0.8,)
    assert SparsifyConfig(pattern="1:4").targets == (0.75,)


def test_too_few_steps_for_the_stages_are_refused():
    message = r"2 steps are too few for 3 stages .*an empty list of stages prunes at once .* a bare --stages"
    with pytest.raises(ValueError, match=message):
        SparsifyConfig(sparsity=0.7).steps_of_stages(2)


def test_the_rate_rises_to_its_peak_and_falls_to_zero():
    schedule = SparsifyConfig(sparsity=0.5, warmup=0.1).schedule(100)
    factors = [schedule.factor(step, 100) for step in range(101)]
    assert factors[10] == 1.0
    assert factors[100] == pytest.approx(0.0, abs=1e-12)
    assert 0 < factors[0] < factors[5] < 1.0
    assert SparsifyConfig(sparsity=0.5).schedule(1).factor(0, 1) == 1.0  # one step is not lost to the warm-up


def test_weights_of_the_terms():
    config = SparsifyConfig(sparsity=0.5)
    assert [config.weights(kind) for kind in ("kl", "squarehead", "none")] == [(0.33, 0.67), (1.0, 1.0), (1.0, 0.0)]
    assert SparsifyConfig(sparsity=0.5, label_weight=0.0, distill_weight=2.0).weights("kl") == (0.0, 2.0)


def test_sam_is_for_admm():
    with pytest.raises(ValueError, match=r"sam_radius=0\.1 is for train='admm', got train='fixed'"):
        SparsifyConfig(sparsity=0.5, sam_radius=0.1)
    with pytest.raises(ValueError, match="sam_radius"):
        SparsifyConfig(sparsity=0.5, train="admm", sam_radius=-1.0)


@pytest.mark.parametrize(
    "settings", [{"train": "cast"}, {"optimizer": "adams"}, {"train": "admm", "optimizer": "adams"}]
)
def test_cast_and_its_optimizer_belong_together(settings):
    with pytest.raises(ValueError, match="train='cast' and optimizer='adams' belong together"):
        SparsifyConfig(sparsity=0.5, **settings)


@pytest.mark.parametrize(("device", "precision"), [("cpu", "float32"), ("cuda", "bf16")])
def test_the_precision_follows_the_device_where_none_is_chosen(device, precision):
    found = SparsifyConfig(sparsity=0.5).loop_on(torch.device(device))
    assert (found.precision, found.clip_norm) == (precision, 1.0)
    chosen = LoopConfig(precision="bf16", accumulate=2)
    assert SparsifyConfig(sparsity=0.5, loop=chosen).loop_on(torch.device(device)) == chosen
