"""One sparsifier at a time on an optimizer, and none left behind: by closing, by dropping, after an error, compiled."""

import gc

import pytest
import torch
from sparse_methods import CUBIC, DROP_GROW, METHODS, PHASES, ROUNDS, Tiny, adamw, loss_of
from torch import nn

from horst import HAM, HORST
from horst.sparsity import (
    ACDC,
    ADMM,
    GMP,
    IMP,
    SET,
    SRSTE,
    AtInit,
    Cubic,
    DropGrow,
    Phases,
    RigL,
    Static,
    acdc_steps,
    keep_zeros,
    rigl_steps,
)


def horst(params):
    return HORST(params, lr=0.02, alpha=5.0)


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def zeros(model):
    return sum(int((p == 0).sum()) for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize("make_optimizer", [adamw, horst])
@pytest.mark.parametrize("method", METHODS)
def test_a_second_sparsifier_is_refused_until_the_first_is_closed(method, make_optimizer):
    model = Tiny()
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer)  # momentum
    first = Static(model, optimizer, sparsity=0.5)
    masks, weights = first.masks, [p.detach().clone() for p in model.parameters()]
    name = type(optimizer).__name__
    with pytest.raises(ValueError, match=rf"{name} has an open sparsifier, Static \(sparsity 0.5000\): .* Call close"):
        METHODS[method](model, [adamw([torch.nn.Parameter(torch.ones(2))]), optimizer])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), weights, strict=True))
    assert all(torch.equal(first.masks[layer], mask) for layer, mask in masks.items())
    if isinstance(optimizer, HORST):  # its masks are still the first's
        train(model, optimizer)
        assert zeros(model) == 192
    first.close()
    METHODS[method](model, optimizer)


def test_a_second_sparsifier_on_the_same_weights_is_refused_on_another_optimizer_too():
    model = Tiny()
    first = Static(model, adamw(model.parameters()), sparsity=0.5, include=["blocks.0.*"], layers=None)
    other = adamw(model.parameters())
    message = r"blocks\.0\.fc1\.weight has an open sparsifier, Static \(sparsity 0.5000\): .* Call close"
    with pytest.raises(ValueError, match=message):
        GMP(model, other, sparsity=0.5, schedule=CUBIC)
    with GMP(model, other, sparsity=0.5, schedule=CUBIC, exclude=["blocks.0.*"]):
        pass  # no weight in common
    first.close()
    GMP(model, other, sparsity=0.5, schedule=CUBIC)
    loss_of(model, 0).backward()
    assert all(bool(p.grad.any(1).all()) for p in model.parameters() if p.dim() == 2)  # dense until its first event


def test_optimizers_of_their_own_may_have_sparsifiers_of_their_own():
    a, b = Tiny(), Tiny()
    first, second = Static(a, adamw(a.parameters()), sparsity=0.5), Static(b, adamw(b.parameters()), sparsity=0.5)
    assert first.current_sparsity == second.current_sparsity == 0.5


