"""accelerate: its loop does what a hand-written one does, and its saved state resumes bit for bit."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from horst import HORST, AdamS, param_groups
from horst.sparsity import ACDC, ADMM, CAST, SRSTE, DropGrow, Phases, RigL, Static, keep_zeros

ACCUMULATE, MICRO_STEPS = 2, 24


@pytest.fixture(autouse=True)
def _fresh_state():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = HORST(param_groups(model, weight_decay=0.1, alpha=5.0), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + 0.1 * k))
    return model, optimizer, scheduler


def sparsify(model, optimizer):
    return ACDC(model, optimizer, sparsity=0.75, schedule=Phases((3, 6, 9), end=12), layers="all_linear")


def loss(model, k):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(k))
    return 10 * (model(x) - 1).square().mean()


def run_accelerate(steps, *, folder=None, resume=False):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model, optimizer, scheduler = accelerator.prepare(*parts())
    sparsifier = sparsify(model, optimizer)
    accelerator.register_for_checkpointing(sparsifier)
    if resume:
        accelerator.load_state(folder)
    for k in steps:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, k))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                sparsifier.step()
    if folder and not resume:
        accelerator.save_state(folder)
    return accelerator.unwrap_model(model), sparsifier


def test_its_loop_does_what_a_loop_by_hand_does():
    prepared, sparsifier = run_accelerate(range(MICRO_STEPS))
    model, optimizer, scheduler = parts()
    by_hand = sparsify(model, optimizer)
    for first in range(0, MICRO_STEPS, ACCUMULATE):
        for k in range(first, first + ACCUMULATE):
            (loss(model, k) / ACCUMULATE).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5  # or nothing is tested
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        by_hand.step()
    assert sparsifier.mask_hash() == by_hand.mask_hash()
    assert sparsifier.current_sparsity == 0.75
    assert all(torch.equal(p, q) for p, q in zip(prepared.parameters(), model.parameters(), strict=True))


def test_a_saved_state_resumes_bit_for_bit(tmp_path):
    whole, sparsifier = run_accelerate(range(MICRO_STEPS))
    run_accelerate(range(16), folder=str(tmp_path))
    resumed, again = run_accelerate(range(16, MICRO_STEPS), folder=str(tmp_path), resume=True)
    assert again.steps == sparsifier.steps == MICRO_STEPS // ACCUMULATE
    assert again.mask_hash() == sparsifier.mask_hash()
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), whole.parameters(), strict=True))


METHODS = {
    "acdc": sparsify,
    "static": lambda m, o: Static(m, o, sparsity=0.75, layers="all_linear"),
    "keep_zeros": lambda m, o: keep_zeros(m, o),
    "rigl": lambda m, o: RigL(m, o, sparsity=0.75, schedule=DropGrow(every=3, end=12), layers="all_linear"),
    "srste": lambda m, o: SRSTE(m, o, pattern="1:2", layers="all_linear"),
    "admm": lambda m, o: ADMM(m, o, sparsity=0.75, steps=6, every=2, layers="all_linear"),
    "cast": lambda m, o: CAST(m, o, pattern="1:2", layers="all_linear"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_works_on_a_prepared_optimizer_as_on_the_one_inside(name):
    runs = []
    for prepared in (True, False):
        model, optimizer, _ = parts()
        if name == "cast":
            optimizer = AdamS(model.parameters(), lr=0.02, steps=12)
        model[0].weight.data[:, :3] = 0
        given = Accelerator(cpu=True).prepare(optimizer) if prepared else optimizer
        sparsifier = METHODS[name](model, given)
        assert sparsifier.optimizers == [optimizer]
        for k in range(12):
            loss(model, k).backward()
            given.step()
            if name != "keep_zeros":
                sparsifier.step()
            given.zero_grad()
        sparsifier.close()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))
    assert (runs[0][0] == 0).float().mean() >= 0.5


def test_a_wrapper_with_hooks_of_its_own_is_not_taken_off():
    class Lookahead(torch.optim.SGD):
        optimizer = torch.optim.SGD([torch.zeros(1)])

    model = parts()[0]
    outer = Lookahead(model.parameters(), lr=0.1)
    assert Static(model, outer, sparsity=0.5, layers="all_linear").optimizers == [outer]


def test_a_wrapper_without_hooks_and_with_nothing_to_take_off_is_masked():
    class NoHooks(torch.optim.Optimizer):
        def __init__(self, base):
            self.base = base

        param_groups = property(lambda self: self.base.param_groups)

        def step(self):
            self.base.step()

    model = parts()[0]
    optimizer = NoHooks(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    sparsifier = Static(model, optimizer, sparsity=0.75, layers="all_linear")
    for k in range(3):
        loss(model, k).backward()
        optimizer.step()
        sparsifier.step()
    assert (model[0].weight == 0).float().mean() == 0.75
