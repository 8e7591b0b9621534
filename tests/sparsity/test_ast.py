"""AST against its formula in float64, and the ramps of penalties and decays."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sparse_methods import Tiny, adamw, train_step
from torch import nn

from horst.sparsity import AST, SRSTE, Ramp


def keep_two_of_four(w):
    kept = w.abs().unflatten(1, (-1, 4)).topk(2, dim=-1).indices
    return torch.zeros_like(w.unflatten(1, (-1, 4)), dtype=torch.bool).scatter(-1, kept, True).flatten(1)


def test_with_sgd_it_is_the_formula():
    decay, ramp_steps, every, lr = 0.4, 7, 3, 0.3
    generator = torch.Generator().manual_seed(0)
    w, target = torch.randn(2, 4, 8, dtype=torch.float64, generator=generator)
    model = nn.Linear(8, 4, bias=False).double()
    model.weight.data.copy_(w)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    sparsifier = AST(model, optimizer, decay=decay, ramp_steps=ramp_steps, every=every, layers="all_linear")
    E, masks = keep_two_of_four(w), set()
    for t in range(12):
        optimizer.zero_grad()
        ((model.weight - target).square().sum() / 2).backward()
        optimizer.step()
        sparsifier.step()
        g = (E * w - target) + decay * min(t / ramp_steps, 1.0) * (~E * w)
        w = w - lr * g
        if (t + 1) % every == 0:
            E = keep_two_of_four(w)
        masks.add(sparsifier.mask_hash())
        assert torch.equal(sparsifier.masks["weight"], E), f"step {t}"
        torch.testing.assert_close(model.weight.detach(), E * w, rtol=1e-12, atol=1e-12)
    assert len(masks) > 1  # else the test would not see when they change


def test_it_is_srste_with_a_ramp_and_a_rarer_mask():
    one, other = Tiny(), Tiny()
    optimizers = adamw(one.parameters()), adamw(other.parameters())
    ast = AST(one, optimizers[0], decay=0.1, ramp_steps=5, every=2)
    srste = SRSTE(other, optimizers[1], decay=Ramp(0.1, 5), every=2)
    for step in range(9):
        train_step(one, [optimizers[0]], ast, step)
        train_step(other, [optimizers[1]], srste, step)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    model = Tiny()
    defaults = AST(model, adamw(model.parameters()))
    assert (defaults.decay, defaults.every) == (Ramp(1e-4, 10_000, "linear"), 10)


@given(n=st.integers(1, 3), steps=st.integers(1, 9), every=st.integers(1, 12), ramp_steps=st.integers(0, 9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_sparsity_is_exact_and_zeros_are_zeros_after_every_step(n, steps, every, ramp_steps):
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = AST(model, optimizer, pattern=f"{n}:4", decay=0.1, every=every, ramp_steps=ramp_steps)
    for step in range(steps):
        train_step(model, [optimizer], sparsifier, step)
        for layer in sparsifier.layers:
            kept = sparsifier.masks[layer.name].unflatten(1, (-1, 4)).sum(-1)
            assert (kept == n).all()
            assert not layer.param[~sparsifier.masks[layer.name]].any()


@given(to=st.floats(0, 1e3), steps=st.integers(0, 1000), shape=st.sampled_from(["linear", "cosine"]))
def test_a_ramp_rises_from_zero_and_stays_at_its_value(to, steps, shape):
    ramp = Ramp(to, steps, shape)
    values = [ramp.at(step) for step in (0, steps // 3, steps // 2, steps, 2 * steps + 1)]
    assert values == sorted(values)
    assert values[0] == (0.0 if steps else to)
    assert values[-2:] == [to, to]


def test_a_cosine_begins_and_ends_flat():
    ramp = Ramp(2.0, 100, "cosine")
    assert ramp.at(50) == pytest.approx(1.0)
    assert ramp.at(1) < 1e-3
    assert ramp.at(99) > 2.0 - 1e-3


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda m, o: AST(m, o, decay=math.nan), "decay must be at least 0, got nan. AST uses 1e-4"),
        (lambda m, o: AST(m, o, ramp_steps=-1), "ramp_steps must be at least 0, got -1"),
        (lambda m, o: AST(m, o, every=0), "every must be at least 1 step, got 0"),
        (lambda m, o: AST(m, o, pattern="2:4", sparsity=0.7), "2:4 fixes the sparsity at 0.5"),
        (lambda m, o: Ramp(-1.0, 5), "a ramp rises to must be a number of at least 0, got -1.0"),
        (lambda m, o: Ramp(1.0, -5), "steps of a ramp must be at least 0, got -5"),
        (lambda m, o: Ramp(1.0, 5, "cubic"), "'linear' or 'cosine', got 'cubic'"),
    ],
)
def test_bad_input_is_refused(make, text):
    model = Tiny()
    with pytest.raises(ValueError, match=text):
        make(model, adamw(model.parameters()))
