"""Cross-entropy and its gradient in one pass, against torch's own in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import horst.lab.kernels.cross_entropy as package
from horst.lab.kernels.cross_entropy import IGNORED, losses_and_gradient_, losses_and_gradient_reference


def expected(logits, targets):
    """By autograd, in float64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient


def random(rows, vocabulary, device, dtype=torch.float32, spread=3.0):
    logits = (spread * torch.randn(rows, vocabulary, dtype=torch.float64)).to(device, dtype)
    return logits, torch.randint(vocabulary, (rows,), device=device)


# one class, fewer than a block, a block, one more, several, and GPT-2's
@pytest.mark.parametrize("vocabulary", [1, 2, 100, 4096, 4097, 50304])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_agrees_with_autograd(vocabulary, dtype, device):
    logits, targets = random(4, vocabulary, device, dtype)
    targets[1] = IGNORED
    losses, gradient = expected(logits, targets)
    for function in (losses_and_gradient_reference, losses_and_gradient_):  # the first leaves the logits alone
        found, slope = function(logits, targets)
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert slope.dtype == dtype
        assert_close(found.double(), losses, rtol=1e-6, atol=2e-6)
        # a unit in the last place of what it is written in (the interpreter cuts off instead of rounding), and the
        # error of float32 in 1 - p
        assert_close(slope.double(), gradient, rtol=torch.finfo(dtype).eps + 2e-6, atol=2e-7)


@given(
    rows=st.lists(
        st.lists(st.floats(-80, 80, width=32), min_size=5, max_size=5).flatmap(
            lambda row: st.tuples(st.just(row), st.one_of(st.integers(0, 4), st.just(IGNORED)))
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_logits(rows):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits = torch.tensor([row for row, _ in rows], device=device)
    targets = torch.tensor([target for _, target in rows], device=device)
    losses, gradient = expected(logits, targets)
    found, slope = losses_and_gradient_(logits, targets)
    assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    # an exponent of up to 160 is rounded to 24 bits, and its error is the relative one of the power
    assert_close(slope.double(), gradient, rtol=160 * torch.finfo(torch.float32).eps, atol=1e-6)
    assert (slope[targets == IGNORED] == 0).all()


def test_the_gradient_has_the_memory_of_the_logits(device):
    logits, targets = random(3, 7, device)
    _, gradient = losses_and_gradient_(logits, targets)
    assert gradient.data_ptr() == logits.data_ptr()


def test_classes_that_are_ruled_out(device):
    logits, targets = random(3, 40, device)
    targets[:] = 0
    logits[:, 5:] = -torch.inf
    losses, gradient = expected(logits, targets)
    found, slope = losses_and_gradient_(logits, targets)
    assert_close(found.double(), losses, rtol=1e-6, atol=1e-6)
    assert_close(slope.double(), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_is_seen(bad, device):
    logits, targets = random(3, 40, device)
    logits[1, 7] = bad
    targets[1] = 3
    losses, _ = losses_and_gradient_(logits, targets)
    assert losses.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("target", [40, -1, 2**40])
def test_a_target_outside_the_vocabulary_has_no_loss(target, device):
    logits, targets = random(3, 40, device)
    targets[1] = target
    losses, _ = losses_and_gradient_(logits, targets)
    assert losses.isnan().tolist() == [False, True, False]


def test_rows_that_do_not_lie_side_by_side(device):
    logits, targets = random(6, 10, device)
    losses, gradient = expected(logits[::2, ::2], targets[::2] % 5)
    found, slope = losses_and_gradient_(logits[::2, ::2], targets[::2] % 5)
    assert_close(found.double(), losses, rtol=1e-6, atol=1e-6)
    assert_close(slope.double(), gradient, rtol=1e-5, atol=1e-6)


def test_no_rows_and_no_kernel(device, monkeypatch):
    losses, gradient = losses_and_gradient_(torch.zeros(0, 5, device=device), torch.zeros(0, device=device).long())
    assert (losses.shape, gradient.shape) == ((0,), (0, 5))
    monkeypatch.setattr(package, "runs_kernels", lambda _: False)
    logits, targets = random(3, 7, device)
    before = logits.clone()
    _, gradient = losses_and_gradient_(logits, targets)
    assert_close(logits, before, rtol=0, atol=0)
    assert gradient.data_ptr() != logits.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_the_same_to_the_bit(dtype):
    logits, targets = random(64, 50304, torch.device("cuda"), dtype)
    losses, gradient = losses_and_gradient_(logits.clone(), targets)

    @torch.compile
    def doubled(logits, targets):
        losses, gradient = losses_and_gradient_(logits * 1.0, targets)
        return losses, gradient

    found, slope = doubled(logits, targets)
    assert torch.equal(found, losses)
    assert torch.equal(slope, gradient)
