"""What is particular to each method, by hand."""

import copy
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
from sparse_methods import CUBIC, PHASES, TOTAL, Tiny, adamw, loss_of, train_step, train_with_scaler, zeros_in_blocks
from torch import nn

from horst import HORST
from horst.sparsity import (
    ACDC,
    GMP,
    IMP,
    SET,
    SRSTE,
    AtInit,
    Cubic,
    DropGrow,
    Phases,
    RigL,
    Rounds,
    StatePolicy,
    Static,
    keep_zeros,
)
from horst.sparsity.controller import Event


def linear(weight):
    model = nn.Linear(len(weight[0]), len(weight), bias=False)
    model.weight.data = torch.tensor(weight, dtype=torch.float32)
    return model


def sgd(model, lr=0.1, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


# --- AC/DC ---------------------------------------------------------------------------------------------------------


def test_acdc_events_follow_the_schedule():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
    events = [event for step in range(TOTAL) if (event := train_step(model, [optimizer], sparsifier, step))]
    assert [(e.step, e.kind) for e in events] == [
        (4, "prune"),
        (8, "restore"),
        (13, "prune"),
        (17, "restore"),
        (21, "prune"),
    ]
    assert [e.sparsity for e in events] == [345 / 384, 0.0, 345 / 384, 0.0, 345 / 384]


def test_acdc_prunes_the_globally_smallest():
    model = nn.ModuleDict({"a": linear([[1.0, 8.0]]), "b": linear([[2.0, 3.0]])})
    sparsifier = ACDC(model, sgd(model), sparsity=0.5, schedule=Phases((0,), end=5), layers="all_linear")
    assert sparsifier.masks["a.weight"].tolist() == [[False, True]]
    assert sparsifier.masks["b.weight"].tolist() == [[False, True]]


@pytest.mark.parametrize(("restore", "back"), [("zeros", [[0.0, 4.0]]), ("values", [[1.0, 4.0]])])
def test_acdc_restores_zeros_or_the_values_that_were_pruned(restore, back):
    model = linear([[1.0, 4.0]])
    sparsifier = ACDC(
        model, sgd(model), sparsity=0.5, schedule=Phases((1, 3, 5), end=9), layers="all_linear", restore=restore
    )
    sparsifier.step()
    assert model.weight.tolist() == [[0.0, 4.0]]
    model.weight.data[0, 0] = 7.0  # what momentum would do
    sparsifier.step()
    assert model.weight.tolist() == [[0.0, 4.0]]
    model.weight.data[0, 0] = 7.0
    sparsifier.step()
    assert model.weight.tolist() == back


def test_without_the_sparsifier_momentum_revives_pruned_weights():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=Phases((3,), end=TOTAL))
    for step in range(4):
        train_step(model, [optimizer], sparsifier, step)
    optimizer.zero_grad()
    loss_of(model, 4).backward()
    optimizer.step()
    assert zeros_in_blocks(model) < 345  # this is what sparsifier.step() is there for
    sparsifier.step()
    assert zeros_in_blocks(model) == 345


def test_best_dense_and_best_sparse_model_are_kept_apart():
    model = linear([[1.0, 4.0]])
    sparsifier = ACDC(model, sgd(model), sparsity=0.5, schedule=Phases((1, 2, 3), end=9), layers="all_linear")
    assert sparsifier.record(0.8)  # dense
    sparsifier.step()
    assert sparsifier.record(0.5)  # sparse
    model.weight.data[0, 1] = 5.0
    assert not sparsifier.record(0.4)
    assert not sparsifier.record(math.nan)
    sparsifier.step()
    assert not sparsifier.record(0.7)  # dense again, and worse
    assert (sparsifier.best["dense"].metric, sparsifier.best["dense"].step) == (0.8, 0)
    assert (sparsifier.best["sparse"].metric, sparsifier.best["sparse"].step) == (0.5, 1)
    sparsifier.best.load_into(model, "sparse")
    assert model.weight.tolist() == [[0.0, 4.0]]
    sparsifier.best.load_into(model, "dense")
    assert model.weight.tolist() == [[1.0, 4.0]]
    with pytest.raises(KeyError, match="no pruned model has been recorded"):
        sparsifier.best.load_into(model, "pruned")


