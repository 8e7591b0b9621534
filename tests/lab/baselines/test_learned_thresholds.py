"""STR: the formula and its gradients in float64, and thresholds that learn."""

import pytest
import torch
from torch import nn

from horst.lab.baselines.learned_thresholds import learn_thresholds, merge_thresholds


def test_forward_and_gradients_are_those_of_the_formula():
    torch.manual_seed(0)
    model = nn.Linear(6, 4, bias=False).double()
    theta = model.weight.detach().clone()
    learn_thresholds(model, [model.weight], initial=-2.0)
    threshold = 1 / (1 + torch.exp(torch.tensor(2.0, dtype=torch.float64)))
    kept = theta.abs() > threshold
    assert 0 < int(kept.sum()) < kept.numel()
    torch.testing.assert_close(model.weight, torch.where(kept, theta - threshold * theta.sign(), 0))
    g = torch.randn(4, 6, dtype=torch.float64)
    (model.weight * g).sum().backward()
    original, s = model.parametrizations.weight.original, model.parametrizations.weight[0].s
    torch.testing.assert_close(original.grad, g * kept)
    torch.testing.assert_close(s.grad, -threshold * (1 - threshold) * (g * theta.sign() * kept).sum())


def test_decay_raises_the_threshold_until_weights_are_zero_and_they_stay_so_when_merged():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    learn_thresholds(model, [model[0].weight], initial=-10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.05)
    thresholds = []
    for step in range(300):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()
        thresholds.append(float(model[0].parametrizations.weight[0].s.detach().sigmoid()))
    assert thresholds[0] < 1e-4 < 1e-2 < thresholds[-1]
    zeros = int((model[0].weight == 0).sum())
    assert 20 < zeros < 128
    x = torch.randn(4, 8)
    before = model(x)
    merge_thresholds(model)
    assert isinstance(model[0].weight, nn.Parameter)
    assert int((model[0].weight == 0).sum()) == zeros
    assert torch.equal(model(x), before)


def test_a_tensor_that_is_no_weight_is_refused():
    with pytest.raises(ValueError, match="1 of the tensors are not called weight in any module"):
        learn_thresholds(nn.Linear(2, 2), [torch.zeros(2)])
