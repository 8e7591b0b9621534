"""Budgets: met to the weight, dense layers re-solved, dictionaries checked."""

import math
from fractions import Fraction

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from horst.sparsity import Static, owl_ratios
from horst.sparsity.distributions import allocate, check_ratios, layer_sparsity
from horst.sparsity.selection import exact_floor

SHAPES = {"a": (10, 10), "b": (100, 10), "c": (3, 4)}
UNITS = {name: math.prod(shape) for name, shape in SHAPES.items()}


def test_uniform_by_hand():
    assert allocate("uniform", 0.29, UNITS, SHAPES) == {"a": 29, "b": 290, "c": 3}


def test_global_is_one_number():
    assert allocate("global", 0.9, UNITS, SHAPES) == 1000  # floor(0.9 * 1112)


def test_erk_by_hand():
    # factors: a 20/100, b 110/1000, c 7/12. Kept at density 0.2: 1112 - 889 = 223 = scale * (20 + 110 + 7), so
    # scale = 1.628 and densities 0.3255, 0.1791, 0.9495: no layer is dense. 32.55, 179.05 and 11.39 kept.
    assert allocate("erk", 0.8, UNITS, SHAPES) == {"a": 100 - 33, "b": 1000 - 179, "c": 12 - 11}


def test_erk_makes_layers_dense_and_solves_again():
    # At density 0.5 the first scale, 556 / 137, would give c density 2.4: c stays dense, and 544 = scale * 130.
    removed = allocate("erk", 0.5, UNITS, SHAPES)
    assert removed == {"a": 100 - 84, "b": 1000 - 460, "c": 0}


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3),
        st.tuples(st.integers(1, 60), st.integers(1, 60)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.0, 0.999),
)
def test_erk_meets_its_budget_to_the_weight(shapes, sparsity):
    units = {name: math.prod(shape) for name, shape in shapes.items()}
    removed = allocate("erk", sparsity, units, shapes)
    assert sum(removed.values()) == exact_floor(sparsity, sum(units.values()))
    assert all(0 <= removed[name] <= units[name] for name in units)
    # Layers that are not dense have densities in the ratio of their factors, up to the rounding of one unit each.
    scale = [
        Fraction(units[n] - removed[n], units[n]) / (Fraction(sum(shapes[n]), math.prod(shapes[n])))
        for n in units
        if removed[n] > 1
    ]
    slack = [Fraction(1, units[n]) / Fraction(sum(shapes[n]), math.prod(shapes[n])) for n in units if removed[n] > 1]
    for (s, ds), (t, dt) in zip(zip(scale, slack, strict=True), list(zip(scale, slack, strict=True))[1:], strict=False):
        assert abs(s - t) <= ds + dt + Fraction(1, 10**9)


def test_a_dictionary_is_read_by_name_prefix_or_wildcard_first_come():
    ratios = {"blocks.0.fc1.weight": 0.5, "blocks.0": 0.6, "blocks.*.fc1.*": 0.7, "*": 0.8}
    names = ["blocks.0.fc1.weight", "blocks.0.fc2.weight", "blocks.1.fc1.weight", "head.weight"]
    assert [layer_sparsity(ratios, name) for name in names] == [0.5, 0.6, 0.7, 0.8]


def test_a_gradual_schedule_brings_each_layer_to_its_own_sparsity():
    ratios = {"a": 0.5, "b": 0.9, "c": 0.0}
    assert allocate(ratios, 0.8, UNITS, SHAPES, final=0.8) == {"a": 50, "b": 900, "c": 0}
    assert allocate(ratios, 0.4, UNITS, SHAPES, final=0.8) == {"a": 25, "b": 450, "c": 0}


def test_owl_ratios_reach_the_masks():
    model = nn.ModuleDict({"0": nn.Linear(10, 10), "1": nn.Linear(10, 10)})
    optimizer = torch.optim.SGD(model.parameters())
    sparsifier = Static(model, optimizer, sparsity=0.7, distribution={"0": 0.62, "1": 0.78}, layers="all_linear")
    assert [int((~mask).sum()) for mask in sparsifier.masks.values()] == [62, 78]


def test_bad_distributions_are_refused():
    with pytest.raises(ValueError, match=r"fits layer 'c'; its keys are \['a', 'b'\]"):
        check_ratios({"a": 0.1, "b": 0.2}, list(SHAPES))
    with pytest.raises(ValueError, match="'d' in the sparsity dictionary fits no layer"):
        check_ratios({"*": 0.1, "d": 0.2}, list(SHAPES))
    with pytest.raises(ValueError, match=r"got 62. Give a fraction"):
        check_ratios({"*": 62}, list(SHAPES))
    with pytest.raises(ValueError, match="distribution must be"):
        allocate("erdos", 0.5, UNITS, SHAPES)


def test_owl_ratios_by_hand():
    """Three blocks with 0, 1 and 2 of 100 scores above 5 times the mean."""
    scores = {}
    for outliers in range(3):
        block = torch.full((100,), 1.0)
        block[:outliers] = 1000.0
        scores[f"blocks.{outliers}"] = [block[:30], block[30:]]
    ratios = owl_ratios(scores, 0.7, spread=0.05)
    assert ratios == {"blocks.0": 0.75, "blocks.1": 0.7, "blocks.2": 0.65}


@given(
    sparsity=st.floats(0.2, 0.8),
    seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    spread=st.floats(0, 0.1),
)
def test_owl_ratios_keep_the_mean_and_the_spread(sparsity, seeds, spread):
    scores = {}
    for i, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        scores[f"b{i}"] = [torch.randn(50, generator=generator).abs() ** (1 + seed % 4)]
    ratios = owl_ratios(scores, sparsity, threshold=3.0, spread=spread)
    assert sum(ratios.values()) / len(ratios) == pytest.approx(sparsity, abs=1e-9)
    assert max(ratios.values()) - min(ratios.values()) <= 2 * spread + 1e-9


def test_owl_ratios_refuse_what_they_cannot_mean():
    one = {"b": [torch.ones(10)]}
    assert owl_ratios(one, 0.5) == {"b": 0.5}  # all blocks alike
    with pytest.raises(ValueError, match="empty"):
        owl_ratios({}, 0.5)
    with pytest.raises(ValueError, match="threshold must be above 0"):
        owl_ratios(one, 0.5, threshold=0.0)
    peaked = torch.cat([torch.zeros(99), torch.ones(1)])
    with pytest.raises(ValueError, match="smaller spread"):
        owl_ratios({"a": [torch.ones(10)], "b": [peaked]}, 0.95, spread=0.08)
