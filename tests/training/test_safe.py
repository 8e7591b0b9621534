"""SAFE in the loop: two backward passes per step, against the formulas in float64."""

import itertools
import math

import pytest
import torch
from torch import nn

from horst.sparsity import ADMM, safe
from horst.training import LoopConfig, Task, train

STEPS, EVERY, RADIUS, PENALTY, LR = 9, 3, 0.3, 0.5, 0.05


class Data:
    def batches(self, start):
        for step in itertools.count(start):
            x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            yield x, x[:, :4].sin()


def gradient(w, x, y):
    """Of the mean of (tanh(x W') - y)^2."""
    out = torch.tanh(x @ w.T)
    return (2 / out.numel() * (out - y) * (1 - out**2)).T @ x


def largest(w, k):
    """Only the k entries of largest magnitude."""
    kept = torch.zeros(w.numel(), dtype=torch.bool)
    kept[w.flatten().abs().topk(k).indices] = True
    return w * kept.view_as(w)


def reference(w, steps):
    z, u = largest(w, 12), torch.zeros_like(w)
    for t, (x, y) in enumerate(itertools.islice(Data().batches(0), steps)):
        g = gradient(w, x, y)
        g = gradient(w + RADIUS * g / g.norm(), x, y)
        strength = PENALTY / 2 * (1 - math.cos(math.pi * t / STEPS))
        w = w - LR * (g + strength * (w - z + u))
        if t + 1 == STEPS:
            return largest(w, 12)
        if (t + 1) % EVERY == 0:
            z = largest(w + u, 12)
            u = u + w - z
    return w


def run(tmp_path, model, sparsifier, optimizer, *, accumulate=1, steps=STEPS):
    task = Task(
        model=model,
        loss=lambda model, x, y: (torch.tanh(model(x)) - y).square().mean(),
        train=Data(),
        evaluate=lambda model: {},
    )
    config = LoopConfig(precision="float32", compile="off", accumulate=accumulate, checkpoint_every=None)
    train(task, optimizer, config, steps=steps, sparsifier=sparsifier, directory=tmp_path)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(6, 4, bias=False).double()


OPTIONS = {"sparsity": 0.5, "steps": STEPS, "every": EVERY, "penalty": PENALTY, "layers": "all_linear"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loop_takes_safes_steps(tmp_path, model, accumulate):
    expected = reference(model.weight.detach().clone(), STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run(tmp_path, model, safe(model, optimizer, sam_radius=RADIUS, **OPTIONS), optimizer, accumulate=accumulate)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-12, atol=1e-14)
    assert int((model.weight == 0).sum()) == 12


def test_without_a_radius_there_is_one_pass(tmp_path, model, monkeypatch):
    monkeypatch.setattr(ADMM, "ascended", lambda self: pytest.fail("a second pass"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    run(tmp_path, model, safe(model, optimizer, sam_radius=0.0, **OPTIONS), optimizer)


def test_after_the_projection_there_is_one_pass(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sparsifier = safe(model, optimizer, sam_radius=RADIUS, **OPTIONS)
    run(tmp_path / "first", model, sparsifier, optimizer)
    assert not sparsifier.wants_ascent
    w = model.weight.detach().clone()
    x, y = next(Data().batches(0))
    run(tmp_path / "second", model, sparsifier, optimizer, steps=1)
    torch.testing.assert_close(model.weight.detach(), w - LR * gradient(w, x, y) * (w != 0), rtol=1e-12, atol=1e-14)