def test_lower_can_be_better():
    model = linear([[1.0, 4.0]])
    sparsifier = Static(model, sgd(model), sparsity=0.5, layers="all_linear")
    assert [sparsifier.record(m, higher_is_better=False) for m in (3.0, 4.0, 2.0)] == [True, False, True]


# --- GMP and IMP ---------------------------------------------------------------------------------------------------


def test_gmp_never_gives_a_weight_back():
    model = linear([[0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 6.0, 0.0, 7.0]])
    sparsifier = GMP(model, sgd(model), sparsity=0.6, schedule=Cubic(0, 6, every=1), layers="all_linear")
    previous = sparsifier.masks["weight"]
    for step in range(6):  # whatever the optimizer has made of pruned weights by then
        model.weight.data.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(step))
        sparsifier.step()
        assert not (sparsifier.masks["weight"] & ~previous).any()
        previous = sparsifier.masks["weight"]
    assert int((~previous).sum()) == 6


def test_gmp_follows_the_cubic():
    model = nn.Linear(100, 10)
    sparsifier = GMP(model, sgd(model), sparsity=0.8, schedule=CUBIC, layers="all_linear")
    got = {event.step: event.sparsity for _ in range(TOTAL) if (event := sparsifier.step())}
    want = {s: math.floor(1000 * 0.8 * (1 - (1 - (s - 3) / 17) ** 3)) / 1000 for s in (3, 8, 13, 18, 20)}
    assert got == want


def test_imp_rewinds_weights_buffers_and_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sparsifier = IMP(
        model, optimizer, sparsity=0.75, schedule=Rounds(2, steps_per_round=5, rewind_to=2), layers="all_linear"
    )
    early, early_state, seen = None, None, []
    for step in range(11):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).pow(3).sum().backward()
        optimizer.step()
        event = sparsifier.step()
        if sparsifier.steps == 2:
            early = {k: v.clone() for k, v in model.state_dict().items()}
            early_state = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        if event:
            seen.append((event.step, event.kind, event.sparsity, sparsifier.training_step))
            mask = sparsifier.masks["0.weight"]
            assert torch.equal(model[0].weight, early["0.weight"] * mask)
            assert torch.equal(model[1].running_mean, early["1.running_mean"])
            assert model[1].num_batches_tracked == 2
            for p, state in optimizer.state.items():
                assert all(torch.equal(state[k], early_state[p][k]) for k in state)
    assert seen == [(5, "rewind", 0.5, 2), (8, "rewind", 0.75, 2)]


def test_imp_rewinds_state_that_was_not_there_yet():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sparsifier = IMP(model, optimizer, sparsity=0.5, schedule=Rounds(1, steps_per_round=3), layers="all_linear")
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        sparsifier.step()
    assert len(optimizer.state) == 0


# --- RigL and SET --------------------------------------------------------------------------------------------------


def exchange_once(method, weight, gradient, kept, fraction=0.5):
    """One exchange on a given mask and gradient; the optimizer is AdamW with a state of ones."""
    model = linear(weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sparsifier = method(
        model,
        optimizer,
        sparsity=1 - sum(map(sum, kept)) / sum(map(len, kept)),
        schedule=DropGrow(every=1, end=100, fraction=fraction, decay="constant"),
        distribution="uniform",
        layers="all_linear",
    )
    sparsifier._set_pruned({"weight": ~torch.tensor(kept, dtype=torch.bool)}, "prune")
    model.weight.data = torch.tensor(weight) * torch.tensor(kept)
    ones = torch.ones_like(model.weight)
    optimizer.state[model.weight] = {"step": torch.tensor(5.0), "exp_avg": ones.clone(), "exp_avg_sq": ones.clone()}
    sparsifier.step()  # the next step is now an exchange
    model.weight.grad = torch.tensor(gradient)
    optimizer.step()
    assert torch.equal(model.weight.grad, torch.tensor(gradient))  # the user's gradient is still there
    return model, optimizer, sparsifier


def test_rigl_by_hand():
    # Of four kept weights two go, 1 and 2; of all that is then free the largest gradients are 9 (new) and 7 (the
    # dropped 2, which therefore stays and keeps its value).
    model, optimizer, sparsifier = exchange_once(
        RigL,
        weight=[[1.0, -2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]],
        gradient=[[0.5, 7.0, 0.1, 0.2, -9.0, 1.0, 2.0, 3.0]],
        kept=[[1, 1, 1, 1, 0, 0, 0, 0]],
    )
    assert model.weight.tolist() == [[0.0, -2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]]
    assert sparsifier.masks["weight"].int().tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]]
    state = optimizer.state[model.weight]
    assert state["step"] == 5  # the exchange took the place of the update
    assert state["exp_avg"].tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]]
    assert state["exp_avg_sq"].tolist() == [[1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]]


