"""The class for trainers that make their own groups: matrices mirrored, vectors not, checkpoints as torchtitan's."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from horst import HORST
from horst.integrations.matrices import MatrixHORST


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv1d(1, 2, 3), nn.Linear(4, 2)).double()


def train(model, optimizer, first=0, steps=5):
    for k in range(first, first + steps):
        x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("foreach", [False, True])
def test_matrices_get_horsts_step_and_vectors_adamws(foreach):
    ours, by_hand = make_model(), make_model()
    train(ours, MatrixHORST(ours.parameters(), lr=0.02, weight_decay=0.1, alpha=5.0, beta=0.1, foreach=foreach))
    matrices = {"params": [p for p in by_hand.parameters() if p.ndim >= 2], "alpha": 5.0, "beta": 0.1}
    vectors = {"params": [p for p in by_hand.parameters() if p.ndim < 2], "alpha": 0.0}
    train(by_hand, HORST([matrices, vectors], lr=0.02, weight_decay=0.1, foreach=foreach))
    for (name, p), q in zip(ours.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_flattened_state_goes_on_exactly():
    """Torchtitan saves optimizers by parameter names, so that they load on any number of ranks."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = make_model()
    optimizer = MatrixHORST(model.parameters(), lr=0.02, alpha=7.0)
    train(model, optimizer)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert state["param_groups.0.weight.alpha"] == 7.0
    other = copy.deepcopy(model)
    resumed = MatrixHORST(other.parameters())
    set_optimizer_state_dict(other, resumed, optim_state_dict=state, options=options)
    train(model, optimizer, first=5)
    train(other, resumed, first=5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
