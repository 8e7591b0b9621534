"""ADMM (SAFE, ELSA) against the formulas in float64, and what it asks of optimizer and loop."""

import copy
import functools
import math
import warnings
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sparse_methods import SAFE, Tiny, adamw, loss_of, train_step, train_with_scaler
from torch import nn

from horst import HORST
from horst.sparsity import ADMM
from horst.sparsity.controller import Event

STEPS, EVERY, PENALTY = 12, 4, 0.3


def project(w, keep, scores=None):
    """The ``keep`` entries of largest score, the others zero."""
    scores = w if scores is None else scores
    z = torch.zeros_like(w)
    index = scores.abs().flatten().topk(keep).indices
    z.view(-1)[index] = w.flatten()[index]
    return z


def cosine(t, ramp):
    return PENALTY * (1 - math.cos(math.pi * min(t / ramp, 1.0))) / 2


def quadratic(seed=0):
    """A model of one matrix and the gradient of its loss, sum((w - target)**2) / 2, in float64."""
    generator = torch.Generator().manual_seed(seed)
    w, target = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
    model = nn.Linear(6, 4, bias=False).double()
    model.weight.data.copy_(w)
    return model, w, target


def run(model, optimizer, sparsifier, target, steps=STEPS):
    for _ in range(steps):
        optimizer.zero_grad()
        ((model.weight - target).square().sum() / 2).backward()
        optimizer.step()
        event = sparsifier.step()
    return event


@pytest.mark.parametrize("ramp", [None, 5, 0])
def test_with_sgd_it_is_the_formula(ramp):
    model, w, target = quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    options = {"sparsity": 0.75, "steps": STEPS, "penalty": PENALTY, "every": EVERY, "ramp": ramp}
    sparsifier = ADMM(model, optimizer, **options, layers="all_linear")
    z, u = project(w, 6), torch.zeros_like(w)
    for t in range(STEPS):
        penalty = PENALTY if ramp == 0 else cosine(t, ramp or STEPS)
        w = w - 0.2 * ((w - target) + penalty * (w - z + u))
        if (t + 1) % EVERY == 0:
            z = project(w + u, 6)
            u = u + w - z
    event = run(model, optimizer, sparsifier, target)
    torch.testing.assert_close(model.weight.detach(), project(w, 6), rtol=1e-12, atol=1e-12)
    assert event == Event(STEPS, "prune", 0.75)
    assert sparsifier.is_finished


def test_the_second_moment_weighs_every_projection():
    model, w, target = quadratic(1)
    beta1, beta2, eps, lr = 0.9, 0.95, 1e-8, 0.05
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(beta1, beta2), eps=eps)
    options = {"sparsity": 0.75, "steps": STEPS, "penalty": PENALTY, "every": EVERY, "projection": "second_moment"}
    sparsifier = ADMM(model, optimizer, **options, layers="all_linear")
    z, u, m, v = project(w, 6), *torch.zeros(3, 4, 6, dtype=torch.float64)
    for t in range(STEPS):
        g = (w - target) + cosine(t, STEPS) * (w - z + u)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - lr * (m / (1 - beta1 ** (t + 1))) / ((v / (1 - beta2 ** (t + 1))).sqrt() + eps)
        if (t + 1) % EVERY == 0:
            z = project(w + u, 6, v.sqrt() * (w + u))
            u = u + w - z
    expected = project(w, 6, v.sqrt() * w)
    assert not torch.equal(expected == 0, project(w, 6) == 0)  # else the test would not see the weights
    run(model, optimizer, sparsifier, target)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-10, atol=1e-10)