def test_set_drops_the_smallest_and_grows_at_random():
    grown = set()
    for seed in range(20):
        model = linear([[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]])
        optimizer = sgd(model)
        schedule = DropGrow(every=1, end=100, fraction=0.25, decay="constant")
        sparsifier = SET(
            model, optimizer, sparsity=0.5, schedule=schedule, distribution="uniform", layers="all_linear", seed=seed
        )
        sparsifier._set_pruned({"weight": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)}, "prune")
        model.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]])
        sparsifier.step()
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        mask = sparsifier.masks["weight"][0].int().tolist()
        assert mask[1:4] == [1, 1, 1]
        assert sum(mask) == 4
        grown.add(mask.index(1) if mask[0] else mask.index(1, 4))
    assert len(grown) >= 4  # 0 (grown again), 4, 5, 6, 7: five equally likely places


def test_a_skipped_step_puts_the_exchange_off():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = RigL(model, optimizer, sparsity=0.8, schedule=DropGrow(every=3, end=100, fraction=0.5))
    events = {}
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step not in (3, 4):  # what GradScaler does after an overflow
            optimizer.step()
        if event := sparsifier.step():
            events[step] = event
    assert events == {
        5: Event(6, "update", sparsifier.current_sparsity),
        6: Event(7, "update", sparsifier.current_sparsity),
    }


