"""A run that is stopped and resumed equals the run that never was, bit for bit: weights and metrics."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from toy_runs import CONFIG, ToyData, equal, read_metrics, signal_at, toy_run

from horst.cli.progress import logging_to_stderr
from horst.training import Interrupted
from horst.training.interruption import StopRequest

HERE = Path(__file__).parent


@pytest.mark.parametrize("seeds", ["2", pytest.param("0 1 3 4 5 6 7 8", marks=pytest.mark.slow)])
def test_a_run_killed_at_any_moment_and_resumed_equals_the_uninterrupted_run(seeds, tmp_path):
    command = [sys.executable, str(HERE / "kill_worker.py"), str(tmp_path), *seeds.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    weights = torch.load(tmp_path / "uninterrupted" / "final.pt", weights_only=True)
    metrics = read_metrics(tmp_path / "uninterrupted")
    for case, entry in report.items():
        final = torch.load(tmp_path / case / "final.pt", weights_only=True)
        assert equal(final, weights), (case, entry)
        assert read_metrics(tmp_path / case) == metrics, (case, entry)
        left = sorted(p.name for p in (tmp_path / case / "checkpoints").glob("step-*"))
        assert left[-1] == "step-00000030"
    assert all(entry["kills"] == 1 for case, entry in report.items() if case.startswith("moment")), report
    assert sum(entry["kills"] for case, entry in report.items() if case.startswith("random")) >= 3, report


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    weights, _ = toy_run(folder)
    return weights, read_metrics(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops_and_the_run_goes_on(number, code, uninterrupted, tmp_path, monkeypatch):
    steps = {1, 7, 8, 18, 30}  # 7: an evaluation is due, 18: a checkpoint, 30: the last
    monkeypatch.setattr("toy_runs.ToyData", signal_at(steps, number))
    before = signal.getsignal(number)
    for expected in sorted(steps):
        with pytest.raises(Interrupted) as caught:
            toy_run(tmp_path)
        assert (caught.value.step, caught.value.code) == (expected, code)
        assert caught.value.checkpoint == tmp_path / "checkpoints" / f"step-{expected:08d}"
        assert "run again to go on" in str(caught.value)
        assert signal.getsignal(number) is before
    weights, result = toy_run(tmp_path)
    assert result.step == 30
    assert equal(weights, uninterrupted[0])
    assert read_metrics(tmp_path) == uninterrupted[1]


def test_a_run_stopped_twice_at_the_same_step_evaluates_it_once(uninterrupted, tmp_path, monkeypatch):
    steps = {7}
    monkeypatch.setattr("toy_runs.ToyData", signal_at(steps, signal.SIGTERM))
    with pytest.raises(Interrupted):
        toy_run(tmp_path)
    steps.add(8)  # the signal comes while step 8 is prepared, after the evaluation that was put off
    with pytest.raises(Interrupted):
        toy_run(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")  # as if killed before it was written
    weights, _ = toy_run(tmp_path)
    assert equal(weights, uninterrupted[0])
    assert read_metrics(tmp_path) == uninterrupted[1]


def test_without_periodic_checkpoints_a_signal_saves_all_the_same(uninterrupted, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, checkpoint_every=None)
    monkeypatch.setattr("toy_runs.ToyData", signal_at({11}, signal.SIGTERM))
    with pytest.raises(Interrupted):
        toy_run(tmp_path, config)
    weights, result = toy_run(tmp_path, config)
    assert equal(weights, uninterrupted[0])
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000011"


def test_the_time_of_a_resumed_run_is_that_of_all_its_processes(tmp_path, monkeypatch):
    seconds = [0.0]

    class Slow(signal_at({11}, signal.SIGTERM)):
        def batches(self, start):
            for batch in super().batches(start):
                seconds[0] += self.rows == 8  # a second for each batch, and none for an evaluation's
                yield batch

    monkeypatch.setattr("toy_runs.ToyData", Slow)
    monkeypatch.setattr("horst.training.progress.time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    with pytest.raises(Interrupted):
        toy_run(tmp_path)
    seconds[0] += 1000.0  # between the two processes
    _, result = toy_run(tmp_path)
    assert result.seconds == 30.0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines if "loss" in line] == [4, 8, 12, 16, 20, 24, 28, 30]


def test_the_process_exits_with_the_signals_code(tmp_path):
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
import toy_runs
from pathlib import Path
batches = toy_runs.ToyData.batches
def with_signal(self, start):
    for step, batch in enumerate(batches(self, start)):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler may send it twice
        yield batch
toy_runs.ToyData.batches = with_signal
toy_runs.toy_run(Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "checkpoints" / "step-00000003" / "checkpoint.json").exists()


class SignalsWithin(io.RawIOBase):
    """A log that gets a signal while a line with ``words`` is written to it."""

    def __init__(self, words, number):
        self.words, self.number, self.content = words, number, b""

    def writable(self):
        return True

    def write(self, data):
        self.content += bytes(data)
        if self.words in bytes(data):
            self.words = b"never again"
            os.kill(os.getpid(), self.number)
        return len(data)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_within_a_line_of_the_log_saves_all_the_same(number, uninterrupted, tmp_path):
    """A stream refuses a second writer within the first: what the signal says must wait for the line's end."""
    raw = SignalsWithin(b"step 12 of 30", number)
    stream = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    with contextlib.redirect_stderr(stream), logging_to_stderr(), pytest.raises(Interrupted) as caught:
        toy_run(tmp_path)
    assert caught.value.step == 12
    assert raw.content.decode().splitlines()[-1] == f"{signal.Signals(number).name}: the run saves and stops."
    weights, _ = toy_run(tmp_path)
    assert equal(weights, uninterrupted[0])
    assert read_metrics(tmp_path) == uninterrupted[1]


