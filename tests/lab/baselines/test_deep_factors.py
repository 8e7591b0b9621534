"""Weights as products of factors: spred and deep weight factorisation."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.balanced_product import SignIn
from horst.lab.baselines.deep_factors import DeepFactors
from horst.operators import L1, Adam, HyperbolicEntropy, Identity, Mirror, Steepest
from horst.sparsity import ACDC, RigL, Static, acdc_steps, rigl_steps


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def adam_direction(history, betas=(0.9, 0.999), eps=1e-8):
    """Adam's bias-corrected direction after the gradients in ``history``."""
    m = v = torch.zeros_like(history[0])
    for g in history:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
    steps = len(history)
    return m / (1 - betas[0] ** steps) / ((v / (1 - betas[1] ** steps)).sqrt() + eps)


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_every_factor_takes_adamws_step(depth):
    theta, gradients = normal(3, 4), [normal(3, 4, seed=k) for k in range(1, 6)]
    weight = nn.Parameter(theta.clone())
    optimizer = DeepFactors([weight], lr=0.01, weight_decay=0.5, depth=depth)
    scale = theta.square().mean().sqrt() ** (1 / depth)
    factors = [theta / scale ** (depth - 1), *[scale * torch.ones_like(theta)] * (depth - 1)]
    histories = [[] for _ in factors]
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        product = torch.stack(factors).prod(0)
        for history, f in zip(histories, factors, strict=True):
            history.append(g * product / f)
        steps = [adam_direction(history) for history in histories]
        factors = [f * (1 - 0.01 * 0.5) - 0.01 * step for f, step in zip(factors, steps, strict=True)]
        assert_close(weight.detach(), torch.stack(factors).prod(0), rtol=1e-9, atol=1e-12)


def test_the_factors_are_alike_in_scale_and_the_weights_keep_their_start():
    weight = nn.Parameter(normal(20, 20))
    start = weight.detach().clone()
    optimizer = DeepFactors([weight], lr=0.0, depth=3)
    weight.grad = torch.ones_like(start)
    optimizer.step()
    assert_close(weight.detach(), start, rtol=1e-14, atol=0)
    scales = optimizer.state[weight]["factors"].square().mean((1, 2)).sqrt()
    assert_close(scales, scales[0].expand(3))


def test_signs_can_change():
    start = normal(5, 3)
    weight = nn.Parameter(start.clone())
    optimizer = DeepFactors([weight], lr=0.03)
    for _ in range(400):
        optimizer.zero_grad()
        (weight + start).square().sum().backward()  # the optimum is the weight with its sign turned
        optimizer.step()
    assert torch.equal(weight.detach().sign(), -start.sign())


def gradient_descent(a, penalty, depth, start, steps=4000, lr=0.1):
    weight = nn.Parameter(start.clone())
    optimizer = DeepFactors([weight], lr=lr, weight_decay=penalty, operator=Identity(), depth=depth)
    for _ in range(steps):
        weight.grad = weight.detach() - a
        optimizer.step()
    return weight.detach()


