"""CAST: the masks that AdamS is given, the end, and what is refused."""

import gc
import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sparse_methods import Tiny, adamw, train_step
from torch import nn

from horst import AdamS
from horst.sparsity import CAST
from horst.sparsity.controller import Event


def two_of_four(w):
    kept = w.abs().unflatten(1, (-1, 4)).topk(2, dim=-1).indices
    return torch.zeros_like(w.unflatten(1, (-1, 4)), dtype=torch.bool).scatter(-1, kept, True).flatten(1)


def test_it_is_the_formula():
    steps, every, lr, pull, beta1, beta2, eps = 11, 3, 0.05, 0.5, 0.9, 0.95, 1e-8
    w, target = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(8, 4, bias=False).double()
    model.weight.data.copy_(w)
    optimizer = AdamS(
        model.parameters(), lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=0.0, steps=steps, pull=pull
    )
    sparsifier = CAST(model, optimizer, every=every, layers="all_linear")
    E, m, v, masks = two_of_four(w), torch.zeros_like(w), torch.zeros_like(w), 1
    for t in range(1, steps + 1):
        g = w - target  # of the dense weights
        m = beta1 * m + (1 - beta1) * g
        mu = m / (1 - beta1**t)
        mu = torch.where(E, mu, (1 - t / steps) * mu + (t / steps) * pull * w.sign())
        v = beta2 * v + (1 - beta2) * torch.where(E, g, mu) ** 2
        w = w - lr * mu / ((v / (1 - beta2**t)).sqrt() + eps)
        if t % every == 0 and t < steps:
            masks += not torch.equal(E, E := two_of_four(w))
    for _ in range(steps):
        assert sparsifier.current_sparsity == 0.0
        optimizer.zero_grad()
        ((model.weight - target).square().sum() / 2).backward()
        optimizer.step()
        event = sparsifier.step()
    assert masks > 1  # else the test would not see when they change
    assert event == Event(steps, "prune", 0.5)
    torch.testing.assert_close(model.weight.detach(), two_of_four(w) * w, rtol=1e-9, atol=1e-9)


@given(
    sparsity=st.floats(0.0, 0.99),
    pattern=st.sampled_from([None, "2:4", "1:4", (2, 2)]),
    steps=st.integers(1, 7),
    every=st.integers(1, 8),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_the_final_sparsity_is_exact_and_zeros_stay_zeros(sparsity, pattern, steps, every):
    model = Tiny()
    optimizer = AdamS(model.parameters(), lr=0.02, steps=steps, pull=0.05)
    sparsifier = CAST(
        model, optimizer, sparsity=None if isinstance(pattern, str) else sparsity, pattern=pattern, every=every
    )
    for step in range(steps + 2):
        assert sparsifier.is_finished == (step >= steps)
        train_step(model, [optimizer], sparsifier, step)
    for layer in sparsifier.layers:
        if isinstance(pattern, str):
            assert (layer.param.unflatten(1, (-1, 4)).count_nonzero(-1) == int(pattern[0])).all()
        else:
            unit = 1 if pattern is None else 4
            assert int((layer.param == 0).sum()) == math.floor(Fraction(repr(sparsity)) * (96 // unit)) * unit
        assert torch.equal(layer.param == 0, ~sparsifier.masks[layer.name])


def test_weights_outside_the_mask_fade_before_they_are_zeroed():
    """What plain Adam in disguise would not do: the failure that misaligned masks have."""
    model = Tiny()
    optimizer = AdamS(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.0, steps=60, pull=0.1)
    sparsifier = CAST(model, optimizer)
    for step in range(59):
        train_step(model, [optimizer], sparsifier, step)
        if step == 50:
            for group in optimizer.param_groups:
                group["lr"] = 0.002
    for layer in sparsifier.layers:
        kept = two_of_four(layer.param.detach())
        inside, outside = (layer.param.detach()[part].abs().mean() for part in (kept, ~kept))
        assert outside < 0.1 * inside


def pulled(optimizer):
    return {tuple(p.shape): int((~mask).sum()) for p, mask in optimizer._masks.items()}


def test_the_optimizer_has_the_masks_until_the_end_a_close_or_a_drop():
    half = {(12, 8): 48, (8, 12): 48}
    model = Tiny()
    optimizer = AdamS(model.parameters(), lr=0.02, steps=3)
    sparsifier = CAST(model, optimizer)
    for step in range(3):
        assert pulled(optimizer) == half
        train_step(model, [optimizer], sparsifier, step)
    assert pulled(optimizer) == {}
    sparsifier.close()
    with CAST(model, optimizer) as sparsifier:
        assert pulled(optimizer) == half
    assert pulled(optimizer) == {}
    sparsifier = CAST(model, optimizer)
    del sparsifier
    gc.collect()
    assert pulled(optimizer) == {}


def test_a_resumed_run_gives_the_optimizer_its_masks():
    model = Tiny()
    sparsifier = CAST(model, AdamS(model.parameters(), steps=9))
    state = sparsifier.state_dict()
    other = Tiny(seed=1)
    optimizer = AdamS(other.parameters(), steps=9)
    resumed = CAST(other, optimizer, state_dict=state)
    outside = sparsifier.state_dict()["extra"]["outside"]
    assert all(torch.equal(bits, outside[name]) for name, bits in resumed.state_dict()["extra"]["outside"].items())
    for (_, a), (_, b) in zip(sparsifier.optimizers[0]._masks.items(), optimizer._masks.items(), strict=True):
        assert torch.equal(a, b)


def test_finish_ends_it_earlier():
    model = Tiny()
    optimizer = AdamS(model.parameters(), steps=20)
    sparsifier = CAST(model, optimizer, sparsity=0.75)
    train_step(model, [optimizer], sparsifier, 0)
    assert sparsifier.finish() == Event(1, "prune", 0.75)
    assert sparsifier.finish() is None
    assert pulled(optimizer) == {}


def test_fewer_steps_than_the_optimizers_may_be_given():
    model = Tiny()
    optimizer = AdamS(model.parameters(), steps=20)
    sparsifier = CAST(model, optimizer, steps=2)
    events = [train_step(model, [optimizer], sparsifier, step) for step in range(4)]
    assert events == [None, Event(2, "prune", 0.5), None, None]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m: CAST(m, adamw(m.parameters())), TypeError, r"and AdamW does not: use horst\.AdamS"),
        (
            lambda m: CAST(m, [AdamS(m.blocks.parameters(), steps=9), torch.optim.SGD(m.head.parameters())]),
            TypeError,
            "and SGD does not",
        ),
        (lambda m: CAST(m, AdamS(m.parameters(), steps=9), steps=10), ValueError, r"more than the optimizer's steps=9"),
        (
            lambda m: CAST(m, AdamS(m.parameters(), steps=9), every=0),
            ValueError,
            "every must be at least 1 step, got 0",
        ),
        (
            lambda m: CAST(m, [AdamS(m.blocks.parameters(), steps=9), AdamS(m.head.parameters(), steps=8)]),
            ValueError,
            r"differ in steps, \[8, 9\]",
        ),
        (
            lambda m: CAST(m, AdamS(m.parameters(), steps=9), sparsity=0.7, pattern="2:4"),
            ValueError,
            "fixes the sparsity",
        ),
    ],
)
def test_bad_input_is_refused_before_training(make, error, text):
    with pytest.raises(error, match=text):
        make(Tiny())