def test_a_signal_saves_where_no_thread_is_left_to_say_so(tmp_path, monkeypatch):
    def refuse(function, arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refuse)
    monkeypatch.setattr("toy_runs.ToyData", signal_at({7}, signal.SIGTERM))
    with pytest.raises(Interrupted) as caught:
        toy_run(tmp_path, dataclasses.replace(CONFIG, checkpoint_every=None))
    assert caught.value.step == 7


def test_a_signal_in_the_last_evaluation_stops_the_run_after_it(uninterrupted, tmp_path, monkeypatch):
    """Else the caller would go on to its next run, until it is killed."""
    evaluations = []

    class Signalling(ToyData):
        def batches(self, start):
            if self.rows == 16:
                evaluations.append(start)
                if len(evaluations) == 10:  # of the average after step 30; those before are after steps 7, 14, 21, 28
                    os.kill(os.getpid(), signal.SIGTERM)
            return super().batches(start)

    monkeypatch.setattr("toy_runs.ToyData", Signalling)
    config = dataclasses.replace(CONFIG, checkpoint_every=None)
    with pytest.raises(Interrupted) as caught:
        toy_run(tmp_path, config)
    assert caught.value.checkpoint == tmp_path / "checkpoints" / "step-00000030"
    weights, result = toy_run(tmp_path, config)
    assert len(evaluations) == 10, "it was evaluated again"
    assert result.step == 30
    assert equal(weights, uninterrupted[0])
    assert read_metrics(tmp_path) == uninterrupted[1]


@pytest.fixture
def noted():
    """Signals that nobody has answered."""
    found = []
    handlers = {n: signal.signal(n, lambda number, _: found.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
    yield found
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "passed_on"), [(None, True), (ValueError, True), (SystemExit, False), (KeyboardInterrupt, False)]
)
def test_a_signal_that_nobody_answered_is_passed_on(error, passed_on, noted):
    with contextlib.suppress(error or ()), StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not noted
        if error is not None:
            raise error
    assert noted == [signal.SIGTERM] * passed_on


@pytest.mark.usefixtures("noted")
def test_a_second_ctrl_c_ends_at_once_but_not_under_torchrun(monkeypatch):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with StopRequest() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT


class ClosedTerminal:
    """What rich shows in a terminal that is closed."""

    def fail(self, *args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    print = stop = fail

    @property
    def console(self):
        return self

    def start(self):
        pass

    def add_task(self, *args, **options):
        pass

    update = add_task


def test_a_terminal_that_is_closed_does_not_keep_a_run_from_saving(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("horst.training.progress._make_bar", ClosedTerminal)
    monkeypatch.setattr("toy_runs.ToyData", signal_at({8}, signal.SIGHUP))  # step 7 is evaluated, which is shown
    with pytest.raises(Interrupted) as caught:
        toy_run(tmp_path)
    assert (caught.value.step, caught.value.code) == (8, 129)


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [
        ("adamw", None),
        ("adamw", "rigl"),
        ("adamw", "imp"),
        ("horst", "acdc-values"),
        ("horst", "srste"),
        ("horst", "admm"),
        ("horst", "safe"),
        ("adamw", "lrr"),
        ("adamw", "ast"),
        ("adams", "cast"),
    ],
)
def test_every_kind_of_run_resumes_bit_for_bit(optimizer, method, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, checkpoint_every=None)
    weights, _ = toy_run(tmp_path / "whole", config, steps=26, optimizer=optimizer, method=method)
    monkeypatch.setattr("toy_runs.ToyData", signal_at({10, 15}, signal.SIGTERM))
    for _ in range(2):
        with pytest.raises(Interrupted):
            toy_run(tmp_path / "parts", config, steps=26, optimizer=optimizer, method=method)
    again, _ = toy_run(tmp_path / "parts", config, steps=26, optimizer=optimizer, method=method)
    assert equal(again, weights)
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
