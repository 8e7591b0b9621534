"""The diagonal network: its product and its gradients."""

import pytest
import torch
from torch.testing import assert_close

from horst.lab.models.diagonal import factor_gradients, product


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_factor_gradients_are_autograds(depth):
    factors = torch.randn(3, depth, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[0, 0, 0] = 0.0  # division by a factor would fail here
    factors.requires_grad_()
    g = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad((product(factors) * g).sum(), factors)[0]
    assert_close(factor_gradients(factors.detach(), g), expected)
