"""OperatorOptimizer: any operator as a torch optimizer, through the battery every optimizer must pass."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch.testing import assert_close

from horst.operators import (
    L1,
    L2,
    Adam,
    CoshEntropy,
    Entropy,
    HyperbolicEntropy,
    Identity,
    LInf,
    Lp,
    Mirror,
    Spectral,
    Steepest,
)
from horst.optimizers.operator_optimizer import OperatorOptimizer

OPERATORS = {
    "sgd": Identity(),
    "sign": Steepest(LInf()),
    "coordinate": Steepest(L1()),
    "normalised": Steepest(L2()),
    "exp-sgd": Mirror(Entropy()),
    "cosh": Mirror(CoshEntropy()),
    "adam": Adam(),
    "exp-adam": Mirror(Entropy()) @ Adam(),
    "adam-exp": Adam() @ Mirror(Entropy()),
    "normalised-adam": Steepest(L2()) @ Adam(),
    "two-memories": Adam() @ Mirror(HyperbolicEntropy(0.1)) @ Adam(),
    "sum": Adam() + 0.5 * Steepest(Lp(3)),
}


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3), (5,), (), (2, 1, 3)]
    return [torch.nn.Parameter(0.5 + torch.rand(shape, generator=generator, dtype=dtype)) for shape in shapes]


def loss_of(params):
    return sum(((p - 0.25) ** 2).sum() for p in params)


def train(params, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(params).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPERATORS)
def test_descends(name):
    params = parameters()
    before = float(loss_of(params).detach())
    train(params, OperatorOptimizer(params, OPERATORS[name], lr=0.02), 100)
    assert float(loss_of(params).detach()) < 0.7 * before


def test_sgd_and_adam_are_torchs():
    for operator, reference in ((Identity(), torch.optim.SGD), (Adam(), torch.optim.Adam)):
        ours, theirs = parameters(), parameters()
        train(ours, OperatorOptimizer(ours, operator, lr=0.05), 20)
        train(theirs, reference(theirs, lr=0.05), 20)
        for p, q in zip(ours, theirs, strict=True):
            assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_decoupled_weight_decay_is_adamws():
    ours, theirs = parameters(), parameters()
    train(ours, OperatorOptimizer(ours, Adam(), lr=0.05, weight_decay=0.1), 20)
    train(theirs, torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1), 20)
    for p, q in zip(ours, theirs, strict=True):
        assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_the_exact_step_of_exp_sgd_by_hand():
    p = torch.nn.Parameter(torch.tensor([2.0, -3.0, 0.0], dtype=torch.float64))
    p.grad = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    OperatorOptimizer([p], Mirror(Entropy()), lr=0.1, exact_mirror=True).step()
    before = torch.tensor([2.0, -3.0, 0.0], dtype=torch.float64)
    assert_close(p.detach(), before * torch.exp(-0.1 * before.sign()))


def test_a_tensor_is_one_vector_and_a_matrix_norm_sees_the_matrix():
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    p.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    OperatorOptimizer([p], Steepest(L2()), lr=1.0).step()
    assert_close(1 - p.detach(), p.grad / 5)  # one norm over all four entries, not one a row
    q = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    q.grad = p.grad.clone()
    OperatorOptimizer([q], Steepest(Spectral()), lr=1.0).step()
    assert_close(1 - q.detach(), torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("name", OPERATORS)
def test_state_dict_round_trip_continues_bit_by_bit(name):
    params = parameters()
    optimizer = OperatorOptimizer(params, OPERATORS[name], lr=0.01)
    train(params, optimizer, 5)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    restored = OperatorOptimizer(copies, OPERATORS[name], lr=0.5)
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    train(params, optimizer, 5)
    train(copies, restored, 5)
    for p, q in zip(params, copies, strict=True):
        assert_close(p, q, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["exp-adam", "two-memories"])
def test_counters_survive_a_bfloat16_checkpoint(name):
    params = parameters(torch.bfloat16)
    optimizer = OperatorOptimizer(params, OPERATORS[name], lr=1e-4)
    train(params, optimizer, 259)
    restored = OperatorOptimizer(parameters(torch.bfloat16), OPERATORS[name])
    restored.load_state_dict(optimizer.state_dict())
    counters = [v for s in restored.state.values() for k, v in s.items() if k.endswith("step")]
    assert counters
    assert all(float(counter) == 259 and counter.dtype == torch.float32 for counter in counters)


def test_loading_does_not_share_counters_with_the_checkpoint():
    params = parameters()
    optimizer = OperatorOptimizer(params, Adam(), lr=0.01)
    train(params, optimizer, 3)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(params, optimizer, 1)
    assert float(saved["state"][0]["step"]) == 3


def test_a_state_of_adamw_goes_on_with_the_operator_adam():
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.0)
    optimizer = OperatorOptimizer([{"params": [ours], "weight_decay": 0.0}], Adam())
    for step in range(3):
        theirs.grad = torch.full_like(theirs, step + 1.0)
        adamw.step()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(adamw.state_dict()))
            ours.data.copy_(theirs)
    ours.grad = theirs.grad.clone()
    optimizer.step()
    assert_close(ours, theirs)


def test_state_is_shaped_like_the_parameter():
    params = parameters()
    optimizer = OperatorOptimizer(params, Steepest(L2()) @ Adam(), lr=0.01)
    train(params, optimizer, 1)
    for p in params:
        assert optimizer.state[p]["exp_avg"].shape == p.shape


def test_pickling_and_copying_keep_the_operator():
    params = parameters()
    optimizer = OperatorOptimizer(params, Mirror(Entropy()) @ Adam(), lr=0.01, exact_mirror=True)
    train(params, optimizer, 3)
    for clone in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert clone.operator == optimizer.operator
        copies = [p for group in clone.param_groups for p in group["params"]]
        train(copies, clone, 2)


def test_groups_have_their_own_rate_and_form():
    params = parameters()
    optimizer = OperatorOptimizer(
        [{"params": params[:1], "lr": 0.0}, {"params": params[1:], "exact_mirror": True}], Mirror(Entropy()), lr=0.1
    )
    before = [p.detach().clone() for p in params]
    train(params, optimizer, 1)
    assert_close(params[0].detach(), before[0])
    assert_close(params[1].detach(), before[1] * torch.exp(-0.1 * 2 * (before[1] - 0.25)))


def test_a_scheduler_and_a_tensor_rate_work():
    params = parameters()
    optimizer = OperatorOptimizer(params, Identity(), lr=torch.tensor(0.1, dtype=torch.float64))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(params, optimizer, 1)
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_closure_missing_gradients_and_maximize():
    params = parameters()
    frozen = torch.nn.Parameter(torch.ones(2))
    optimizer = OperatorOptimizer([*params, frozen], Identity(), lr=0.01, maximize=True)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert float(second.detach()) > float(first.detach())
    assert_close(frozen.detach(), torch.ones(2))
    assert frozen not in optimizer.state


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_belong_to_the_user(name):
    params = parameters()
    loss_of(params).backward()
    before = [p.grad.clone() for p in params]
    OperatorOptimizer(params, OPERATORS[name], lr=0.01, maximize=True).step()
    for p, g in zip(params, before, strict=True):
        assert_close(p.grad, g, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPERATORS)
def test_non_contiguous_parameters(name):
    base = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(3, 4) / 6
    contiguous, strided = torch.nn.Parameter(base.T.contiguous()), torch.nn.Parameter(base.clone().T)
    assert not strided.is_contiguous()
    for p in (contiguous, strided):
        train([p], OperatorOptimizer([p], OPERATORS[name], lr=0.01), 5)
    assert_close(strided, contiguous)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_empty_parameter_is_left_alone(name):
    p = torch.nn.Parameter(torch.zeros(0, 3))
    p.grad = torch.zeros(0, 3)
    OperatorOptimizer([p], OPERATORS[name], lr=0.1).step()
    assert p.shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"operator": LInf()}, TypeError, "operator must be an Operator, got LInf"),
        ({"lr": -1.0}, ValueError, "lr must be at least 0, got -1.0"),
        ({"lr": float("nan")}, ValueError, "lr must be at least 0, got nan"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0"),
        ({"exact_mirror": True}, ValueError, "begins with a mirror"),
        ({"operator": Steepest(Spectral())}, ValueError, r"acts on matrices, but a parameter has shape \(3,\)"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, error, text):
    with pytest.raises(error, match=text):
        OperatorOptimizer([torch.nn.Parameter(torch.ones(3))], **{"operator": Identity(), **arguments})


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        OperatorOptimizer(embedding.parameters(), Identity(), lr=0.1).step()


def hyperbolic_adam(params, lr, alpha, **options):
    """Adam in the geometry of the hyperbolic entropy with gamma 1 / alpha, at Adam's own learning rate."""
    adam = Adam(eps=options.pop("eps", 1e-8))
    return OperatorOptimizer(
        params, Mirror(HyperbolicEntropy(1 / alpha)) @ (alpha * adam), lr, exact_mirror=True, **options
    )