def test_an_overflow_inside_a_fused_optimizer_puts_the_exchange_off():
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    sparsifier = RigL(model, optimizer, sparsity=0.8, schedule=DropGrow(every=3, end=50, fraction=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hashes = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 3:
            model.blocks[0].fc1.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        hashes.append(sparsifier.mask_hash())
    assert hashes[2] == hashes[3]
    assert hashes[3] != hashes[4]


# --- Static and keep_zeros -----------------------------------------------------------------------------------------


def test_static_takes_given_masks():
    model = Tiny()
    masks = {
        layer: torch.rand(p.shape) < 0.5 for layer, p in model.named_parameters() if "fc" in layer and p.dim() == 2
    }
    sparsifier = Static(model, adamw(model.parameters()), masks=masks)
    assert all(torch.equal(sparsifier.masks[name], mask) for name, mask in masks.items())
    sparsifier.close()
    with pytest.raises(ValueError, match="masks must name the masked layers"):
        Static(model, adamw(model.parameters()), masks={})
    with pytest.raises(TypeError, match="must be boolean"):
        Static(model, adamw(model.parameters()), masks={n: m.float() for n, m in masks.items()})
    with pytest.raises(ValueError, match="has shape"):
        Static(model, adamw(model.parameters()), masks={n: m.t() for n, m in masks.items()})
    with pytest.raises(ValueError, match="give one of them"):
        Static(model, adamw(model.parameters()), masks=masks, sparsity=0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_keep_zeros_while_fine_tuning_and_let_go_afterwards(fused):
    model = Tiny()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(torch.rand(p.shape, generator=torch.Generator().manual_seed(p.numel())) < 0.4)
    zero = {name: p == 0 for name, p in model.named_parameters() if p.dim() == 2}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    with keep_zeros(model, optimizer) as sparsifier:
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            for name, p in model.named_parameters():
                if name in zero:
                    assert torch.equal(p == 0, zero[name])
        assert sparsifier.steps == 5
    optimizer.zero_grad()
    loss_of(model, 5).backward()
    optimizer.step()
    assert not torch.equal(model.head.weight == 0, zero["head.weight"])


def test_keep_zeros_as_a_statement_holds_until_it_is_closed():
    model = Tiny()
    zero = model.head.weight.detach() < 0
    model.head.weight.data.masked_fill_(zero, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    keep_zeros(model, optimizer)  # nobody holds what it returns, and a collection does not end it
    gc.collect()

    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    train(3)
    assert torch.equal(model.head.weight == 0, zero)
    with pytest.raises(ValueError, match=r"AdamW has an open sparsifier, Static .* of keep_zeros, on what it returned"):
        keep_zeros(model, optimizer)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = keep_zeros(model, optimizer)
    train(3)
    assert torch.equal(model.head.weight == 0, zero)
    kept.close()
    gc.collect()  # the first optimizer and its sparsifier hold each other
    train(1)
    assert not (model.head.weight == 0).any()


def test_what_keep_zeros_holds_is_freed_with_its_optimizer():
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    kept = weakref.ref(keep_zeros(model, optimizer))
    assert kept() is not None
    del optimizer
    gc.collect()
    assert kept() is None


# --- at initialisation ---------------------------------------------------------------------------------------------


def test_snip_by_hand():
    model = linear([[1.0, 2.0, 3.0, 4.0]])
    x = torch.tensor([[9.0, 1.0, 2.0, 0.5]])  # |w * dL/dw| = 9, 2, 6, 2 for L = sum
    model.weight.grad = torch.full_like(model.weight, 5.0)
    sparsifier = AtInit(model, sgd(model), sparsity=0.5, score="snip", loss=lambda m: m(x).sum(), layers="all_linear")
    assert sparsifier.masks["weight"].tolist() == [[True, False, True, False]]
    assert model.weight.tolist() == [[1.0, 0.0, 3.0, 0.0]]
    assert (model.weight.grad == 5.0).all()


def test_synflow_scores_paths_and_puts_signs_back():
    model = nn.Sequential(linear([[-1.0, 2.0], [3.0, -4.0]]), linear([[-5.0, 1.0]]))
    # |w| flows: weight (i, j) of the first layer carries |w_ij| * |v_i| = 5, 10 / 3, 4; of the second 15 and 7.
    sparsifier = AtInit(
        model,
        sgd(model),
        sparsity=0.5,
        score="synflow",
        rounds=1,
        loss=lambda m: m(torch.ones(1, 2)).sum(),
        layers="all_linear",
    )
    assert model[0].weight.tolist() == [[0.0, 2.0], [0.0, 0.0]]
    assert model[1].weight.tolist() == [[-5.0, 1.0]]
    assert sparsifier.model.training


def test_synflow_leaves_modes_and_gradients_as_they_were():
    model = Tiny()
    model.blocks[0].norm.eval()
    before = {name: module.training for name, module in model.named_modules()}
    AtInit(
        model,
        adamw(model.parameters()),
        sparsity=0.5,
        score="synflow",
        rounds=2,
        loss=lambda m: m(torch.ones(1, 6)).sum(),
    )
    assert {name: module.training for name, module in model.named_modules()} == before
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(ValueError, match="the loss does not depend on"):
        AtInit(model, adamw(model.parameters()), sparsity=0.5, score="snip", loss=lambda m: m.head.weight.sum())
    assert (model.head.weight.grad == 1.0).all()


def test_random_masks_depend_on_the_seed_alone():
    def make(seed):
        model = Tiny(seed=int(torch.randint(100, ())))
        return AtInit(model, adamw(model.parameters()), sparsity=0.9, score="random", seed=seed).mask_hash()

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_a_resumed_run_draws_with_the_seed_it_began_with():
    hashes = []
    for resumed in (False, True):
        model = Tiny()
        optimizer = adamw(model.parameters())
        schedule = DropGrow(every=2, end=50, fraction=0.5)
        sparsifier = SET(model, optimizer, sparsity=0.8, schedule=schedule, seed=5)
        for step in range(4):
            if step == 1 and resumed:
                state = sparsifier.state_dict()
                sparsifier.close()
                sparsifier = SET(model, optimizer, sparsity=0.8, schedule=schedule, seed=6, state_dict=state)
            train_step(model, [optimizer], sparsifier, step)
        hashes.append(sparsifier.mask_hash())
    assert hashes[0] == hashes[1]


# --- SR-STE --------------------------------------------------------------------------------------------------------


def test_srste_by_hand():
    # Dense (4, 3, 2, 1), kept (4, 3). Gradient of sum(w~ * x) is x everywhere; the pruned get decay * w besides.
    model = linear([[4.0, 3.0, 2.0, 1.0]])
    optimizer = sgd(model, lr=1.0)
    sparsifier = SRSTE(model, optimizer, decay=0.5, layers="all_linear")
    assert model.weight.tolist() == [[4.0, 3.0, 0.0, 0.0]]
    model(torch.tensor([[1.0, 1.0, -3.0, 1.0]])).sum().backward()
    optimizer.step()
    # 4 - 1, 3 - 1, 2 + 3 - 0.5 * 2, 1 - 1 - 0.5 * 1
    assert model.weight.tolist() == [[3.0, 2.0, 4.0, -0.5]]
    sparsifier.step()
    assert model.weight.tolist() == [[3.0, 0.0, 4.0, 0.0]]
    assert sparsifier.state_dict()["extra"]["dense"]["weight"].tolist() == [[3.0, 2.0, 4.0, -0.5]]


def test_srste_keeps_its_dense_weights_when_a_step_is_skipped():
    model = linear([[4.0, 3.0, 2.0, 1.0]])
    sparsifier = SRSTE(model, sgd(model), layers="all_linear")
    sparsifier.step()  # GradScaler has skipped the optimizer's
    assert model.weight.tolist() == [[4.0, 3.0, 0.0, 0.0]]
    assert sparsifier.state_dict()["extra"]["dense"]["weight"].tolist() == [[4.0, 3.0, 2.0, 1.0]]


def test_srste_decay_is_scaled_with_the_gradients():
    method = functools.partial(SRSTE, decay=0.25)
    plain, scaled = train_with_scaler(method, enabled=False), train_with_scaler(method, enabled=True)
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_srste_takes_other_patterns():
    model = Tiny()
    SRSTE(model, adamw(model.parameters()), sparsity=0.9)
    assert zeros_in_blocks(model) == 4 * 86
    model = Tiny()
    sparsifier = SRSTE(model, adamw(model.parameters()), pattern="1:4")
    assert sparsifier.current_sparsity == 0.75


# --- bad input, before training ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m, o: ACDC(m, o, sparsity=90, schedule=PHASES), ValueError, r"got 90.* Give a fraction: 0.9, not 90"),
        (lambda m, o: ACDC(m, o, schedule=PHASES), ValueError, "sparsity is needed unless the pattern is N:M"),
        (lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES, pattern="2:4"), ValueError, "2:4 fixes the sparsity"),
        (lambda m, o: ACDC(m, o, schedule=PHASES, pattern="2:5"), ValueError, "multiple of 5, but blocks.0.fc1.weight"),
        (lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES, pattern=(5, 5)), ValueError, "do not tile"),
        (lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES, restore="ones"), ValueError, "'zeros' or 'values'"),
        (lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES, distribution="even"), ValueError, "distribution must"),
        (lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES, include=["x"]), ValueError, "matches no parameter"),
        (
            lambda m, o: ACDC(m, adamw(m.head.parameters()), sparsity=0.9, schedule=PHASES),
            ValueError,
            "4 masked weights are in no optimizer: blocks.0.fc1.weight, .* pass every optimizer in a list",
        ),
        (lambda m, o: GMP(m, o, sparsity=0.5, schedule=Cubic(0, 9, initial=0.6)), ValueError, "above its sparsity"),
        (lambda m, o: GMP(m, o, sparsity=0.5, schedule=CUBIC, pattern="2:4"), ValueError, "GMP needs an unstructured"),
        (
            lambda m, o: RigL(m, o, sparsity=0.5, schedule=DropGrow(), distribution="global"),
            ValueError,
            "RigL keeps a count for each layer",
        ),
        (lambda m, o: AtInit(m, o, sparsity=0.5, score="grasp"), ValueError, "'random', 'snip' or 'synflow'"),
        (lambda m, o: AtInit(m, o, sparsity=0.5, score="snip"), ValueError, "needs loss"),
        (lambda m, o: AtInit(m, o, sparsity=0.5, score="random", loss=loss_of), ValueError, "takes no loss"),
        (
            lambda m, o: AtInit(m, o, sparsity=0.5, score="snip", loss=lambda m: m.head.weight.sum()),
            ValueError,
            "the loss does not depend on blocks.0.fc1.weight",
        ),
        (
            lambda m, o: AtInit(m, o, sparsity=0.5, score="synflow", rounds=0, loss=loss_of),
            ValueError,
            "rounds must be at least 1, got 0",
        ),
        (lambda m, o: SRSTE(m, o, decay=-1.0), ValueError, "decay must be at least 0"),
        (lambda m, o: SRSTE(m, o, every=0), ValueError, "every must be at least 1 step, got 0"),
    ],
)
def test_bad_input_is_refused_before_training(make, error, text):
    model = Tiny()
    with pytest.raises(error, match=text):
        make(model, adamw(model.parameters()))


