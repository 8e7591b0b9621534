"""An L1 penalty in the gradient, and as a soft threshold."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.penalize_l1 import penalize_l1
from horst.optimizers.l1 import soft_threshold


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def adam_direction(history, betas=(0.9, 0.999), eps=1e-8):
    """Adam's bias-corrected direction after the gradients in ``history``."""
    m = v = torch.zeros_like(history[0])
    for g in history:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    steps = len(history)
    return m / (1 - betas[0] ** steps) / ((v / (1 - betas[1] ** steps)).sqrt() + eps)


GRADIENTS = [float64(0.3, -0.1, 0.0, 0.02), float64(-0.2, 0.4, 0.0, 0.01), float64(0.1, 0.1, 0.0, 0.03)]


def run(hook, l1):
    start = float64(0.5, -0.4, 0.0, 0.003)
    weight, free = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    groups = [{"params": [weight], "l1": l1}, {"params": [free]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.2)
    hook(optimizer)
    found = []
    for g in GRADIENTS:
        weight.grad, free.grad = g.clone(), g.clone()
        optimizer.step()
        found.append(weight.detach().clone())
    return start, found, free.detach()


def test_the_penalty_is_a_part_of_the_gradient():
    theta, found, free = run(penalize_l1, 0.05)
    history = []
    for g, after in zip(GRADIENTS, found, strict=True):
        history.append(g + 0.05 * theta.sign())
        theta = theta * (1 - 0.01 * 0.2) - 0.01 * adam_direction(history)
        assert_close(after, theta, rtol=1e-10, atol=1e-14)
    assert after[2] == 0, "a zero weight feels no penalty"
    assert_close(free, run(lambda optimizer: None, 0.0)[1][-1], rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_the_penalty_is_as_strong_where_a_fused_step_divides_by_the_scale_itself(fused):
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([{"params": [weight], "l1": 0.5}], lr=1.0, fused=fused)
    penalize_l1(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((weight * 0).sum()).backward()
    scaler.step(optimizer)
    assert_close(weight.detach(), torch.full((4,), 0.5))


def test_the_soft_threshold_is_apart_from_the_gradient_and_makes_exact_zeros():
    theta, found, free = run(soft_threshold, 2.0)
    for i, after in enumerate(found):
        half = theta * (1 - 0.01 * 0.2) - 0.01 * adam_direction(GRADIENTS[: i + 1])
        theta = half.sign() * (half.abs() - 0.01 * 2.0).clamp(min=0)
        assert_close(after, theta, rtol=1e-10, atol=1e-14)
    assert after[3] == 0
    assert (free != 0).sum() == 3, "a group without l1 is left alone"


def test_weights_without_a_gradient_are_left_alone():
    weight = nn.Parameter(float64(1.0))
    for hook in (penalize_l1, soft_threshold):
        optimizer = torch.optim.AdamW([{"params": [weight], "l1": 0.5}], lr=0.1)
        handle = hook(optimizer)
        optimizer.step()
        assert weight.item() == 1.0
        weight.grad = float64(0.0)
        handle.remove()
        optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        assert weight.item() == 1.0, "a handle that was removed still acts"
        weight.grad = None


def test_a_closure_is_refused_where_it_would_miss_the_penalty():
    weight = nn.Parameter(float64(1.0))
    optimizer = torch.optim.AdamW([{"params": [weight], "l1": 0.5}], lr=0.1)
    penalize_l1(optimizer)
    with pytest.raises(RuntimeError, match="step without one"):
        optimizer.step(lambda: 0.0)
    optimizer.step(None)
