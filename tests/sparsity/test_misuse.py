"""What a loop can get wrong without an error: each warns once, and points at the line of the user."""

import math
import warnings

import pytest
import torch
from torch import nn

from horst import HORST
from horst.pruning import prune
from horst.sparsity import ACDC, SRSTE, Phases, Static, keep_zeros

OPTIMIZERS = pytest.mark.parametrize("make", [HORST, torch.optim.AdamW], ids=["horst", "adamw"])


def caught_in_training(make, order, steps=8, method=Static, skip=(), **options):
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = make(model.parameters(), lr=0.1)
    options = {"sparsity": 0.9, **options} if method is not SRSTE else options
    sparsifier = method(model, optimizer, layers="all_linear", **options)
    actions = {"optimizer": optimizer.step, "sparsifier": sparsifier.step}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 64)).square().mean().backward()
            for name in order:
                if not (name == "optimizer" and step in skip):
                    actions[name]()
    return model, caught


@OPTIMIZERS
def test_a_missing_step_of_the_sparsifier_warns_once(make):
    _, caught = caught_in_training(make, ["optimizer"])
    assert len(caught) == 1
    assert "sparsifier.step() has never been called" in str(caught[0].message)
    assert caught[0].filename == __file__


@OPTIMIZERS
def test_a_step_of_the_sparsifier_before_the_optimizers_warns_once(make):
    schedule = Phases((6,), end=8)
    model, caught = caught_in_training(make, ["sparsifier", "optimizer"], method=ACDC, schedule=schedule)
    assert len(caught) == 1
    assert "sparsifier.step() does not follow optimizer.step()" in str(caught[0].message)
    assert caught[0].filename == __file__
    if make is torch.optim.AdamW:  # its momentum revives them; HORST zeroes inside its own update
        assert int((model.weight == 0).sum()) < 3686


@OPTIMIZERS
@pytest.mark.parametrize("method", [Static, SRSTE, ACDC])
def test_the_right_order_is_quiet_also_where_updates_are_skipped(make, method):
    options = {"schedule": Phases((2, 4, 6), end=8)} if method is ACDC else {}
    _, caught = caught_in_training(make, ["optimizer", "sparsifier"], method=method, skip=(0, 1, 2, 6), **options)
    assert caught == []


def test_several_optimizers_and_one_step_of_the_sparsifier_are_quiet():
    """As a generator and a critic take turns: gradients of one reach the other after its update."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    sparsifier = Static(model, optimizers, sparsity=0.5, layers="all_linear")
    for _ in range(8):
        for optimizer in optimizers:
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
        sparsifier.step()


def test_keep_zeros_and_a_closed_sparsifier_are_quiet():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for closed in (False, True):
        kept = Static(model, optimizer, layers="all_linear") if closed else keep_zeros(model, optimizer)
        if closed:
            kept.close()
        for _ in range(8):
            model(torch.randn(2, 8)).square().mean().backward()
            optimizer.step()
        kept.close()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", [Static, SRSTE])
def test_weights_that_are_not_finite_warn_once_with_the_layers_name(method, bad):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data[0, 0] = bad
    options = {} if method is SRSTE else {"sparsity": 0.5}
    with pytest.warns(UserWarning, match=r"NaN or infinite weights in 1\.weight: they count as the largest") as caught:
        sparsifier = method(model, torch.optim.SGD(model.parameters()), layers="all_linear", **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    sparsifier._masks_changed()  # the next event is quiet


def test_pruning_weights_that_are_not_finite_warns_with_the_layers_name():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.data[0, 0] = math.nan
    with pytest.warns(UserWarning, match=r"NaN or infinite weights in 0\.weight") as caught:
        prune(model, 0.5, layers="all_linear")
    assert [warning.filename for warning in caught] == [__file__]
