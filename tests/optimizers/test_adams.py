"""AdamS against its formula in float64; without masks it is AdamW."""

import copy
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import horst
from horst import AdamS
from horst.sparsity import Static


def reference(theta, grads, mask, *, lr, betas, eps, weight_decay, steps, pull):
    """The formula, weight by weight where it differs."""
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    beta1, beta2 = betas
    for t, g in enumerate(grads, start=1):
        m = beta1 * m + (1 - beta1) * g
        mu = m / (1 - beta1**t)
        share = min(t / steps, 1.0)
        pulled = (1 - share) * mu + share * pull * theta.sign()
        mu = torch.where(mask, mu, pulled)
        v = beta2 * v + (1 - beta2) * torch.where(mask, g, pulled) ** 2
        theta = theta - lr * mu / ((v / (1 - beta2**t)).sqrt() + eps) - lr * weight_decay * theta
    return theta


def step_with(optimizer, weight, grads):
    for g in grads:
        weight.grad = g.clone()
        optimizer.step()
    return weight.detach()


@given(
    seed=st.integers(0, 10**6),
    taken=st.integers(1, 12),
    steps=st.integers(1, 15),
    pull=st.sampled_from([0.0, 4e-7, 0.1, 3.0]),
    beta2=st.sampled_from([0.95, 0.999]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_it_is_the_formula(seed, taken, steps, pull, beta2):
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    grads = torch.randn(taken, 5, 7, dtype=torch.float64, generator=generator)
    mask = torch.rand(5, 7, generator=generator) < 0.5
    options = {"lr": 0.03, "betas": (0.9, beta2), "eps": 1e-8, "weight_decay": 0.1, "steps": steps, "pull": pull}
    weight = nn.Parameter(theta.clone())
    optimizer = AdamS([weight], **options)
    optimizer.set_pull_masks({weight: mask})
    expected = reference(theta, grads, mask, **options)
    torch.testing.assert_close(step_with(optimizer, weight, grads), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mask", [None, torch.ones(5, 7, dtype=torch.bool)], ids=["none", "all kept"])
def test_with_nothing_outside_it_is_adamw(mask):
    torch.manual_seed(0)
    grads = torch.randn(9, 5, 7, dtype=torch.float64)
    ours, theirs = (nn.Parameter(torch.ones(5, 7, dtype=torch.float64)) for _ in range(2))
    optimizer = AdamS([ours], lr=0.01, weight_decay=0.1, steps=5, pull=1.0)
    optimizer.set_pull_masks({ours: mask})
    expected = step_with(torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1), theirs, grads)
    torch.testing.assert_close(step_with(optimizer, ours, grads), expected, rtol=1e-12, atol=1e-14)


def test_what_is_left_outside_has_the_size_of_the_last_steps():
    """The known behaviour: at the end each step moves a weight by lr, whatever the pull is."""
    left = []
    for pull in (4e-7, 4e-3):
        weight = nn.Parameter(torch.tensor([0.5, -0.3, 0.2]))
        optimizer = AdamS([weight], lr=0.01, weight_decay=0.0, betas=(0.9, 0.95), steps=100, pull=pull)
        optimizer.set_pull_masks({weight: torch.tensor([False, False, False])})
        for _ in range(400):
            weight.grad = torch.zeros(3)
            optimizer.step()
        left.append(weight.detach().abs().max().item())
    assert all(0 < size <= 0.0101 for size in left)


def test_half_precision_weights_are_refused_and_autocast_is_named():
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match=r"float32 or float64 weights, got one of torch\.\w+ .* torch\.autocast"):
            AdamS([nn.Parameter(torch.ones(2, dtype=dtype))], steps=10)


def test_param_groups_and_named_parameters_keep_the_pull():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for params in (horst.param_groups(model, weight_decay=0.1), model.named_parameters()):
        optimizer = AdamS(params, steps=10, pull=0.5)
        assert all(group["pull"] == 0.5 and group["steps"] == 10 for group in optimizer.param_groups)


def test_frozen_weights_may_be_half_precision_or_integers():
    frozen = [nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False) for dtype in (torch.bfloat16, torch.uint8)]
    AdamS([nn.Parameter(torch.ones(2)), *frozen], steps=10).step()


def test_a_state_of_adamw_goes_on_with_the_options_of_the_groups():
    weight = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([weight], lr=0.01)
    step_with(adamw, weight, torch.ones(2, 3))
    optimizer = AdamS([{"params": [weight], "pull": 0.5}], steps=10)
    optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
    step_with(optimizer, weight, torch.ones(1, 3))
    assert optimizer.state[weight]["step"] == 3
    assert [optimizer.param_groups[0][key] for key in ("lr", "pull", "steps")] == [0.01, 0.5, 10]


def test_other_methods_of_sparsity_mask_it_as_they_mask_adamw():
    """It must not pass for an optimizer that zeroes masked weights itself."""
    model = nn.Linear(8, 8)
    optimizer = AdamS(model.parameters(), lr=0.1, steps=10)
    sparsifier = Static(model, optimizer, sparsity=0.5, layers="all_linear")
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()
    sparsifier.step()
    assert int((model.weight == 0).sum()) == 32


def test_masks_of_other_shapes_types_and_parameters_are_refused():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = AdamS([weight], steps=10)
    with pytest.raises(ValueError, match=r"shaped like its weight \(2, 3\), got torch.bool of shape \(6,\)"):
        optimizer.set_pull_masks({weight: torch.ones(6, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"boolean tensor .* got torch.float32"):
        optimizer.set_pull_masks({weight: torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"shape \(4,\) is for a parameter that is not in this optimizer"):
        optimizer.set_pull_masks({nn.Parameter(torch.ones(4)): None})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"steps": 0}, ValueError, "steps must be the number of training steps, at least 1, got 0"),
        ({"steps": 1.5}, ValueError, "at least 1, got 1.5"),
        ({"pull": -1e-7}, ValueError, "pull must be a number of at least 0, got -1e-07; 4e-7 is CAST's"),
        ({"pull": math.nan}, ValueError, "pull must be a number of at least 0, got nan"),
        ({"lr": -1.0}, ValueError, "lr must be a number of at least 0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must lie in \[0, 1\), got 1.0"),
        ({"eps": math.inf}, ValueError, "eps must be a number of at least 0"),
        ({"weight_decay": "0.1"}, TypeError, "weight_decay must be a number of at least 0"),
        ({"maximize": 1}, TypeError, "maximize must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused_in_the_class_and_in_groups(options, error, text):
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=text):
        AdamS([weight], **{"steps": 10, **options})
    with pytest.raises(error, match=text):
        AdamS([{"params": [weight], **options}], steps=10)


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients, got torch\.sparse_coo .* sparse=False"):
        AdamS(embedding.parameters(), steps=10).step()


def test_a_compiled_step_is_the_plain_one():
    torch.manual_seed(0)
    grads = torch.randn(6, 4, 4)
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))
        optimizer = AdamS([weight], lr=0.05, steps=4, pull=0.1)
        optimizer.set_pull_masks({weight: torch.eye(4, dtype=torch.bool)})
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for g in grads:
            weight.grad = g.clone()
            step()
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