def test_a_factor_inside_is_a_learning_rate_outside():
    ours, theirs = parameters(), parameters()
    train(ours, hyperbolic_adam(ours, 0.02, 5.0), 20)
    operator = Mirror(HyperbolicEntropy(1 / 5.0)) @ Adam()
    train(theirs, OperatorOptimizer(theirs, operator, lr=5.0 * 0.02, exact_mirror=True), 20)
    assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_hyperbolic_adam_tends_to_adamw_as_alpha_falls():
    ours, theirs = parameters(), parameters()
    train(ours, hyperbolic_adam(ours, 0.02, 1e-4, weight_decay=0.3), 20)
    train(theirs, torch.optim.AdamW(theirs, lr=0.02, weight_decay=0.3), 20)
    assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_a_hyperbolic_step_by_hand_takes_the_decay_from_the_weight_before_it():
    theta = torch.nn.Parameter(torch.tensor([1.0, 0.05], dtype=torch.float64))
    theta.grad = torch.tensor([2.0, 2.0], dtype=torch.float64)
    hyperbolic_adam([theta], 0.1, 5.0, weight_decay=0.5, eps=0.0).step()
    expected = [0.2 * math.sinh(math.asinh(5 * x) - 0.5) - 0.05 * x for x in (1.0, 0.05)]
    assert_close(theta.detach(), torch.tensor(expected, dtype=torch.float64))
    assert theta[1] < 0, "signs may change"