def test_states_of_other_runs_are_refused():
    model = Tiny()
    optimizer = adamw(model.parameters())
    state = Static(model, optimizer, sparsity=0.5).state_dict()
    with pytest.raises(ValueError, match="saved by Static, not by ACDC"):
        ACDC(model, optimizer, sparsity=0.5, schedule=PHASES).load_state_dict(state)
    with pytest.raises(ValueError, match=r"masks 4 layers, this sparsifier 2; 'blocks.1.fc1.weight' is masked in one"):
        Static(model, optimizer, sparsity=0.5, exclude=["blocks.1.*"]).load_state_dict(state)
    part = Static(model, optimizer, sparsity=0.5, exclude=["blocks.1.*"]).state_dict()
    with pytest.raises(ValueError, match=r"masks 2 layers, this sparsifier 4; 'blocks.1.fc1.weight' is masked in one"):
        Static(model, optimizer, sparsity=0.5).load_state_dict(part)
    turned = nn.ModuleDict({"fc": nn.Linear(12, 8)})
    other = Static(turned, adamw(turned.parameters()), sparsity=0.5, layers="all_linear")
    straight = nn.ModuleDict({"fc": nn.Linear(8, 12)})  # as many weights
    state = Static(straight, adamw(straight.parameters()), sparsity=0.5, layers="all_linear").state_dict()
    with pytest.raises(ValueError, match=r"saved mask of fc.weight has shape \(12, 8\), its weight here \(8, 12\)"):
        other.load_state_dict(state)


