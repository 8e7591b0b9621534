"""accelerate: its loop does what a hand-written one does, and its saved state resumes bit for bit."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from horst import HORST, param_groups
from horst.sparsity import ACDC, Phases

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
