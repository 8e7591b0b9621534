"""The diagonal network: its product, its gradients, its balance."""

import pytest
import torch
from torch.testing import assert_close

from horst.lab.models.diagonal import DiagonalNetwork, factor_gradients, product


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_factor_gradients_are_autograds(depth):
    factors = torch.randn(3, depth, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[0, 0, 0] = 0.0  # division by a factor would fail here
    factors.requires_grad_()
    g = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((product(factors) * g).sum(), factors)[0]
    assert_close(factor_gradients(factors.detach(), g), expected)


def test_the_network_is_linear_with_the_product_as_weights():
    model = DiagonalNetwork(4, depth=3, init=0.5)
    assert_close(model.theta(), torch.full((4,), 0.5))
    x = torch.arange(8.0).reshape(2, 4)
    assert_close(model(x), x @ model.theta())
    model(x).sum().backward()
    assert model.factors.grad.shape == (3, 4)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        DiagonalNetwork(4, depth=0)
    with pytest.raises(ValueError, match="init must be positive, got -1"):
        DiagonalNetwork(4, init=-1.0)
