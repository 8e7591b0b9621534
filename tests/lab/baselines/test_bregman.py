"""LinBreg and AdaBreg: their formula, mirror descent underneath, sparse starts, and the target sparsity."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from horst.lab.baselines.bregman import LinBreg, sparse_start
from horst.operators import Adam, ElasticNet


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def soft(x, t):
    return x.sign() * (x.abs() - t).clamp(min=0)


def run(theta, gradients, *arguments, **options):
    weight = nn.Parameter(theta.clone())
    optimizer = LinBreg([weight], *arguments, **options)
    found = []
    for g in gradients:
        weight.grad = g.clone()
        optimizer.step()
        found.append(weight.detach().clone())
    return found, optimizer.state[weight]


THETA = torch.tensor([0.5, -0.3, 0.0, 0.0, 0.01], dtype=torch.float64)
GRADIENTS = [normal(5, seed=k) for k in range(1, 9)]


@pytest.mark.parametrize("operator", [None, Adam((0.9, 0.99))])
def test_every_step_is_the_formula(operator):
    found, _ = run(THETA, GRADIENTS, 0.1, operator, l1=0.2, delta=0.5, sparsity=0.6, rate=0.3)
    v, l1, state = THETA / 0.5 + 0.2 * THETA.sign(), 0.2, operator.init(THETA) if operator else {}
    for g, after in zip(GRADIENTS, found, strict=True):
        if operator:
            g, state = operator.update(v, g, state)
        v = v - 0.1 * g
        zeros = float((soft(0.5 * v, 0.5 * l1) == 0).double().mean())
        l1 = l1 * torch.exp(torch.tensor(0.3 * (0.6 - zeros), dtype=torch.float64))
        assert_close(after, soft(0.5 * v, 0.5 * l1), rtol=1e-11, atol=1e-14)


def test_it_is_mirror_descent_with_the_elastic_net():
    potential = ElasticNet(l1=0.2, delta=0.5)
    (first, *_, last), _ = run(THETA, GRADIENTS, 0.1, l1=0.2, delta=0.5)
    assert_close(first, potential.step(THETA, GRADIENTS[0], 0.1), rtol=1e-13, atol=1e-15)
    dual = potential.gradient(THETA) - 0.1 * torch.stack(GRADIENTS).sum(0)
    assert_close(last, potential.inverse_gradient(dual), rtol=1e-11, atol=1e-13)


def test_it_starts_empty_and_grows_the_support_that_is_needed():
    X = torch.linalg.qr(normal(40, 20))[0] * 40**0.5  # each gradient is that weight's own distance
    truth = torch.zeros(20, dtype=torch.float64)
    truth[[2, 7, 11]] = torch.tensor([2.0, -1.5, 1.0], dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(20, dtype=torch.float64))
    optimizer = LinBreg([weight], lr=0.1, l1=3.0)
    supports = [set()]
    for _ in range(1500):
        optimizer.zero_grad()
        ((X @ (weight - truth)).square().mean() / 2).backward()
        optimizer.step()
        support = set(weight.nonzero().flatten().tolist())
        if support != supports[-1]:
            supports.append(support)
    assert supports[:4] == [set(), {2}, {2, 7}, {2, 7, 11}], "largest first, and nothing that is not needed"
    assert supports[-1] == {2, 7, 11}
    assert_close(weight.detach(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("target", [0.5, 0.9])
@pytest.mark.parametrize("density", [0.02, 1.0])
def test_adabreg_reaches_its_target_sparsity(target, density):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    weights = [model[0].weight, model[2].weight]
    sparse_start(weights, density)
    optimizer = LinBreg(weights, 3e-3, Adam(), l1=0.01, sparsity=target)
    x = torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    losses = []
    for _ in range(600):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    zeros = torch.cat([w.flatten() for w in weights]) == 0
    assert float(zeros.float().mean()) == pytest.approx(target, abs=0.05)
    assert losses[-1] < 0.5 * losses[0]


def test_the_threshold_is_saved_with_the_state():
    found, _ = run(THETA, GRADIENTS, 0.1, Adam(), l1=0.2, sparsity=0.6)
    weight = nn.Parameter(THETA.clone())
    optimizer = LinBreg([weight], 0.1, Adam(), l1=0.2, sparsity=0.6)
    for g in GRADIENTS:
        weight.grad = g.clone()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = LinBreg([weight], 0.1, Adam(), l1=0.2, sparsity=0.6)
        optimizer.load_state_dict(saved)
    assert_close(weight.detach(), found[-1], rtol=0, atol=0)


def test_a_masked_weight_starts_from_zero_again():
    weight = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = LinBreg([weight], lr=0.1, l1=0.25)
    for step in range(4):
        weight.grad = torch.tensor([-1.0, -1.0], dtype=torch.float64)
        optimizer.step()
        if step == 0:
            with torch.no_grad():
                weight[0] = 0.0
    assert_close(weight.detach(), torch.tensor([0.05, 1.4], dtype=torch.float64))


def test_a_sparse_start_keeps_a_share_of_the_weights_and_their_size():
    torch.manual_seed(0)
    weight = torch.randn(300, 300)
    before = weight.clone()
    sparse_start([weight], 0.25)
    assert float((weight != 0).float().mean()) == pytest.approx(0.25, abs=0.01)
    assert_close(weight[weight != 0], 2 * before[weight != 0])
    with pytest.raises(ValueError, match=r"density must lie in \(0, 1\], got 0"):
        sparse_start([weight], 0.0)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="sparsity must lie in"):
        LinBreg([nn.Parameter(torch.ones(2))], sparsity=1.0)
    with pytest.raises(ValueError, match="delta must be above 0"):
        LinBreg([nn.Parameter(torch.ones(2))], delta=0.0)
