"""HORST and HAM as drop-ins for torch.optim.AdamW."""

import copy
import inspect
import math
import warnings

import pytest
import torch
from torch import nn

from horst import HAM, HORST
from horst.integrations.matrices import MatrixHORST
from horst.kernels.cache_blocking import PIECE

# Several tests compare the steps in bfloat16, rounded to the nearest.
pytestmark = pytest.mark.filterwarnings("ignore:.*bfloat16 weights without stochastic_rounding")


def params_like(shapes, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=dtype, device=device) * 0.1) for s in shapes]


def step_together(optimizers, steps, seed=1):
    """The same gradients for all, some missing at some steps."""
    generator = torch.Generator().manual_seed(seed)
    for k in range(steps):
        columns = zip(*([p for g in o.param_groups for p in g["params"]] for o in optimizers), strict=True)
        for i, column in enumerate(columns):
            grad = torch.randn(column[0].shape, generator=generator, dtype=torch.float64)
            for p in column:
                p.grad = None if (k + i) % 5 == 4 else grad.to(p)
        for o in optimizers:
            o.step()


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", [HORST, HAM])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.0, "maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-6}])
def test_alpha_zero_is_adamw_bit_for_bit(foreach, dtype, cls, options):
    shapes = [(17, 33), (5,), (), (PIECE + 3,), (2, 3, 4)]
    a, b = params_like(shapes, dtype), params_like(shapes, dtype)
    ours = cls(a, lr=1e-2, alpha=0.0, beta=0.0, foreach=foreach, **options)
    adamw = torch.optim.AdamW(b, lr=1e-2, foreach=foreach, **{"weight_decay": 1e-2, **options})
    step_together([ours, adamw], 110)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[p][key], adamw.state[q][key], rtol=0, atol=0)


def test_fused_alpha_zero_is_adamw_within_rounding(device):
    shapes = [(17, 33), (5,), (3000,)]
    a, b = params_like(shapes, device=device), params_like(shapes, device=device)
    step_together([HORST(a, lr=1e-2, alpha=0.0, fused=True), torch.optim.AdamW(b, lr=1e-2)], 110)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_an_adamw_state_dict_loads_into_horst_and_back(fused, device):
    shapes = [(9, 4), (4,)]
    a, b = params_like(shapes, device=device), params_like(shapes, device=device)
    adamw = torch.optim.AdamW(a, lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9))
    step_together([adamw], 4)
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    ours = HORST(b, lr=1.0, alpha=0.0, beta=0.0, fused=fused or None)
    ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    assert ours.param_groups[0]["alpha"] == 0.0  # AdamW's has none, so ours stays
    assert ours.param_groups[0]["fused"] is (fused or None)  # not AdamW's
    step_together([adamw, ours], 4, seed=2)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    adamw.load_state_dict(copy.deepcopy(ours.state_dict()))
    step_together([adamw, ours], 4, seed=3)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("cls", [HORST, HAM])
def test_a_checkpoint_of_fused_adamw_goes_on_without_the_kernel(cls, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shapes = [(9, 4), (4,)]
    a, b = params_like(shapes), params_like(shapes)
    adamw = torch.optim.AdamW(a, lr=1e-2, fused=True)  # torch has a fused step on the CPU
    step_together([adamw], 4)
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    ours = cls(b, alpha=0.0, beta=0.0, foreach=False)
    ours.load_state_dict(copy.deepcopy(adamw.state_dict()))
    assert [ours.param_groups[0][key] for key in ("foreach", "fused", "capturable")] == [False, None, False]
    step_together([adamw, ours], 4, seed=2)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_how_the_step_runs_is_not_loaded_and_what_it_computes_is():
    (p,) = params_like([(3,)])
    saved = HORST([p], alpha=7.0, maximize=True, stochastic_rounding=True, foreach=True, capturable=True).state_dict()
    optimizer = HORST([p], foreach=False)
    optimizer.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["alpha"], group["maximize"], group["stochastic_rounding"]) == (7.0, True, True)
    assert (group["foreach"], group["fused"], group["capturable"]) == (False, None, False)


