"""What a step remembers of its groups, and when it looks again."""

import pytest
import torch
from torch import nn

from horst import HAM, HORST


def weights():
    return [nn.Parameter(torch.tensor([1.0 + i])) for i in range(3)]


def reverse(params):
    params.reverse()


def replace_the_first(params):
    params[0] = nn.Parameter(torch.tensor([5.0]))


@pytest.mark.parametrize("change", [reverse, replace_the_first])
@pytest.mark.parametrize("cls", [HORST, HAM])
def test_a_list_of_parameters_that_is_changed_in_place_keeps_each_weights_moments(cls, change):
    ours, theirs = weights(), weights()
    optimizers = cls(ours, lr=0.1, alpha=0.0, beta=0.0), torch.optim.AdamW(theirs, lr=0.1)
    lists = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
    for k in range(4):
        if k == 2:
            for params in lists:
                change(params)
        for params in lists:
            for p in params:  # gradients of different sizes, by weight
                p.grad = 0.1 ** p.detach().round() * (-1) ** k
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(*lists, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
