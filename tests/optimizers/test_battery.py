"""One battery that every optimizer passes."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import horst
from horst.lab.baselines.balanced_product import PILoT, SignIn
from horst.lab.baselines.bregman import LinBreg
from horst.lab.baselines.deep_factors import DeepFactors
from horst.lab.baselines.lmd import LMD
from horst.lab.baselines.madam import Madam
from horst.operators import Adam, HyperbolicEntropy, Mirror

Make = Callable[..., Optimizer]
# kernels run where they can: on the GPU, else in Triton's interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _bounded(params: Any, **kw: Any) -> Optimizer:
    """A bound on the learning rate in every group, as alpha="auto" writes it."""
    optimizer = horst.HORST(params, **{"lr": 1e-2, "beta": 0.1, **kw})
    for group in optimizer.param_groups:
        group["max_step"] = 5e-3
    return optimizer


def _horst(backend: dict[str, Any], **fixed: Any) -> Make:
    return lambda params, **kw: horst.HORST(params, **{"lr": 1e-2, **backend, **fixed, **kw})


def _ham(backend: dict[str, Any]) -> Make:
    return lambda params, **kw: horst.HAM(params, **{"lr": 1e-2, "alpha": 20.0, **backend, **kw})


def _with_mirror_step(base: type[Optimizer], **fixed: Any) -> Make:
    return lambda params, **kw: horst.with_mirror_step(base(params, **{"lr": 1e-2, **fixed, **kw}), alpha=5.0)


OPTIMIZERS: dict[str, Make] = {
    "horst": _horst({}),
    "horst_loop": _horst({"foreach": False}),
    "horst_foreach": _horst({"foreach": True}),
    "horst_fused": _horst({"fused": True}),
    "horst_bounded": _bounded,
    "horst_l1": _horst({}, l1=0.1),
    "ham": _ham({}),
    "ham_foreach": _ham({"foreach": True}),
    "ham_fused": _ham({"fused": True}),
    "adams": lambda params, **kw: horst.AdamS(params, **{"lr": 1e-2, "steps": 100, **kw}),
    "operator_adam": lambda params, **kw: horst.OperatorOptimizer(params, Adam(), **{"lr": 1e-2, **kw}),
    "operator_hyperbolic_adam": lambda params, **kw: horst.OperatorOptimizer(
        params, Mirror(HyperbolicEntropy(1.0)) @ Adam(), **{"lr": 1e-2, "exact_mirror": True, **kw}
    ),
    "madam": lambda params, **kw: Madam(params, **{"lr": 0.1, "bound": 10.0, **kw}),
    "lmd": lambda params, **kw: LMD(params, **{"lr": 0.05, "gamma": 0.05, **kw}),
    "spred": lambda params, **kw: DeepFactors(params, **{"lr": 1e-2, "weight_decay": 0.1, **kw}),
    "dwf": lambda params, **kw: DeepFactors(params, **{"lr": 1e-2, "depth": 3, **kw}),
    "pilot": lambda params, **kw: PILoT(params, **{"lr": 1e-2, "target": 1.0, **kw}),
    "sign_in": lambda params, **kw: SignIn(params, **{"lr": 1e-2, "every": 2, **kw}),
    "linbreg": lambda params, **kw: LinBreg(params, **{"lr": 1e-1, "l1": 1e-3, **kw}),
    "adabreg": lambda params, **kw: LinBreg(params, operator=Adam(), **{"lr": 1e-2, "l1": 1e-3, **kw}),
    "with_adamw": _with_mirror_step(torch.optim.AdamW, weight_decay=0.1),
    "with_sgd": _with_mirror_step(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "with_rmsprop": _with_mirror_step(torch.optim.RMSprop),
    "with_adafactor": _with_mirror_step(torch.optim.Adafactor, weight_decay=0.1),
}
OURS = [name for name in OPTIMIZERS if name.startswith(("horst", "ham"))]


@pytest.fixture(params=list(OPTIMIZERS))
def make(request):
    return OPTIMIZERS[request.param]


def small_model(device=DEVICE, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3)).to(device, dtype)


def batch(device=DEVICE, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 6, generator=generator)
    return x.to(device, dtype), (x @ torch.randn(6, 3, generator=generator)).to(device, dtype)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def train(model, optimizer, steps, device=DEVICE):
    x, y = batch(device)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
    return loss_of(model, x, y).item()


def test_descends(make, device):
    model = small_model(device)
    before = loss_of(model, *batch(device)).item()
    assert train(model, make(model.parameters()), 30, device) < 0.7 * before


def test_is_a_torch_optimizer(make):
    assert isinstance(make(small_model().parameters()), torch.optim.Optimizer)


def test_state_dict_round_trip_continues_exactly(make, device):
    model = small_model(device)
    optimizer = make(model.parameters())
    train(model, optimizer, 3, device)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = small_model(device)
    other.load_state_dict(saved["model"])
    resumed = make(other.parameters(), lr=0.5)  # the saved lr wins, as in torch
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 3, device)
    train(other, resumed, 3, device)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
# torch's own Adafactor cannot step on a GPU after it was copied (seen in 2.11)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "with_adafactor"])
def test_copies_continue_exactly(name, clone):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    pair = clone({"model": model, "optimizer": optimizer})
    train(model, optimizer, 2)
    train(pair["model"], pair["optimizer"], 2)
    for a, b in zip(model.parameters(), pair["model"].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_groups_have_their_own_hyperparameters(make):
    model = small_model()
    groups = [{"params": list(model[0].parameters()), "lr": 0.0}, {"params": list(model[3].parameters())}]
    optimizer = make(groups)
    frozen = [p.clone() for p in model[0].parameters()]
    moving = [p.clone() for p in model[3].parameters()]
    train(model, optimizer, 1)
    for p, old in zip(model[0].parameters(), frozen, strict=True):
        torch.testing.assert_close(p, old, rtol=1e-6, atol=0)
    assert all(not torch.equal(p, old) for p, old in zip(model[3].parameters(), moving, strict=True))


def test_add_param_group(make):
    model = small_model()
    optimizer = make(model[0].parameters())
    train(model, optimizer, 1)
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 1e-3})
    before = model[3].weight.clone()
    train(model, optimizer, 1)
    assert not torch.equal(model[3].weight, before)
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state_dict()["param_groups"]) == 2


# MADAM's steps are multiplicative: a bias that starts at zero stays there
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "madam"])
def test_closure_is_called_with_gradients_on(name):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    before = [p.clone() for p in model.parameters()]
    loss = optimizer.step(closure)
    assert loss.item() > 0
    assert all(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_parameters_without_a_gradient_are_left_alone(make):
    model = small_model()
    optimizer = make(model.parameters())
    train(model, optimizer, 2)
    lonely = model[0].weight
    before, step = lonely.clone(), copy.deepcopy(optimizer.state[lonely].get("step"))
    x, y = batch()
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    lonely.grad = None
    optimizer.step()
    torch.testing.assert_close(lonely, before, rtol=0, atol=0)
    if step is not None:
        assert float(optimizer.state[lonely]["step"]) == float(step)


def test_no_gradient_at_all_is_no_step(make):
    model = small_model()
    before = [p.clone() for p in model.parameters()]
    make(model.parameters()).step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_gradients_are_not_written_to(make):
    model = small_model()
    optimizer = make(model.parameters())
    loss_of(model, *batch()).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))


# torch's own Adafactor divides by the number of elements
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "with_adafactor"])
def test_empty_parameters(name):
    params = [nn.Parameter(torch.empty(0, 3, device=DEVICE)), nn.Parameter(torch.ones(2, device=DEVICE))]
    optimizer = OPTIMIZERS[name](params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert params[0].shape == (0, 3)
    assert (params[1] < 1).all()


def test_non_contiguous_parameters(make):
    params = [
        nn.Parameter(torch.randn(4, 6, device=DEVICE).t()),
        nn.Parameter(torch.randn(4, 12, device=DEVICE)[:, ::2]),
        nn.Parameter(torch.randn((), device=DEVICE)),
    ]
    twins = [nn.Parameter(p.detach().contiguous().clone()) for p in params]
    one, two = make(params), make(twins)
    for _ in range(3):
        for p, q in zip(params, twins, strict=True):
            q.grad = torch.randn(p.shape, device=DEVICE)
            p.grad = q.grad.clone()
        one.step()
        two.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p.detach().contiguous(), q.detach())


def test_every_scheduler_drives_it(make):
    schedulers = torch.optim.lr_scheduler
    for build in (
        lambda o: schedulers.StepLR(o, 2),
        lambda o: schedulers.CosineAnnealingLR(o, 5),
        lambda o: schedulers.LambdaLR(o, lambda k: 0.9**k),
        lambda o: schedulers.LinearLR(o),
        lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
        lambda o: schedulers.SequentialLR(o, [schedulers.LinearLR(o), schedulers.ExponentialLR(o, 0.5)], [2]),
        lambda o: schedulers.OneCycleLR(o, 0.1, 10, cycle_momentum=False),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    ):
        model = small_model()
        optimizer = make(model.parameters())
        with warnings.catch_warnings():
            # SequentialLR calls a deprecated form of the schedulers inside it
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")
            scheduler = build(optimizer)
            rates = []
            for _ in range(5):
                train(model, optimizer, 1)
                scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
                rates.append(float(optimizer.param_groups[0]["lr"]))
        assert len(set(rates)) > 1, build


def test_grad_scaler_skips_bad_steps_and_unscales_good_ones(make, device):
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=10**6)
    model, twin = small_model(device), small_model(device)
    optimizer, plain = make(model.parameters()), make(twin.parameters())
    x, y = batch(device)
    for k in range(4):
        for m, o, s in ((model, optimizer, scaler), (twin, plain, None)):
            o.zero_grad()
            loss = loss_of(m, x, y)
            (s.scale(loss) if s else loss).backward()
        if k == 1:
            model[0].weight.grad.view(-1)[0] = math.inf
            before = [p.clone() for p in model.parameters()]
            scaler.step(optimizer)
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            scaler.update(1024.0)
            continue
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_and_accumulation(make):
    model, twin = small_model(), small_model()
    optimizer, plain = make(model.parameters()), make(twin.parameters())
    x, y = batch()
    for _ in range(2):
        optimizer.zero_grad()
        for part in range(4):
            (loss_of(model, x[part::4], y[part::4]) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        plain.zero_grad()
        loss_of(twin, x, y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_swa_averages_it(make):
    model = small_model()
    optimizer = make(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)
    for _ in range(3):
        train(model, optimizer, 1)
        average.update_parameters(model)
        scheduler.step()
    assert int(average.n_averaged) == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_step_inside_backward(make):
    model, twin = small_model(), small_model()
    optimizers = {p: make([p]) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    plain = make(twin.parameters())
    x, y = batch()
    for _ in range(3):
        loss_of(model, x, y).backward()
        plain.zero_grad()
        loss_of(twin, x, y).backward()
        plain.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_resetting_the_state_starts_afresh(make):
    """Rewinding in lottery-ticket experiments: people clear optimizer.state by hand."""
    model, twin = small_model(), small_model()
    optimizer = make(model.parameters())
    start = copy.deepcopy(model.state_dict())
    train(model, optimizer, 3)
    model.load_state_dict(start)
    optimizer.state.clear()
    train(model, optimizer, 3)
    train(twin, make(twin.parameters()), 3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights without stochastic_rounding")
@pytest.mark.parametrize("name", OURS)
def test_state_has_the_shape_dtype_and_layout_of_the_parameter(name):
    p = nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16, device=DEVICE).t())
    p.grad = torch.ones_like(p)
    optimizer = OPTIMIZERS[name]([p])
    optimizer.step()
    state = optimizer.state[p]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["step"].dtype is torch.float32
    for key in ("exp_avg", "exp_avg_sq"):
        assert (state[key].shape, state[key].dtype, state[key].stride()) == (p.shape, p.dtype, p.stride())


@pytest.mark.parametrize("name", OURS)
def test_named_parameters_are_remembered(name):
    model = small_model()
    optimizer = OPTIMIZERS[name](model.named_parameters())
    train(model, optimizer, 1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"][0] == "0.weight"


@pytest.mark.parametrize("cls", [horst.HORST, horst.HAM])
def test_sparse_gradients_are_refused(cls):
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = cls(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"dense gradients.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("cls", [horst.HORST, horst.HAM])
def test_frozen_parameters_may_have_any_dtype(cls, fused, device):  # as the codes of a quantized layer do
    codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8, device=device), requires_grad=False)
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = cls([codes, weight], fused=fused)
    weight.grad = torch.ones(3, device=device)
    optimizer.step()
    is_fused = fused or device.type == "cuda"
    assert optimizer._cache.backend(optimizer.param_groups[0]) == ("fused" if is_fused else "for-loop")
    assert not codes.any()
    assert (weight < 1).all()


@pytest.mark.parametrize("cls", [horst.HORST, horst.HAM])
def test_complex_parameters_are_refused(cls):
    with pytest.raises(ValueError, match=r"complex64.*AdamW"):
        cls([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