def test_counters_lie_where_the_backend_of_the_moment_wants_them(device):
    """On the host for the eager backends, on the device for the kernel: after a load, and when an option is changed."""
    (p,) = params_like([(4, 3)], device=device)
    saved = HORST([p], lr=1e-2, capturable=True)
    step_together([saved], 2)
    optimizer = HORST([p], lr=1e-2, foreach=True)
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for options, place in (({}, "cpu"), ({"foreach": None, "fused": True}, device), ({"fused": False}, "cpu")):
        optimizer.param_groups[0].update(options)
        step_together([optimizer], 1)
        assert optimizer.state[p]["step"].device.type == torch.device(place).type
    assert optimizer.state[p]["step"].item() == 5


def test_a_counter_that_was_saved_as_a_number_loads():
    (p,) = params_like([(3,)])
    adamw = torch.optim.AdamW([p])
    step_together([adamw], 3)
    state = copy.deepcopy(adamw.state_dict())
    state["state"][0]["step"] = 3  # as old releases of torch wrote it
    optimizer = HORST([p])
    optimizer.load_state_dict(state)
    step_together([optimizer], 1)
    torch.testing.assert_close(optimizer.state[p]["step"], torch.tensor(4.0))


@pytest.mark.parametrize("cls", [HORST, HAM])
def test_a_state_of_another_algorithm_is_refused(cls):
    (p,) = params_like([(3,)])
    sgd, optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9), cls([p])
    step_together([sgd], 1)
    with pytest.raises(ValueError, match=r"holds 'momentum_buffer'.*needs 'step', 'exp_avg' and 'exp_avg_sq'.*AdamW"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3  # nothing half-loaded
    step_together([optimizer], 1)
    adam = torch.optim.Adam([p])
    step_together([adam], 1)
    optimizer.load_state_dict(adam.state_dict())


def matrix():
    p = nn.Parameter(torch.ones(4, 4))
    return p, HORST([p], lr=1e-3, alpha="auto")


@pytest.mark.parametrize("key", ["lr", "initial_lr"])
def test_auto_warns_when_a_larger_rate_is_loaded_without_an_alpha(key):
    p, optimizer = matrix()
    (chosen,) = (group["alpha"] for group in optimizer.param_groups)
    state = torch.optim.AdamW([p], lr=1e-3).state_dict()
    state["param_groups"][0][key] = 1e-2  # in a warm-up lr is small, and the peak is initial_lr
    text = rf"chose alpha={chosen:.3g} for lr=0.001, and .* has lr=0.01: .* {chosen / 100:.3g}, not {chosen / 1000:.3g}"
    with pytest.warns(UserWarning, match=text + r".*Build the optimizer with the peak of the schedule as lr"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["alpha"] == chosen


def test_auto_is_silent_where_alpha_and_rate_belong_together():
    """Warnings are errors here: the same rate, a smaller one (late in a schedule), a number, a state with an alpha."""
    p, optimizer = matrix()
    for lr in (1e-3, 1e-5):
        optimizer.load_state_dict(torch.optim.AdamW([p], lr=lr).state_dict())
    HORST([p], lr=1e-3, alpha=5.0).load_state_dict(torch.optim.AdamW([p], lr=1e-2).state_dict())
    matrix()[1].load_state_dict(HORST([p], lr=1e-2, alpha="auto").state_dict())
    _, changed = matrix()
    changed.param_groups[0]["alpha"] = 1.5
    changed.load_state_dict(torch.optim.AdamW([p], lr=1e-2).state_dict())
    copied = copy.deepcopy(matrix()[1])
    copied.load_state_dict(copied.state_dict())


def test_old_checkpoints_without_an_option_load():
    (p,) = params_like([(3,)])
    optimizer = HORST([p], alpha=7.0)
    state = optimizer.state_dict()
    for key in ("max_step", "stochastic_rounding", "alpha"):
        del state["param_groups"][0][key]
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["alpha"] == 7.0
    assert optimizer.param_groups[0]["max_step"] is None


def test_amsgrad_state_is_refused():
    (p,) = params_like([(3,)])
    state = torch.optim.AdamW([p], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad"):
        HORST([p]).load_state_dict(state)


def test_alpha_and_beta_can_be_scheduled():
    (a,), (b,) = params_like([(50,)]), params_like([(50,)])
    one, two = HORST([a], lr=1e-2, alpha=1.0), HORST([b], lr=1e-2, alpha=5.0, beta=0.5)
    step_together([one, two], 1)
    assert not torch.equal(a, b)
    (a,), (b,) = params_like([(50,)]), params_like([(50,)])
    one, two = HORST([a], lr=1e-2, alpha=1.0), HORST([b], lr=1e-2, alpha=5.0, beta=0.5)
    one.param_groups[0].update(alpha=5.0, beta=0.5)
    step_together([one, two], 1)
    assert torch.equal(a, b)


def test_ham_leaves_vectors_to_adamw():
    shapes = [(4, 5), (6,), ()]
    a, b = params_like(shapes), params_like(shapes)
    step_together([HAM(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2)], 3)
    assert not torch.allclose(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert torch.equal(a[2], b[2])


def test_hams_first_step_by_hand():  # eps=0 makes Adam's first direction sign(g), so u = lr
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    p.grad = torch.tensor([[20.0, 20.0], [40.0, 40.0]], dtype=torch.float64)
    HAM([p], lr=1e-3, eps=0.0, weight_decay=0.0).step()
    expected = [(1 - 1e-3) * math.exp(-1e-3 * (200.0 * 20.0 + 1e-3)), (1 - 1e-3) * math.exp(-5.0)]  # 8 is clamped
    torch.testing.assert_close(p.detach(), torch.tensor(expected, dtype=torch.float64)[:, None].expand(2, 2))


def test_the_mirror_step_applies_to_vectors_too_in_horst():
    (a,), (b,) = params_like([(6,)]), params_like([(6,)])
    step_together([HORST([a], lr=1e-2), HORST([b], lr=1e-2, alpha=0.0)], 2)
    assert not torch.allclose(a, b)


def test_unstable_alpha_warns_once():
    (p,) = params_like([(3,)])
    optimizer = HORST([p], lr=5e-3, alpha=200.0)
    p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match=r"alpha \* lr is 1.*Lower alpha or lr"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


BAD = [
    ({"alpha": -1.0}, ValueError, r"alpha must be a number of at least 0, got -1.0; use 0 for plain AdamW"),
    ({"alpha": math.nan}, ValueError, "alpha must be a number of at least 0, got nan"),
    ({"alpha": math.inf}, ValueError, "alpha"),
    ({"alpha": (0.9, 0.999)}, TypeError, r"alpha must be a number of at least 0, got \(0.9, 0.999\)"),
    ({"alpha": "5"}, TypeError, "alpha"),
    ({"alpha": True}, TypeError, "alpha"),
    ({"beta": -1e-3}, ValueError, "beta must be.*betas"),
    ({"beta": (0.9, 0.999)}, TypeError, "the argument is betas"),
    ({"l1": -0.1}, ValueError, "l1 must be a number of at least 0, got -0.1; use 0 to leave it out"),
    ({"l1": math.inf}, ValueError, "l1 must be a number of at least 0, got inf"),
    ({"l1": math.nan}, ValueError, "l1"),
    ({"l1": None}, TypeError, "l1 must be a number of at least 0, got None"),
    ({"l1": torch.tensor(0.1)}, TypeError, "l1"),
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": math.nan}, ValueError, "lr"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, ValueError, "one element"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "lr"),
    ({"betas": 0.9}, TypeError, "pair"),
    ({"betas": (0.9,)}, TypeError, "pair"),
    ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must lie in \[0, 1\), got 1.0"),
    ({"betas": (math.nan, 0.9)}, ValueError, r"betas\[0\]"),
    ({"eps": -1e-8}, ValueError, "eps"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay"),
    ({"max_step": 0.0}, ValueError, "max_step must be above 0"),
    ({"max_step": "5"}, TypeError, "max_step"),
    ({"foreach": True, "fused": True}, ValueError, "foreach=True and fused=True clash"),
    ({"foreach": 1}, TypeError, "foreach"),
    ({"capturable": None}, TypeError, "capturable"),
    ({"stochastic_rounding": "yes"}, TypeError, "stochastic_rounding"),
    ({"maximize": 1}, TypeError, "maximize"),
]


@pytest.mark.parametrize(("options", "error", "text"), BAD, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("cls", [HORST, HAM])
def test_bad_options_say_what_is_wrong(cls, options, error, text):
    with pytest.raises(error, match=text):
        cls([{"params": params_like([(3,)]), **options}])
    if options.keys() <= inspect.signature(cls).parameters.keys():
        with pytest.raises(error, match=text):
            cls(params_like([(3,)]), **options)


def test_the_arguments_are_adamws_and_what_the_step_adds():
    shared = ["params", "lr", "betas", "eps", "weight_decay"]
    backends = ["maximize", "foreach", "fused", "capturable", "stochastic_rounding"]
    assert list(inspect.signature(HORST).parameters) == [*shared, "alpha", "beta", "l1", *backends]
    assert list(inspect.signature(HAM).parameters) == [*shared, "alpha", "beta", *backends]


@pytest.mark.parametrize("cls", [HORST, HAM, MatrixHORST])
@pytest.mark.parametrize("source", ["itself", "adamw"])
def test_a_load_leaves_the_options_of_the_groups_and_new_groups_alike(cls, source):
    a, b = params_like([(3, 3), (4, 4)])
    optimizer = cls([a], lr=1e-2)
    before = set(optimizer.param_groups[0])
    state = (cls if source == "itself" else torch.optim.AdamW)([a], lr=1e-3).state_dict()
    optimizer.load_state_dict(state)
    optimizer.add_param_group({"params": [b]})
    assert [set(group) for group in optimizer.param_groups] == [before, before]
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_bad_group_changes_nothing():
    a, b = params_like([(3,), (4,)])
    optimizer = HORST([a])
    with pytest.raises(TypeError, match="alpha"):
        optimizer.add_param_group({"params": [b], "alpha": "5"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [b], "alpha": 1.0})
    assert optimizer.param_groups[1]["alpha"] == 1.0


def test_parameters_may_be_given_as_an_iterator():
    model = nn.Linear(2, 2)
    assert len(HORST(model.parameters()).param_groups[0]["params"]) == 2
    assert len(HORST([{"params": iter(model.parameters())}]).param_groups[0]["params"]) == 2
    assert len(HORST([{"params": model.weight}]).param_groups[0]["params"]) == 1


def test_fused_on_a_cpu_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"fused=True was asked for, but .*cpu.*fused=None"):
        HORST(params_like([(3,)]), fused=True)
    optimizer = HORST(params_like([(3,)]))  # None chooses
    assert not optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("backend", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("cls", [HORST, HAM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_inside_the_step_equal_masks_after_it(backend, cls, dtype, device):
    shapes = [(40, 30), (1500,), (7, 3), (5,), (0, 2)]
    a, b = params_like(shapes, dtype, device), params_like(shapes, dtype, device)
    inside, after = cls(a, lr=1e-2, **backend), cls(b, lr=1e-2, **backend)
    masks = {0: torch.rand(40, 30, device=device) < 0.3, 1: torch.rand(1500, device=device) < 0.5}
    inside.set_masks({a[i]: mask for i, mask in masks.items()})
    for k in range(4):
        if k == 3:  # dense again: the AdamW step revives the zeros
            inside.set_masks({a[0]: None})
            del masks[0]
        step_together([inside, after], 1, seed=k)
        for i, mask in masks.items():
            b[i].data.masked_fill_(~mask, 0)
        for p, q in zip(a, b, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)
        for i, mask in masks.items():
            assert (a[i][~mask] == 0).all()
    assert (a[0] != 0).float().mean() > 0.9


def test_masks_survive_load_state_dict_and_are_checked():
    a, b = params_like([(4, 3), (3,)])
    optimizer = HORST([a, b])
    with pytest.raises(ValueError, match="not in this optimizer"):
        optimizer.set_masks({nn.Parameter(torch.ones(2)): torch.ones(2, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"shaped like its weight \(4, 3\)"):
        optimizer.set_masks({a: torch.ones(3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="boolean"):
        optimizer.set_masks({a: torch.ones(4, 3)})
    optimizer.set_masks({a: torch.eye(4, 3, dtype=torch.bool)})
    optimizer.load_state_dict(optimizer.state_dict())
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert int((a != 0).sum()) == 3


def test_lr_may_be_a_tensor_that_a_scheduler_changes():
    (p,), (q,) = params_like([(30,)]), params_like([(30,)])
    one, two = HORST([p], lr=torch.tensor(1e-2)), HORST([q], lr=1e-2)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (one, two)]
    for k in range(3):
        step_together([one, two], 1, seed=k)
        for s in schedules:
            s.step()
    torch.testing.assert_close(p, q)
    assert isinstance(one.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("foreach", [False, True])
def test_a_tensor_lr_may_have_a_dimension_though_a_weight_has_none(foreach):
    (p,), (q,) = params_like([()]), params_like([()])
    one = HORST([p], lr=torch.tensor([1e-2]), capturable=True, foreach=foreach, l1=0.1)
    step_together([one, HORST([q], lr=1e-2, l1=0.1)], 3)
    torch.testing.assert_close(p, q)


def test_half_precision_matches_float32_master_arithmetic(device):
    """One step in bfloat16 equals the float32 step on the same numbers, rounded once."""
    shapes = [(40, 8)]
    low, high = params_like(shapes, torch.bfloat16, device), params_like(shapes, torch.bfloat16, device)
    high = [nn.Parameter(p.detach().float()) for p in high]
    for optimizer_low, optimizer_high in ((HORST(low, lr=1e-2), HORST(high, lr=1e-2)),):
        low[0].grad = torch.randn(40, 8, device=device).bfloat16()
        high[0].grad = low[0].grad.float()
        optimizer_low.step()
        optimizer_high.step()
    torch.testing.assert_close(low[0].detach(), high[0].detach().bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("cls", [HORST, HAM])
def test_bfloat16_weights_without_stochastic_rounding_warn_once(cls):
    low, frozen = params_like([(4, 4), (3,)], torch.bfloat16), params_like([(4, 4)], torch.bfloat16)
    frozen[0].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cls([{"params": p} for p in low])
        assert [warning.filename for warning in caught] == [__file__]
        assert f"{cls.__name__} got bfloat16 weights without stochastic_rounding" in str(caught[0].message)
        cls(low, stochastic_rounding=True)
        cls([*params_like([(4, 4)]), *frozen])
        copy.deepcopy(cls(low, stochastic_rounding=True)).step()
    assert len(caught) == 1


@pytest.mark.parametrize("cls", [HORST, HAM])
def test_float16_weights_that_train_are_refused_since_their_second_moment_would_be_zero(cls):
    low, frozen = params_like([(4, 4)], torch.float16), params_like([(4, 4)], torch.float16)
    frozen[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"torch.float16 and shape \(4, 4\).*Adam's second moment.*autocast"):
        cls(low)
    optimizer = cls([*params_like([(3,)]), *frozen])  # the frozen base of an adapter takes no step
    with pytest.raises(ValueError, match=r"torch.float16"):
        optimizer.add_param_group({"params": [("weight", low[0])]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", [HORST, HAM])
def test_weights_that_are_unfrozen_later_are_looked_at_then(cls):
    for dtype, match in ((torch.float16, "Adam's second moment"), (torch.complex64, "needs the sign of a weight")):
        (frozen,), (head,) = params_like([(4, 4)], dtype), params_like([(4, 4)])
        optimizer = cls([frozen.requires_grad_(False), head])
        head.grad = torch.ones_like(head)
        optimizer.step()
        frozen.requires_grad_(True).grad = torch.ones_like(frozen)
        with pytest.raises(ValueError, match=match):
            optimizer.step()
    (frozen,) = params_like([(4, 4)], torch.bfloat16)
    optimizer = cls([frozen.requires_grad_(False)])
    frozen.requires_grad_(True).grad = torch.ones_like(frozen)
    with pytest.warns(UserWarning, match="bfloat16 weights without stochastic_rounding"):
        optimizer.step()
