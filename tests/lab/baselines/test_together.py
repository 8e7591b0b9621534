"""Together: several optimizers as one."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import horst
from horst.lab.baselines.together import Together


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    parts = (
        horst.with_mirror_step(torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), alpha=5.0),
        horst.HORST([{"params": vectors[:1], "lr": 0.03}, {"params": vectors[1:]}], lr=0.01, alpha=5.0),
    )
    return model, parts


def train(model, optimizers, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def weights(model):
    return [p.detach() for p in model.parameters()]


def test_together_steps_as_its_parts_do():
    model, parts = make()
    train(model, [Together(*parts)], 5)
    other, apart = make()
    train(other, apart, 5)
    assert_close(weights(model), weights(other), rtol=0, atol=0)


def test_a_scheduler_moves_every_part():
    model, parts = make()
    optimizer = Together(*parts)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(model, [optimizer], 1)
    scheduler.step()
    assert [group["lr"] for part in parts for group in part.param_groups] == [0.01, 0.015, 0.005]


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_training_goes_on_from_a_saved_state(how):
    model, parts = make()
    optimizer = Together(*parts)
    train(model, [optimizer], 3)
    if how == "state_dict":
        resumed, fresh = make(seed=1)
        resumed.load_state_dict(model.state_dict())
        going_on = Together(*fresh)
        going_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif how == "pickle":
        resumed, going_on = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        resumed, going_on = copy.deepcopy((model, optimizer))
    train(model, [optimizer], 3, first=3)
    train(resumed, [going_on], 3, first=3)
    assert_close(weights(resumed), weights(model), rtol=0, atol=0)
    assert len(going_on.state) == len(optimizer.state) == 4


def test_a_closure_is_called_once_and_its_loss_returned():
    model, parts = make()
    optimizer, calls = Together(*parts), []

    def closure():
        calls.append(1)
        loss = model(torch.ones(2, 4, dtype=torch.float64)).square().sum()
        loss.backward()
        return loss

    before = [w.clone() for w in weights(model)]
    assert optimizer.step(closure) > 0
    assert len(calls) == 1
    assert all((a != b).any() for a, b in zip(before, weights(model), strict=True))


def test_what_cannot_be_meant_is_refused():
    model, parts = make()
    with pytest.raises(TypeError, match="Together takes torch optimizers, got 3"):
        Together(3)
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        Together(torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters()))
    with pytest.raises(RuntimeError, match="cannot tell which of its optimizers a new group is for"):
        Together(*parts).add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
