"""The losses against float64 references that read like the formulas."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from horst.recovery import cross_entropy, distillation, kl_divergence, mixed_loss, squarehead


def kl_reference(student, teacher, T):
    p, q = (torch.softmax(x.double() / T, -1) for x in (teacher, student))
    return T**2 * (p * (p.log() - q.log())).sum(-1).mean()


def cross_entropy_reference(student, targets):
    log_q = torch.log(torch.softmax(student.double(), -1))
    scored = [-log_q[i, t] for i, t in enumerate(targets.tolist()) if t != -100]
    return sum(scored) / len(scored)


@pytest.fixture(params=[1, 14, 1000], ids=lambda n: f"chunks of {n}")
def _chunks(request, monkeypatch):
    """One row at a time, two of the seven classes, or all at once."""
    monkeypatch.setattr(distillation, "_CHUNK", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_kl_divergence_is_the_formula(temperature):
    student, teacher = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    loss = kl_divergence(student, teacher, temperature)
    wide = student.detach().double().requires_grad_()
    expected = kl_reference(wide, teacher, temperature)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(student.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_chunks")
def test_cross_entropy_is_the_formula():
    student, targets = torch.randn(5, 7, requires_grad=True), torch.tensor([3, -100, 0, 6, -100])
    loss = cross_entropy(student, targets)
    wide = student.detach().double().requires_grad_()
    expected = cross_entropy_reference(wide, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(student.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_chunks")
def test_the_mixture_is_the_sum_of_its_terms_where_there_are_targets():
    student = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    teacher, targets = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [-100, 0, 6]])
    loss = mixed_loss(student, targets, teacher, label_weight=0.33, distill_weight=0.67, temperature=2.0)
    scored = targets != -100
    hard = cross_entropy_reference(student.flatten(0, 1), targets.flatten())
    expected = 0.33 * hard + 0.67 * kl_reference(student[scored], teacher[scored], 2.0)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, student)[0] for x in (loss, expected)))


@pytest.mark.parametrize("teacher_rows", [None, 5])
def test_compiled_it_is_the_same(teacher_rows, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, **options: compile(part, backend="aot_eager", **options))
    monkeypatch.setattr(distillation, "_CHUNK", 3 * 7)  # three rows at a time, two in the end
    distillation._compiled.cache_clear()
    student, targets = torch.randn(5, 7, requires_grad=True), torch.tensor([3, -100, 0, 6, -100])
    teacher = None if teacher_rows is None else torch.randn(teacher_rows, 7)
    losses = [mixed_loss(student, targets, teacher, compiled=compiled) for compiled in (False, True)]
    gradients = [torch.autograd.grad(loss, student)[0] for loss in losses]
    distillation._compiled.cache_clear()
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert gradients[0].abs().max() > 0


def test_no_row_that_counts_is_no_loss():
    student = torch.randn(2, 7, requires_grad=True)
    loss = mixed_loss(student, torch.full((2,), -100), torch.randn(2, 7))
    loss.backward()
    assert loss.item() == 0
    assert student.grad.abs().max() == 0


def test_bfloat16_logits_are_summed_in_float32():
    student, teacher = (torch.randn(64, 50).bfloat16() for _ in range(2))
    student.requires_grad_()
    loss = kl_divergence(student, teacher, 2.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), kl_reference(student.detach(), teacher, 2.0), rtol=1e-5, atol=1e-7)
    loss.backward()
    assert student.grad.dtype == torch.bfloat16


@given(seed=st.integers(0, 10**6), temperature=st.floats(0.25, 8.0), rows=st.integers(1, 5))
def test_kl_divergence_is_positive_and_zero_for_equal_predictions(seed, temperature, rows):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (4 * torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    assert kl_divergence(student, teacher, temperature) > 0
    shifted = teacher + torch.randn(rows, 1, generator=generator)  # a softmax does not see it
    assert kl_divergence(shifted, teacher, temperature).abs() < 1e-12 * temperature**2 * 100


def test_squarehead_is_the_formula():
    student = [torch.randn(2, 4, 3, requires_grad=True) for _ in range(3)]
    teacher = [torch.randn(2, 4, 3) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    found = squarehead(student, teacher, mask)
    expected = 0.0
    for s, t in zip(student, teacher, strict=True):
        s, t = s[mask.bool()].double(), t[mask.bool()].double()
        expected = expected + (s - t).square().mean() / (t.square().mean() + 1e-6)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    whole = sum((s - t).square().mean() / (t.square().mean() + 1e-6) for s, t in zip(student, teacher, strict=True))
    torch.testing.assert_close(squarehead(student, teacher), whole)


def test_squarehead_ignores_what_stands_in_the_padding():
    student, teacher = torch.randn(1, 3, 2), torch.randn(1, 3, 2)
    mask = torch.tensor([[1, 1, 0]])
    before = squarehead([student], [teacher], mask)
    student[0, 2] = float("nan")
    assert squarehead([student], [teacher], mask) == before


def test_a_negative_target_is_not_taken_for_class_0():
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        cross_entropy(torch.zeros(2, 7), torch.tensor([3, -1]))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"teacher's logits have shape \(2, 5\), the student's \(2, 6\)"):
        kl_divergence(torch.zeros(2, 6), torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"targets must have shape \(2,\), got \(3,\)"):
        cross_entropy(torch.zeros(2, 6), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the student has 1 .* the teacher 2 .*Use distill='kl'"):
        squarehead([torch.zeros(1, 2)], [torch.zeros(1, 2)] * 2)
