"""Scion: its formula, and the norms of its steps."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.scion import Scion


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(theta, gradients, **options):
    weight = nn.Parameter(theta.clone())
    optimizer = Scion([weight], **options)
    found = []
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        found.append(weight.detach().clone())
    return found


def test_every_step_is_the_formula():
    theta, gradients, m = normal(6, 4), [normal(6, 4, seed=k) for k in range(1, 6)], torch.zeros(6, 4)
    found = run(theta, gradients, lr=0.01, momentum=0.3, radius=5.0)
    for g, after in zip(gradients, found, strict=True):
        m = 0.7 * m + 0.3 * g
        U, _, Vh = torch.linalg.svd(m, full_matrices=False)
        theta = (1 - 0.01) * theta - 0.01 * 5.0 * (6 / 4) ** 0.5 * U @ Vh
        assert_close(after, theta, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 5)])
def test_the_update_of_a_matrix_has_the_spectral_norm_it_says(shape):
    theta, lr, radius = normal(*shape), 0.02, 7.0
    (after,) = run(theta, [normal(*shape, seed=1) * 1e-3], lr=lr, radius=radius)
    moved = after - (1 - lr) * theta
    values = torch.linalg.svdvals(moved)
    assert_close(values, torch.full_like(values, lr * radius * (shape[0] / shape[1]) ** 0.5))


def test_the_update_of_the_head_has_equal_entries():
    theta, g = normal(4, 10), normal(4, 10, seed=1)
    (after,) = run(theta, [g], lr=0.01, radius=3000.0, sign=True)
    assert_close(after, 0.99 * theta - 0.01 * 3000 / 10 * g.sign())


def test_weights_end_inside_the_ball():
    theta = 100 * normal(4, 4)
    last = run(theta, [normal(4, 4, seed=k) for k in range(1, 201)], lr=0.1, radius=2.0)[-1]
    assert float(torch.linalg.matrix_norm(last, 2)) <= 2.0 + 1e-6


def test_vectors_are_refused():
    optimizer = Scion([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=r"Scion steps matrices, got shape \(3,\)\. Give vectors to AdamW"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