def test_the_minimiser_of_spred_is_that_of_the_l1_penalty():
    a, l1 = float64(0.5, -0.4, 0.05, -0.02), 0.1
    found = gradient_descent(a, l1, depth=2, start=float64(0.3, 0.2, -0.3, 0.1))
    assert_close(found, a.sign() * (a.abs() - l1).clamp(min=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [3, 4])
def test_the_minimiser_of_more_factors_is_that_of_the_l_2_over_d_penalty(depth):
    """Of (w - a)^2 / 2 + (D / 2) penalty |w|^(2 / D), found on a grid; it is not convex, so from a start nearby."""
    a, penalty = float64(2.0, -1.5, 0.02, -0.01), 0.05
    grid = torch.linspace(-2.5, 2.5, 2_500_001, dtype=torch.float64)
    best = []
    for value in a:
        objective = (grid - value).square() / 2 + depth / 2 * penalty * grid.abs() ** (2 / depth)
        best.append(grid[objective.argmin()])
    found = gradient_descent(a, penalty, depth, start=a)
    assert_close(found, torch.stack(best), rtol=0, atol=3e-6)
    assert float(found[2:].abs().max()) < 1e-6
    l1 = a.sign() * (a.abs() - penalty).clamp(min=0)
    assert bool((found[:2].abs() > l1[:2].abs()).all()), "large weights shrink less than under L1"


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_drawn_factors_are_truncated_and_their_products_are_the_weights(depth):
    torch.manual_seed(0)
    sigma, smallest = 0.1, 3e-3
    weight = nn.Parameter(sigma * normal(200, 200))
    optimizer = DeepFactors([weight], lr=1e-3, depth=depth)
    optimizer.draw(smallest)
    factors = optimizer.state[weight]["factors"]
    assert_close(factors.prod(0), weight.detach(), rtol=0, atol=0)
    size = factors.abs()
    deviation = float(weight.detach().std())
    assert float(size.min()) > smallest ** (1 / depth)
    assert float(size.max()) < (2 * sigma * 1.02) ** (1 / depth)
    assert sigma / 3 < deviation < 1.2 * sigma
    assert abs(float((factors > 0).double().mean()) - 0.5) < 0.01, "signs are even"
    before = factors.clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert_close(optimizer.state[weight]["factors"], before, rtol=0, atol=0)


def test_weights_that_are_too_large_to_be_drawn_are_refused():
    with pytest.raises(ValueError, match="too large to be drawn"):
        DeepFactors([nn.Parameter(100 * normal(5, 5))]).draw(smallest=10.0)


def test_to_first_order_two_factors_take_the_mirror_step_of_the_hyperbolic_entropy():
    theta, g = normal(50), normal(50, seed=1)
    weight = nn.Parameter(theta.clone())
    errors = []
    for lr in (1e-3, 1e-4):
        weight.data = theta.clone()
        optimizer = DeepFactors([weight], lr=lr, operator=Identity())
        weight.grad = g.clone()
        optimizer.step()
        U, V = theta / theta.square().mean().sqrt().sqrt(), theta.square().mean().sqrt().sqrt()
        gamma = (U**2 - V**2).abs() / 2  # a geometry for each weight: factors keep this difference
        flow = torch.stack([Mirror(HyperbolicEntropy(float(c)))(t, d) for c, t, d in zip(gamma, theta, g, strict=True)])
        errors.append(float((weight.detach() - (theta - 2 * lr * flow)).abs().max()))
    assert errors[1] == pytest.approx(errors[0] / 100, rel=0.01), "the difference is of second order"


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def random_masks(model, optimizer):
    names = {f"blocks.{i}.0.weight": model.blocks[i][0].weight for i in range(3)}
    return Static(model, optimizer, masks={name: torch.rand(w.shape) < 0.5 for name, w in names.items()})


METHODS = {
    "acdc": lambda model, optimizer: ACDC(model, optimizer, sparsity=0.5, schedule=acdc_steps(60)),
    "rigl": lambda model, optimizer: RigL(model, optimizer, sparsity=0.5, schedule=rigl_steps(60, every=5)),
    "random": random_masks,
}


@pytest.mark.parametrize("make", [lambda p: SignIn(p, lr=0.01, every=7), lambda p: DeepFactors(p, lr=0.01, depth=3)])
@pytest.mark.parametrize("method", METHODS)
def test_masks_work_as_with_any_optimizer(method, make):
    torch.manual_seed(0)
    model = Blocks()
    optimizer = make(model.parameters())
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    losses, seen = [], torch.zeros(8, 8, dtype=torch.bool)
    with METHODS[method](model, optimizer) as sparsifier:
        for _ in range(60):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            sparsifier.step()
            losses.append(loss.item())
            seen |= model.blocks[0][0].weight.detach() != 0
        for i in range(3):
            weight, mask = model.blocks[i][0].weight.detach(), sparsifier.masks[f"blocks.{i}.0.weight"]
            assert torch.equal(weight != 0, mask)
    assert losses[-1] < 0.7 * losses[0]
    if method != "random":
        assert seen.sum() > (model.blocks[0][0].weight != 0).sum(), "what was pruned has come back in between"


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_keep_the_operator(clone):
    weight = nn.Parameter(normal(3))
    other, optimizer = clone((weight, DeepFactors([weight], lr=0.1, operator=Identity(), depth=3)))
    assert optimizer.operator == Identity()
    other.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert (other != weight).all()


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="depth must be at least 2, got 1"):
        DeepFactors([nn.Parameter(torch.ones(2))], depth=1)
    with pytest.raises(ValueError, match="use an elementwise one, such as Adam"):
        DeepFactors([nn.Parameter(torch.ones(2))], operator=Steepest(L1()) @ Adam())