def test_a_copy_or_pickle_is_refused_with_the_way_to_make_one():
    model = Tiny()
    optimizer = HORST(model.parameters())
    sparsifier = Static(model, optimizer, sparsity=0.5)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Static cannot be pickled or copied.*Static\(\.\.\., state_dict"):
            copied(sparsifier)
    model, optimizer = copy.deepcopy((model, optimizer))
    train_step(model, [optimizer], Static(model, optimizer, state_dict=sparsifier.state_dict()), 0)
    assert zeros_in_blocks(model) == 192


def test_a_state_saved_in_a_dense_phase_is_checked_too():
    model = Tiny()
    optimizer = adamw(model.parameters())
    state = ACDC(model, optimizer, sparsity=0.5, schedule=PHASES, exclude=["blocks.1.*"]).state_dict()
    with pytest.raises(ValueError, match="masks 2 layers, this sparsifier 4"):
        ACDC(model, optimizer, sparsity=0.5, schedule=PHASES, state_dict=state)


# --- the hook for optimizers that mask by themselves ---------------------------------------------------------------


class MaskingSGD(torch.optim.SGD):
    """Zeroes pruned weights inside its step, as a fused kernel would."""

    def set_masks(self, masks):
        self.masks = masks

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p, mask in self.masks.items():
            if mask is not None:
                p.masked_fill_(~mask, 0)
                p.masked += 1


def test_an_optimizer_that_masks_is_told_and_left_to_it():
    model, plain = Tiny(), Tiny()
    for p in model.parameters():
        p.masked = 0
    optimizer = MaskingSGD(model.parameters(), lr=0.1, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    sparsifier = ACDC(model, optimizer, sparsity=0.9, schedule=PHASES)
    optimizer.set_masks({layer.param: None for layer in sparsifier.layers})
    plain_sparsifier = ACDC(plain, plain_optimizer, sparsity=0.9, schedule=PHASES)
    for step in range(TOTAL):
        train_step(model, [optimizer], sparsifier, step)
        train_step(plain, [plain_optimizer], plain_sparsifier, step)
        told = optimizer.masks[model.blocks[0].fc1.weight] if sparsifier.is_sparse else None
        if told is not None:
            assert torch.equal(told, sparsifier.masks["blocks.0.fc1.weight"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.blocks[0].fc1.weight.masked == 4 + 4 + 5  # its own doing in every sparse step but those that prune


def test_closing_makes_a_masking_optimizer_dense_again():
    model = Tiny()
    optimizer = MaskingSGD(model.parameters(), lr=0.1)
    with Static(model, optimizer, sparsity=0.5):
        assert all(mask is not None for mask in optimizer.masks.values())
    assert len(optimizer.masks) == 4
    assert all(mask is None for mask in optimizer.masks.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda m, o: ACDC(m, o, sparsity=0.9, schedule=PHASES),  # begins dense
        lambda m, o: SRSTE(m, o, sparsity=0.5),  # its weights are dense inside the update
    ],
    ids=["acdc", "srste"],
)
def test_masks_that_an_earlier_sparsifier_left_in_the_optimizer_are_taken_out(make):
    model = Tiny()
    optimizer = MaskingSGD(model.parameters(), lr=0.1)
    Static(model, optimizer, sparsity=0.5)  # dropped without being closed
    sparsifier = make(model, optimizer)
    assert all(mask is None for mask in optimizer.masks.values())
    assert len(optimizer.masks) == len(sparsifier.layers)


@pytest.mark.parametrize(
    "make",
    [
        lambda m, o: RigL(m, o, sparsity=0.8, schedule=DropGrow(every=1, end=50, fraction=0.5)),
        lambda m, o: SET(m, o, sparsity=0.8, schedule=DropGrow(every=1, end=50, fraction=0.5)),
        lambda m, o: SRSTE(m, o),
        lambda m, o: Static(m, o, sparsity=0.8),
    ],
    ids=["rigl", "set", "srste", "static"],
)
def test_a_sparsifier_that_is_gone_does_nothing(make):
    model, plain = Tiny(), Tiny()
    optimizer, plain_optimizer = adamw(model.parameters()), adamw(plain.parameters())
    sparsifier = make(model, optimizer)
    sparsifier.step()  # an exchange is now due, and masks are there
    plain.load_state_dict(model.state_dict())
    del sparsifier
    for step in range(3):
        for m, o in ((model, optimizer), (plain, plain_optimizer)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_a_tied_weight_is_masked_under_all_its_names():
    model, average = Tied(), Tied()
    sparsifier = Static(model, sgd(model), sparsity=0.5, layers="all_linear")
    average.first.weight.data.fill_(1.0)
    state = sparsifier.masked_state_dict(average.state_dict())
    assert [int((v == 0).sum()) for v in state.values()] == [8, 8]
    assert state["first.weight"].data_ptr() == state["second.weight"].data_ptr()  # saved once
    assert sparsifier.record(1.0, average)
    sparsifier.best.load_into(loaded := Tied(), "sparse")
    assert torch.equal(loaded.first.weight != 0, sparsifier.masks["first.weight"])
    with sparsifier.evaluate(average):
        assert torch.equal(average.second.weight != 0, sparsifier.masks["first.weight"])
    assert (average.first.weight == 1.0).all()


def test_closing_takes_every_hook_off():
    model = Tiny()
    optimizer = adamw(model.parameters())
    with Static(model, optimizer, sparsity=0.5) as sparsifier:
        pass
    loss_of(model).backward()
    assert (model.blocks[0].fc1.weight.grad[~sparsifier.masks["blocks.0.fc1.weight"]] != 0).any()


def test_gradients_filled_by_hand_are_masked_on_request():
    model = Tiny()
    sparsifier = Static(model, adamw(model.parameters()), sparsity=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    sparsifier.mask_gradients()
    for layer in sparsifier.layers:
        assert torch.equal(layer.param.grad != 0, sparsifier.masks[layer.name])
    assert (model.head.weight.grad == 1).all()


def test_an_average_of_another_model_is_refused():
    sparsifier = Static(model := Tiny(), adamw(model.parameters()), sparsity=0.5)
    with pytest.raises(ValueError, match="it must be a copy of the trained one"), sparsifier.evaluate(nn.Linear(2, 2)):
        pass
    renamed = {f"ema_model.{name}": value for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"the given state has no parameter 'blocks\.0\.fc1\.weight': it must be a copy"
    ):
        sparsifier.masked_state_dict(renamed)


def test_policies_of_pruning_apply_to_gradual_methods_too():
    model = Tiny()
    optimizer = adamw(model.parameters())
    sparsifier = GMP(model, optimizer, sparsity=0.8, schedule=CUBIC, policy=StatePolicy(on_prune="reset-pruned"))
    for step in range(9):
        train_step(model, [optimizer], sparsifier, step)
        if step == 7:  # the second pruning, the first that removes anything
            for layer in sparsifier.layers:
                removed = ~sparsifier.masks[layer.name]
                assert not optimizer.state[layer.param]["exp_avg"][removed].any()
                assert optimizer.state[layer.param]["exp_avg"][~removed].all()