@given(
    sparsity=st.floats(0.0, 0.99),
    pattern=st.sampled_from([None, "2:4", "1:4", (2, 2)]),
    steps=st.integers(1, 7),
    every=st.integers(1, 8),
    projection=st.sampled_from(["magnitude", "second_moment"]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_final_sparsity_is_exact_and_zeros_stay_zeros(sparsity, pattern, steps, every, projection):
    model = Tiny()
    optimizer = adamw(model.parameters())
    level = None if isinstance(pattern, str) else sparsity
    sparsifier = ADMM(
        model, optimizer, sparsity=level, pattern=pattern, steps=steps, every=every, projection=projection
    )
    for step in range(steps + 2):
        assert sparsifier.is_finished == (step >= steps)
        train_step(model, [optimizer], sparsifier, step)
    for layer in sparsifier.layers:
        zeros = int((layer.param == 0).sum())
        if isinstance(pattern, str):
            keep = layer.param.unflatten(1, (-1, 4)).count_nonzero(-1)
            assert (keep == int(pattern[0])).all()
        else:
            unit = 1 if pattern is None else 4
            assert zeros == math.floor(Fraction(repr(sparsity)) * (96 // unit)) * unit
        assert torch.equal(layer.param == 0, ~sparsifier.masks[layer.name])


def test_the_pull_comes_after_clipping_and_is_scaled_with_the_gradients():
    method = functools.partial(ADMM, sparsity=0.5, steps=9, every=2, penalty=0.5, ramp=0)
    plain, scaled = train_with_scaler(method, enabled=False), train_with_scaler(method, enabled=True)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)

    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[4.0, 1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sparsifier = ADMM(model, optimizer, sparsity=0.5, steps=9, penalty=0.5, ramp=0, layers="all_linear")
    (model.weight * torch.tensor([[3.0, 4.0]])).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # z is (4, 0): 4 - 0.6, 1 - 0.8 - 0.5 * 1
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[3.4, -0.3]]), rtol=1e-5, atol=1e-5)
    assert not sparsifier.is_finished


def test_finish_ends_it_earlier_and_once():
    model = Tiny()
    optimizer = HORST(model.parameters(), lr=0.02)
    sparsifier = ADMM(model, optimizer, sparsity=0.5, steps=20, every=2)
    for step in range(5):
        train_step(model, [optimizer], sparsifier, step)
    assert sparsifier.finish() == Event(5, "prune", 0.5)
    assert sparsifier.finish() is None
    mask = sparsifier.mask_hash()
    assert all(train_step(model, [optimizer], sparsifier, step) is None for step in range(5, 24))
    assert sparsifier.mask_hash() == mask
    assert sum(int((layer.param == 0).sum()) for layer in sparsifier.layers) == 192


def test_bfloat16_weights_have_a_float32_copy():
    model = Tiny().bfloat16()
    sparsifier = ADMM(model, torch.optim.SGD(model.parameters(), lr=0.1), sparsity=0.5, steps=4, every=1)
    for _ in range(4):
        assert all(total.dtype == torch.float32 for total in sparsifier.state_dict()["extra"]["sum"].values())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        sparsifier.optimizers[0].step()
        sparsifier.step()
    assert sparsifier.current_sparsity == 0.5


# --- SAM -----------------------------------------------------------------------------------------------------------


def test_sam_takes_the_gradient_at_the_ascended_weights_and_puts_them_back():
    model = Tiny().double()
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sparsifier = SAFE(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(x).square().mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    there = copy.deepcopy(model)
    with torch.no_grad():
        for p, q in zip(model.parameters(), there.parameters(), strict=True):
            q.add_(p.grad, alpha=0.1 / norm)
            q.grad = None
    there(x).square().mean().backward()
    with sparsifier.ascended():
        assert all(p.grad is None for p in model.parameters())
        model(x).square().mean().backward()
    for p, q, weight in zip(model.parameters(), there.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


def test_sam_puts_the_weights_back_after_an_error_and_stays_where_the_gradient_is_zero():
    model = Tiny()
    sparsifier = SAFE(model, adamw(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match="out of memory"), sparsifier.ascended():
        raise RuntimeError("out of memory")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with sparsifier.ascended():
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_sam_without_its_second_pass_warns_once():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = SAFE(model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            train_step(model, [optimizer], sparsifier, step)
    (warning,) = caught
    assert "sam_radius=0.1 has no effect" in str(warning.message)
    assert "with sparsifier.ascended():" in str(warning.message)
    assert "sparse_methods.py" in warning.filename  # the line of the loop


def test_sam_is_refused_without_a_radius_or_a_gradient():
    model = Tiny()
    optimizer = adamw(model.parameters())
    with (
        ADMM(model, optimizer, sparsity=0.5, steps=9) as plain,
        pytest.raises(ValueError, match=r"needs a radius: ADMM\(\.\.\., sam_radius=0\.1\)"),
        plain.ascended(),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"there is none\. Call loss\.backward\(\) first"):
        SAFE(model, optimizer).ascended().__enter__()


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"penalty": -1.0}, "penalty must be at least 0, got -1.0"),
        ({"penalty": math.nan}, "penalty must be at least 0, got nan"),
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0. Give the number of steps"),
        ({"ramp": -1}, "steps of a ramp must be at least 0, got -1"),
        ({"projection": "fisher"}, "'magnitude' or 'second_moment', got 'fisher'"),
        ({"sam_radius": -0.1}, "sam_radius must be at least 0, got -0.1"),
        ({"sparsity": None}, "sparsity is needed unless the pattern is N:M"),
    ],
)
def test_bad_input_is_refused_before_training(options, text):
    model = Tiny()
    with pytest.raises(ValueError, match=text):
        ADMM(model, adamw(model.parameters()), **{"sparsity": 0.5, "steps": 9, **options})


@pytest.mark.parametrize(("momentum", "has"), [(0.9, "momentum_buffer"), (0.0, "no entries")])
def test_an_optimizer_without_a_second_moment_is_refused_at_the_first_step(momentum, has):
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    sparsifier = ADMM(model, optimizer, sparsity=0.5, steps=9, projection="second_moment")
    with pytest.raises(ValueError, match=rf"weighs by exp_avg_sq, but the state of SGD has {has}\. Use AdamW or HORST"):
        train_step(model, [optimizer], sparsifier, 0)


def test_before_the_first_update_the_second_moment_is_not_missed():
    model = Tiny()
    sparsifier = ADMM(model, adamw(model.parameters()), sparsity=0.5, steps=2, projection="second_moment")
    sparsifier.step()  # GradScaler has skipped the optimizer's
    sparsifier.step()
    assert sparsifier.current_sparsity == 0.5
