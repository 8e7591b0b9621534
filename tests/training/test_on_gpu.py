"""On a GPU: no step waits for the device, and with ``deterministic`` a resumed run is the same bit for bit."""

import dataclasses
import signal

import pytest
import torch
from toy_runs import (
    CONFIG,
    Toy,
    ToyData,
    equal,
    make_optimizer,
    make_sparsifier,
    read_metrics,
    signal_at,
    toy_run,
    toy_task,
)

from horst.training import Interrupted, LoopConfig, train
from horst.training.run import Run

pytestmark = pytest.mark.gpu


class OnDevice(ToyData):
    """As a source that prefetches: batches are on the device when they are asked for."""

    def batches(self, start):
        for x, y in super().batches(start):
            yield x.cuda(), y.cuda()


@pytest.mark.parametrize("optimizer", ["adamw", "horst"])
@pytest.mark.parametrize("method", [None, "acdc"])
@pytest.mark.parametrize("compile", ["off", "on"])
def test_no_step_waits_for_the_device(optimizer, method, compile, tmp_path, monkeypatch):
    step = Run.train_step

    def watched(self, inputs, targets):
        changes = self.sparsifier is not None and self.sparsifier.schedule.change(self.step + 1) is not None
        # The first steps build state and kernels, and a change of masks counts and selects.
        torch.cuda.set_sync_debug_mode("default" if self.step < 3 or changes else "error")
        try:
            step(self, inputs, targets)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "train_step", watched)
    model = Toy(dropout=0.1).cuda()
    opt = make_optimizer(optimizer, model.parameters())
    config = LoopConfig(compile=compile, clip_norm=1.0, ema_decay=0.9, accumulate=2, log_every=7, checkpoint_every=None)
    task = dataclasses.replace(toy_task(model), train=OnDevice(), evaluate=lambda model: {"nothing": 0.0})
    sparsifier = make_sparsifier(method, model, opt)
    result = train(task, opt, config, steps=30, sparsifier=sparsifier, directory=tmp_path)
    assert result.step == 30


@pytest.mark.parametrize("compile", ["off", "on"])
@pytest.mark.parametrize("method", [None, "acdc"])
def test_with_deterministic_a_resumed_run_is_the_same_bit_for_bit(method, compile, tmp_path, monkeypatch):
    config = dataclasses.replace(CONFIG, deterministic=True, precision="bf16", compile=compile)
    weights, _ = toy_run(tmp_path / "whole", config, method=method, device="cuda")
    monkeypatch.setattr("toy_runs.ToyData", signal_at({7, 15}, signal.SIGTERM))
    for _ in range(2):
        with pytest.raises(Interrupted):
            toy_run(tmp_path / "parts", config, method=method, device="cuda")
    again, _ = toy_run(tmp_path / "parts", config, method=method, device="cuda")
    assert equal(again, weights)
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