@pytest.mark.parametrize("make_optimizer", [horst, lambda p: HAM(p, lr=0.02, alpha=5.0), adamw])
def test_a_dropped_sparsifier_leaves_no_mask_in_the_optimizer(make_optimizer):
    model, plain = Tiny(), Tiny()
    sparsifier = Static(model, optimizer := make_optimizer(model.parameters()), sparsity=0.5)
    plain.load_state_dict(model.state_dict())
    del sparsifier
    train(model, optimizer)
    train(plain, make_optimizer(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert zeros(model) == 0


def test_one_that_waits_in_a_cycle_to_be_freed_does_not_block_the_next():
    model = Tiny()
    optimizer = horst(model.parameters())
    train(model, optimizer)  # momentum
    gc.disable()
    try:
        dropped = Static(model, optimizer, sparsity=0.5)
        dropped.observers.append(lambda *_, me=dropped: None)
        del dropped
        second = Static(model, optimizer, sparsity=0.25, layers="all_linear")
    finally:
        gc.enable()
    gc.collect()
    train(model, optimizer)
    assert zeros(model) == sum(int((~mask).sum()) for mask in second.masks.values())


def test_an_unfinished_sparsifier_does_not_block_the_next():
    def broken(model):
        raise RuntimeError("no data")

    model, state = Tiny(), {"method": "IMP"}
    optimizer = horst(model.parameters())
    train(model, optimizer)  # with momentum, a pruned weight moves unless the optimizer has its mask
    errors = []  # as a notebook keeps the last one, and with it the sparsifier that has no name
    for make in (
        lambda: AtInit(model, optimizer, sparsity=0.5, score="snip", loss=broken),
        lambda: Static(model, optimizer, sparsity=0.5, state_dict=state),
        lambda: RigL(model, optimizer, sparsity=0.5, schedule=DROP_GROW, distribution="global"),
    ):
        try:
            make()
        except (RuntimeError, ValueError) as error:
            errors.append(error)
    assert len(errors) == 3
    sparsifier = Static(model, optimizer, sparsity=0.5)
    errors.clear()
    gc.collect()  # what is freed now takes no masks of others out of the optimizer
    train(model, optimizer)
    assert zeros(model) == 192
    assert sparsifier.current_sparsity == 0.5


REFUSED = {
    "gmp": lambda m, o: GMP(m, o, sparsity=0.5, schedule=Cubic(0, 4, every=2, initial=0.9)),
    "imp": lambda m, o: IMP(m, o, sparsity=0.5, schedule=ROUNDS, pattern="2:4"),
    "rigl": lambda m, o: RigL(m, o, sparsity=0.5, schedule=DROP_GROW, distribution="global", scale_gradients=True),
    "at-init": lambda m, o: AtInit(m, o, score="synflow", loss=lambda _: None, pattern="2:4"),
    "srste": lambda m, o: SRSTE(m, o, state_dict={"method": "IMP"}),
    "admm": lambda m, o: ADMM(m, o, sparsity=0.5, steps=6, state_dict={"method": "IMP"}),
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_refused_sparsifier_leaves_nothing_behind(method):
    model = Tiny()
    optimizer = adamw(model.parameters())
    errors = []  # as a notebook keeps the last one, and with it the sparsifier that has no name
    for _ in range(3):
        with pytest.raises(ValueError, match=r"initial=0.9|pattern|keeps a count|saved by IMP") as error:
            REFUSED[method](model, optimizer)
        errors.append(error)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    sparsifier = Static(model, optimizer, sparsity=0.5)
    for _ in range(8):  # warnings are errors
        train(model, optimizer, steps=1)
        sparsifier.step()


@pytest.mark.parametrize(
    ("method", "kind"), [(ACDC, "Phases"), (GMP, "Cubic"), (RigL, "DropGrow"), (SET, "DropGrow"), (IMP, "Rounds")]
)
def test_a_schedule_of_another_kind_is_refused_at_once(method, kind):
    model = Tiny()
    optimizer = adamw(model.parameters())
    given = {"Phases": PHASES, "Cubic": CUBIC, "DropGrow": DROP_GROW, "Rounds": ROUNDS}
    for schedule in [100, None, *(other for name, other in given.items() if name != kind)]:
        with pytest.raises(TypeError, match=rf"schedule of {method.__name__} must be a {kind}, got .*\. Make it with"):
            method(model, optimizer, sparsity=0.5, schedule=schedule)
    with pytest.raises(TypeError, match=r"got the function acdc_steps\. .* called for you by the trainers' callbacks"):
        method(model, optimizer, sparsity=0.5, schedule=acdc_steps)
    method(model, optimizer, sparsity=0.5, schedule=given[kind])


COMPILED = {
    "rigl": lambda m, o: RigL(m, o, sparsity=0.5, schedule=rigl_steps(20, every=3), layers="all_linear"),
    "set": lambda m, o: SET(m, o, sparsity=0.5, schedule=DropGrow(every=3, end=15), layers="all_linear"),
    "srste": lambda m, o: SRSTE(m, o, layers="all_linear"),
    "admm": lambda m, o: ADMM(m, o, sparsity=0.5, steps=15, every=4, penalty=0.5, layers="all_linear"),
    "acdc": lambda m, o: ACDC(m, o, sparsity=0.5, schedule=Phases((3, 6, 9), end=20), layers="all_linear"),
    "keep-zeros": lambda m, o: keep_zeros(m, o, sparsity=0.5),
}


@pytest.mark.parametrize(
    "make_optimizer",
    [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False), horst],
    ids=["momentum", "horst"],
)
@pytest.mark.parametrize("method", COMPILED)
def test_a_compiled_step_trains_as_the_plain_one(method, make_optimizer):
    def run(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        # Layers of several sizes: a count that differs from layer to layer is what a traced hook fails on.
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = make_optimizer(model.parameters())
        sparsifier = COMPILED[method](model, optimizer)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(20):
            model(torch.randn(4, 8)).square().mean().backward()
            step()
            if method != "keep-zeros":
                sparsifier.step()
            optimizer.zero_grad()
        for name, mask in sparsifier.masks.items():
            assert not model.get_parameter(name)[~mask].any()
        return model, sparsifier.mask_hash()

    (plain, plain_hash), (compiled, compiled_hash) = run(False), run(True)
    assert plain_hash == compiled_hash
    for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
