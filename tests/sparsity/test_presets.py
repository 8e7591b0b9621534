"""Presets: what each paper fixes, said by numbers that are worked out here."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparse_methods import Tiny, adamw, differences, loss_of, train_step
from torch import nn

from horst.sparsity import ADMM, IMP, PRESETS, Rounds, gmp_steps, lrr, rounds_to, safe, sparse_pretraining, svite


def test_svite_has_the_densities_of_erk_and_a_hundred_exchanges():
    model = nn.Sequential(nn.Conv2d(2, 8, 2), nn.Linear(8, 32), nn.Linear(32, 64), nn.Linear(64, 4))
    sparsifier = svite(model, adamw(model.parameters()), sparsity=0.6, steps=1000)
    shapes = {layer.name: tuple(layer.param.shape) for layer in sparsifier.layers}
    assert list(shapes) == ["0.weight", "1.weight", "2.weight", "3.weight"]
    # Density in proportion to (sum of dims) / (product of dims); the first layer, 14 / 64, and then the others that
    # would exceed 1 are dense and the rest shares what is left.
    dense, kept = set(), 0.4 * sum(math.prod(shape) for shape in shapes.values())
    while True:
        rest = {name: shape for name, shape in shapes.items() if name not in dense}
        scale = (kept - sum(math.prod(shapes[name]) for name in dense)) / sum(sum(shape) for shape in rest.values())
        more = {name for name, shape in rest.items() if scale * sum(shape) / math.prod(shape) > 1}
        if not more:
            break
        dense |= more
    assert dense == {"0.weight", "3.weight"}
    for name, shape in shapes.items():
        expected = math.prod(shape) if name in dense else scale * sum(shape)
        assert abs(int(sparsifier.masks[name].sum()) - expected) <= 1, name
    assert [step for step in range(1001) if sparsifier.schedule.is_due(step)] == list(range(10, 1000, 10))
    assert sparsifier.schedule.drop_fraction(0) == 0.5
    assert sparsifier.schedule.drop_fraction(500) == pytest.approx(0.25)


# --- LRR -----------------------------------------------------------------------------------------------------------


def test_lrr_keeps_weights_and_signs_and_starts_schedule_and_state_again():
    model = Tiny()
    rates = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    sparsifier = lrr(model, optimizer, sparsity=0.75, steps=40, schedule=Rounds(2, steps_per_round=10))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - sparsifier.training_step / 10)
    for step in range(30):
        rates.append(round(optimizer.param_groups[0]["lr"] / 0.02, 6))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        event = sparsifier.step()
        scheduler.step()
        assert (event is not None) == (step + 1 in (10, 20))
        for name, p in model.named_parameters():
            mask = sparsifier.masks.get(name, torch.ones_like(p, dtype=torch.bool))
            assert torch.equal(p.detach(), before[name] * mask)  # what is left has its value, and so its sign
        if event is not None:
            assert event.kind == "rewind"
            assert not any(optimizer.state.values())
    whole = [round(1 - step / 10, 6) for step in range(10)]
    assert rates == 3 * whole
    assert sparsifier.current_sparsity == 0.75


def test_rewinding_weights_is_something_else():
    model = Tiny()
    early = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model.parameters())
    sparsifier = IMP(model, optimizer, sparsity=0.5, schedule=Rounds(1, 4))
    for step in range(4):
        train_step(model, [optimizer], sparsifier, step)
    assert torch.equal(model.head.weight, early["head.weight"])
    sparsifier.close()
    with pytest.raises(ValueError, match=r"rewind must be 'weights' or 'lr' \(learning-rate rewinding\), got 'all'"):
        IMP(model, optimizer, sparsity=0.5, schedule=Rounds(1, 4), rewind="all")


@given(sparsity=st.floats(0.01, 0.995), share=st.floats(0.05, 0.6))
def test_rounds_are_the_fewest_that_prune_no_more_than_the_share(sparsity, share):
    rounds = rounds_to(sparsity, 7, share=share).rounds
    removed = 1 - (1 - sparsity) ** (1 / rounds)
    assert removed <= share + 1e-6
    if rounds > 1:
        assert 1 - (1 - sparsity) ** (1 / (rounds - 1)) > share - 1e-6


def test_twenty_percent_of_what_is_left():
    assert rounds_to(1 - 0.8**4, 100) == Rounds(4, 100)
    model = nn.Linear(100, 100)
    sparsifier = lrr(model, adamw(model.parameters()), sparsity=0.5904, steps=50, layers="all_linear")
    left = [10_000] + [round(10_000 * (1 - event.sparsity)) for _ in range(50) if (event := sparsifier.step())]
    assert left[-1] == 4096
    # on the way the sparsity is a root, which floating point may round down
    assert all(0 <= a - b <= 1 for a, b in zip(left, [10_000, 8000, 6400, 5120, 4096], strict=True))
    with pytest.raises(ValueError, match=r"share must lie in \(0, 1\), got 20"):
        rounds_to(0.9, 10, share=20)
    sparsifier.close()
    with pytest.raises(ValueError, match="5 steps are too few for 12 rounds of training"):
        lrr(model, sparsifier.optimizers, sparsity=0.9, steps=5, layers="all_linear")


# --- sparse pretraining --------------------------------------------------------------------------------------------


def test_sparse_pretraining_is_dense_for_a_quarter_and_fixed_from_three_quarters_on():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = sparse_pretraining(model, optimizer, sparsity=0.8, steps=40)
    seen = []
    for step in range(40):
        train_step(model, [optimizer], sparsifier, step)
        seen.append(sparsifier.current_sparsity)
    final = 4 * 76 / 384  # of each of four layers of 96 weights, four fifths rounded down
    assert seen[:10] == [0.0] * 10
    assert 0 < seen[10] < seen[20] < final
    assert seen[29:] == [final] * 11


def test_the_shares_of_gmp_must_be_in_order():
    assert gmp_steps(1000, begin=0.0, until=1.0, every=7).every == 7
    with pytest.raises(ValueError, match="0 <= begin < until <= 1, got"):
        gmp_steps(100, begin=0.8)


# --- SAFE ----------------------------------------------------------------------------------------------------------


def test_safe_without_a_radius_is_admm():
    def run(make):
        model = Tiny()
        optimizer = adamw(model.parameters())
        with make(model, optimizer, sparsity=0.8, steps=12, every=4) as sparsifier:
            for step in range(14):
                train_step(model, [optimizer], sparsifier, step)
        return dict(model.state_dict())

    plain = run(lambda *args, **options: ADMM(*args, penalty=1e-3, **options))
    assert differences(run(lambda *args, **options: safe(*args, sam_radius=0.0, **options)), plain) == []


def test_presets_are_named_after_their_functions():
    assert {name: preset.__name__ for name, preset in PRESETS.items()} == {name: name for name in PRESETS}
