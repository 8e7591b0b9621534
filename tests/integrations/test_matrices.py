"""The class for trainers that make their own groups: matrices mirrored, vectors not, checkpoints as torchtitan's."""

import copy
import pickle

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


def mixed(model, *, cls=MatrixHORST, **options):
    """One group that brings its alpha, vectors among it, and one that does not."""
    decided, rest = list(model[:2].parameters()), list(model[2:].parameters())
    return cls([{"params": rest}, {"params": decided, "alpha": 3.0}], lr=0.02, **options)


def stepped_by_hand():
    model = make_model()
    decided, rest = list(model[:2].parameters()), list(model[2:].parameters())
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "alpha": 5.0},
        {"params": [p for p in rest if p.ndim < 2], "alpha": 0.0},
        {"params": decided, "alpha": 3.0},
    ]
    return train(model, HORST(groups, lr=0.02))


def copied(model, optimizer):
    return copy.deepcopy((model, optimizer))  # together, so that the copy steps the copied model


def pickled(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def loaded_from_adamw(model, optimizer):
    optimizer.load_state_dict(mixed(model, cls=torch.optim.AdamW).state_dict())
    optimizer.param_groups[0]["weight_decay"] = optimizer.param_groups[1]["weight_decay"] = 1e-2
    return model, optimizer


def loaded(model, optimizer):
    other = mixed(model)
    other.load_state_dict(optimizer.state_dict())
    return model, other


@pytest.mark.parametrize("change", [None, copied, pickled, loaded, loaded_from_adamw])
def test_a_group_with_its_own_alpha_is_mirrored_whole(change):
    model = make_model()
    optimizer = mixed(model)
    if change is not None:
        model, optimizer = change(model, optimizer)
    assert optimizer.param_groups[1]["alpha"] == 3.0
    train(model, optimizer)
    for (name, p), q in zip(model.named_parameters(), stepped_by_hand().parameters(), strict=True):
        assert torch.equal(p, q), name


def test_groups_without_an_alpha_are_those_of_horst():
    """Checkpoints by parameter names have an entry for each option: none is added where nothing was decided."""
    ours, horst = (cls(make_model().parameters()).param_groups[0] for cls in (MatrixHORST, HORST))
    assert ours.keys() == horst.keys()


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
