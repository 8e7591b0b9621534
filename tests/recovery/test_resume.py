"""A run that was stopped anywhere goes on, bit for bit; and goes on with nothing else."""

import dataclasses
import errno
import os
import signal

import pytest
import torch
from recovery_runs import LOOP, SHORT, equal, make, score, weights, windows

import horst
from horst.files import write_text
from horst.recovery.data import RowBatches
from horst.recovery.methods import METHODS, TrainMethod
from horst.recovery.whole import Pruner
from horst.sparsity import GMP, Cubic
from horst.training import CheckpointError, Interrupted

# Dropout draws random numbers; 5 + 5 + 10 steps, with checkpoints every three.
SETTINGS = {**SHORT, "steps": 20, "sparsity": 0.75, "stages": (0.25, 0.5), "evaluate": score}


def run(directory, *, model="plain", **changes):
    net, data = make(model)
    report = horst.sparsify(net, data, directory=directory, **{**SETTINGS, **changes})
    return weights(net), report


def numbers(report):
    """A report without what a clock says."""
    found = report.to_dict()
    for row in (*found["stages"], *found["rows"]):
        row.pop("seconds")
        row.pop("units_per_second", None)
    return found


@pytest.fixture
def kill(monkeypatch):
    """Send this process a signal when a batch is asked for; each batch's is sent once."""

    def at(step):
        left = {step}

        def batches(self, start):
            for number, batch in enumerate(original(self, start), start):
                if number in left:
                    left.remove(number)
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        original = RowBatches.batches
        monkeypatch.setattr(RowBatches, "batches", batches)

    return at


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (2, {}),
        (5, {}),  # the first step of the second stage
        (12, {}),
        (12, {"train": "refresh", "refresh_every": 2}),
        (5, {"lora": 2}),
        (12, {"lora": 2}),
        (7, {"optimizer": "adamw"}),
        (7, {"train": "admm", "stages": None}),
        (7, {"train": "admm", "sam_radius": 0.1, "stages": None}),
        (7, {"train": "ast", "stages": None}),
        (7, {"train": "cast", "optimizer": "adams", "stages": None}),
    ],
)
def test_an_interrupted_run_goes_on_bit_for_bit(step, changes, kill, tmp_path):
    expected, report = run(tmp_path / "whole", **changes)
    kill(step)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", **changes)
    found, resumed = run(tmp_path / "stopped", **changes)
    assert equal(found, expected)
    assert numbers(resumed) == numbers(report)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_run_that_dies_while_it_prunes_goes_on_bit_for_bit(stage, monkeypatch, tmp_path):
    expected, report = run(tmp_path / "whole")
    prune, calls = Pruner.prune, []

    def dies(self, model, sparsity):
        calls.append(sparsity)
        if len(calls) == stage + 1:
            raise KeyboardInterrupt
        return prune(self, model, sparsity)

    monkeypatch.setattr(Pruner, "prune", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped")
    found, resumed = run(tmp_path / "stopped")
    assert equal(found, expected)
    assert numbers(resumed) == numbers(report)
    assert calls == [0.25, 0.5, 0.75][: stage + 1] + [0.25, 0.5, 0.75][stage:]  # nothing is pruned twice


@pytest.mark.parametrize("step", [3, 9])
def test_a_method_that_starts_dense_goes_on_bit_for_bit(step, kill, monkeypatch, tmp_path):
    """Any sparsifier that ends sparse can be a row of the table: here gradual pruning from the dense weights."""

    def gradual(model, optimizer, masks, config, steps):
        assert masks == {}
        return GMP(model, optimizer, sparsity=config.sparsity, schedule=Cubic(0, steps - 2, every=2))

    monkeypatch.setitem(METHODS, "fixed", TrainMethod(gradual, starts_dense=True))
    options = {"stages": None, "sparsity": 0.75}
    expected, report = run(tmp_path / "whole", **options)
    assert report.sparsity == 0.75
    assert [row["stage"] for row in report.rows()] == ["dense", "trained"]
    kill(step)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", **options)
    found, resumed = run(tmp_path / "stopped", **options)
    assert equal(found, expected)
    assert numbers(resumed) == numbers(report)
    with pytest.raises(ValueError, match="from dense to sparse in one stage: leave stages out"):
        run(None)


def test_a_finished_run_is_not_trained_again(monkeypatch, tmp_path):
    expected, report = run(tmp_path)
    monkeypatch.setattr(Pruner, "prune", lambda *_: pytest.fail("pruned again"))
    monkeypatch.setattr(RowBatches, "take", lambda *_: (windows(4), torch.full((4, 8), -100)))  # any training shows
    found, again = run(tmp_path)
    assert equal(found, expected)
    assert numbers(again) == numbers(report)


def test_checkpoints_of_earlier_stages_are_deleted(tmp_path):
    run(tmp_path)
    assert [bool(list(tmp_path.glob(f"stage-{i}/checkpoints/step-*"))) for i in (1, 2, 3)] == [False, False, True]


def test_a_directory_without_checkpoints_asked_for_has_one_per_stage(kill, tmp_path):
    loop = dataclasses.replace(LOOP, checkpoint_every=None)
    expected, _ = run(tmp_path / "whole", loop=loop)
    kill(12)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", loop=loop)
    assert equal(run(tmp_path / "stopped", loop=loop)[0], expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"lr": 1e-5}, "lr was 0.003, now 1e-05. Give 0.003 to go on, another directory, or delete this one"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"stages": None}, "stages was 0.25 0.5, now not given"),
        ({"steps": 24}, "another run: steps was 20, now 24. Give 20 to go on"),
        (
            {"lr": 1e-5, "model": "gpt2"},
            "lr was 0.003, now 1e-05; the model is not the same. Give what it was begun with",
        ),
    ],
)
def test_another_run_is_refused(changes, named, tmp_path):
    run(tmp_path)
    with pytest.raises(CheckpointError, match=named):
        run(tmp_path, **changes)


def test_other_data_is_refused(tmp_path):
    model, data = make("plain")
    horst.sparsify(model, data, directory=tmp_path, **SETTINGS)
    model, data = make("plain")
    with pytest.raises(CheckpointError, match=r"holds another run: the data is not the same. Give what it was begun"):
        horst.sparsify(model, data.flip(0), directory=tmp_path, **SETTINGS)


def test_a_full_disk_says_so_and_loses_nothing(monkeypatch, tmp_path):
    expected, _ = run(tmp_path / "whole")
    written = []

    def full(path, text):
        written.append(path)
        if len(written) > 3:  # the dense evaluation, the first pruning, the first stage
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(path, text)

    with monkeypatch.context() as patch:
        patch.setattr("horst.recovery.progress.write_text", full)
        with pytest.raises(CheckpointError, match=r"No space left on device. Make room.*step-00000005, is untouched"):
            run(tmp_path / "full")
    assert equal(run(tmp_path / "full")[0], expected)


def test_without_a_directory_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(None)
    assert list(tmp_path.iterdir()) == []
