"""with_mirror_step: the mirror step after any optimizer."""

import copy

import pytest
import torch
from torch import nn

from horst import HORST, with_mirror_step
from horst.kernels.mirror_step import mirror_step_reference
from horst.lab.baselines.together import Together
from horst.operators import Adam, HyperbolicEntropy, Mirror
from horst.optimizers.operator_optimizer import OperatorOptimizer


def params_like(shapes, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=dtype, device=device) * 0.1) for s in shapes]


def give_gradients(*lists, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for column in zip(*lists, strict=True):
        grad = torch.randn(column[0].shape, generator=generator, dtype=torch.float64)
        for p in column:
            p.grad = grad.to(p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("adamw", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamw_with_a_mirror_step_equals_horst_to_rounding(dtype, adamw, device):
    shapes = [(20, 30), (7,)]
    a, b = params_like(shapes, dtype, device), params_like(shapes, dtype, device)
    base = torch.optim.AdamW(b, lr=1e-2, weight_decay=0.2, **adamw)
    one, two = HORST(a, lr=1e-2, weight_decay=0.2, alpha=5.0, beta=0.3), with_mirror_step(base, alpha=5.0, beta=0.3)
    for k in range(20):
        give_gradients(a, b, seed=k)
        one.step()
        two.step()
    tolerance = {"rtol": 1e-10, "atol": 1e-13} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
    "adam_coupled": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "nadam_decoupled": lambda p: torch.optim.NAdam(p, lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "rprop": lambda p: torch.optim.Rprop(p),
}
DECOUPLED = ("muon", "adafactor", "nadam_decoupled")


@pytest.mark.parametrize("name", BASES)
def test_goes_along_the_base_optimizers_own_step(name):
    """The definition, with the base optimizer run beside it: u is its displacement without decoupled decay."""
    shapes = [(12, 9), (9, 9)]
    a, b = params_like(shapes, torch.float32), params_like(shapes, torch.float32)
    composed, base = with_mirror_step(BASES[name](a), alpha=5.0, beta=0.5), BASES[name](b)
    for k in range(4):
        give_gradients(a, b, seed=k)
        before = [p.detach().clone() for p in b]
        composed.step()
        base.step()
        lr = base.param_groups[0]["lr"]
        decay = base.param_groups[0].get("weight_decay", 0.0) if name in DECOUPLED else 0.0
        for p, q, old in zip(a, b, before, strict=True):
            expected = mirror_step_reference(
                q.detach().double(), old.double(), lr=lr, weight_decay=decay, alpha=5.0, beta=0.5
            )
            torch.testing.assert_close(p.detach().double(), expected, rtol=2e-5, atol=1e-7)
            with torch.no_grad():
                q.copy_(p)  # both go on from the same weights


def test_a_third_party_optimizer_that_decays_must_be_explained():
    class Mystery(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1, weight_decay=0.0):
            super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad)

    params = params_like([(5,)])
    base = Mystery(params, weight_decay=0.1)
    groups = copy.deepcopy(base.param_groups)
    with pytest.raises(ValueError, match="decoupled_decay=True"):
        with_mirror_step(base)
    assert set(base.param_groups[0]) == set(groups[0])  # nothing half-changed
    composed = with_mirror_step(base, decoupled_decay=True)
    old = params[0].detach().clone()
    give_gradients(params)
    composed.step()
    half = old * (1 - 0.01) - 0.1 * params[0].grad
    expected = mirror_step_reference(half, old, lr=0.1, weight_decay=0.1, alpha=5.0, beta=0.0)
    torch.testing.assert_close(params[0].detach(), expected)
    with_mirror_step(Mystery(params_like([(5,)])))  # without decay there is nothing to explain


def test_groups_bring_their_own_alpha():
    a, b = params_like([(4,), (4,)])
    composed = with_mirror_step(torch.optim.AdamW([{"params": [a], "alpha": 0.0}, {"params": [b]}]), alpha=3.0)
    assert [g["mirror_alpha"] for g in composed.param_groups] == [0.0, 3.0]
    (c,) = params_like([(4,)])
    composed.add_param_group({"params": [c], "alpha": 1.0, "lr": 0.5})
    assert composed.base.param_groups[2]["mirror_alpha"] == 1.0
    assert composed.base.param_groups[2]["lr"] == 0.5


def test_rmsprop_keeps_its_own_alpha():
    composed = with_mirror_step(torch.optim.RMSprop(params_like([(4,)]), alpha=0.9), alpha=3.0)
    assert composed.param_groups[0]["alpha"] == 0.9
    assert composed.param_groups[0]["mirror_alpha"] == 3.0


def test_alpha_zero_leaves_the_base_optimizer():
    a, b = params_like([(6, 3)]), params_like([(6, 3)])
    composed, base = with_mirror_step(torch.optim.SGD(a, lr=0.1), alpha=0.0), torch.optim.SGD(b, lr=0.1)
    give_gradients(a, b)
    composed.step()
    base.step()
    assert torch.equal(a[0], b[0])


def test_with_a_closure_too_weights_without_a_gradient_are_left_alone():
    used, unused = params_like([(3,), (2,)])
    before = unused.detach().clone()
    optimizer = with_mirror_step(torch.optim.AdamW([used, unused], lr=0.1, weight_decay=0.5), alpha=5.0, beta=0.5)

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(unused.detach(), before, rtol=0, atol=0)


def test_a_started_optimizer_keeps_its_state():
    a, b = params_like([(6, 3)]), params_like([(6, 3)])
    started, plain = torch.optim.SGD(a, lr=0.1, momentum=0.9), torch.optim.SGD(b, lr=0.1, momentum=0.9)
    for o in (started, plain):
        give_gradients(a, b)
        o.step()
    composed = with_mirror_step(started, alpha=0.0)
    give_gradients(a, b, seed=2)
    composed.step()
    plain.step()
    assert torch.equal(a[0], b[0])


def test_a_state_dict_of_the_base_optimizer_loads():
    params = params_like([(6, 3)])
    base = torch.optim.AdamW(params, lr=0.1)
    give_gradients(params)
    base.step()
    state = copy.deepcopy(base.state_dict())
    composed = with_mirror_step(torch.optim.AdamW(params_like([(6, 3)])), alpha=3.0)
    composed.load_state_dict(state)
    assert composed.param_groups[0]["mirror_alpha"] == 3.0
    assert composed.param_groups[0]["lr"] == 0.1
    assert composed.param_groups is composed.base.param_groups


def snapshot(base):
    """The groups' contents with the identity of what they hold, and the state."""
    groups = [{key: (id(value), value) for key, value in group.items()} for group in base.param_groups]
    return groups, [id(group) for group in base.param_groups], dict(base.state), list(base.state.items())


REFUSED = {
    "sgd and auto": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"alpha": "auto"}, "SGD is not known to"),
    "lr 0 and auto": (lambda p: torch.optim.AdamW(p, lr=0.0), {"alpha": "auto"}, "lr is 0"),
    "a later group": (
        lambda p: torch.optim.AdamW([{"params": p[:1], "alpha": 2.0}, {"params": p[1:], "alpha": "much"}]),
        {},
        "alpha must be",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_leaves_the_optimizer_as_it_was(name):
    make, options, text = REFUSED[name]
    a, b = params_like([(6, 3), (3, 3)]), params_like([(6, 3), (3, 3)])
    base, beside = make(a), make(b)
    for o in (base, beside):
        give_gradients(a, b)
        o.step()
    before = snapshot(base)
    with pytest.raises((TypeError, ValueError), match=text):
        with_mirror_step(base, **options)
    assert snapshot(base) == before
    for group in (*base.param_groups, *beside.param_groups):
        group["lr"] = 0.1
        group.pop("alpha", None)
    give_gradients(a, b, seed=2)
    base.step()
    beside.step()
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert not torch.equal(a[0], params_like([(6, 3)])[0])
    assert with_mirror_step(base, alpha=2.5).param_groups[0]["mirror_alpha"] == 2.5  # no trace of the refusal


def test_a_refused_group_leaves_no_trace():
    a, b = params_like([(4, 4), (4, 4)])
    composed = with_mirror_step(torch.optim.AdamW([a], lr=1e-3), alpha="auto")
    group = {"params": [b], "lr": 0.0, "beta": 0.5}
    with pytest.raises(ValueError, match="lr is 0"):
        composed.add_param_group(group)
    assert len(composed.param_groups) == len(composed.base.param_groups) == 1
    assert group == {"params": [b], "lr": 0.0, "beta": 0.5}
    composed.add_param_group({**group, "lr": 1e-3})
    assert composed.param_groups[1]["mirror_beta"] == 0.5
    assert composed.param_groups[1]["mirror_alpha"] > 0


def test_an_optimizer_gets_one_mirror_step():
    base = torch.optim.SGD(params_like([(3, 3)]), lr=0.1)
    first = with_mirror_step(base, alpha=5.0)
    with pytest.raises(ValueError, match=r"SGD has a mirror step already.*mirror_alpha=5.0.*make a new SGD"):
        with_mirror_step(base, alpha=20.0)
    assert first.param_groups[0]["mirror_alpha"] == 5.0
    params = params_like([(3,), (3,)])  # but a group may bring its own strength under the long name
    rmsprop = torch.optim.RMSprop([{"params": params[:1], "mirror_alpha": 2.0}, {"params": params[1:]}])
    assert [g["mirror_alpha"] for g in with_mirror_step(rmsprop, alpha=3.0).param_groups] == [2.0, 3.0]


def test_auto_over_muon_is_for_steps_like_adams():
    def muon(**options):
        return torch.optim.Muon(params_like([(8, 8)]), lr=1e-3, **options)

    for options in ({}, {"adjust_lr_fn": "original"}):
        with pytest.raises(ValueError, match=r"Muon with adjust_lr_fn=.* square root .*adjust_lr_fn='match_rms_adamw'"):
            with_mirror_step(muon(**options), alpha="auto")
    with_mirror_step(muon(), alpha=5.0)  # a number is the user's own
    composed = with_mirror_step(muon(adjust_lr_fn="match_rms_adamw"), alpha="auto")
    adamw = with_mirror_step(torch.optim.AdamW(params_like([(8, 8)]), lr=1e-3, betas=(0.9, 0.95)), alpha="auto")
    assert composed.param_groups[0]["mirror_alpha"] == adamw.param_groups[0]["mirror_alpha"]
    (p,) = params_like([(8, 8)])
    with pytest.raises(ValueError, match="adjust_lr_fn='original'"):
        composed.add_param_group({"params": [p], "adjust_lr_fn": "original"})
    (q,) = params_like([(8, 8)])
    with_mirror_step(torch.optim.Muon([{"params": [q], "adjust_lr_fn": "match_rms_adamw"}], lr=1e-3), alpha="auto")


def test_auto_warns_when_a_larger_rate_is_loaded_from_the_base_optimizer():
    (p,) = params_like([(8, 8)])
    composed = with_mirror_step(torch.optim.AdamW([p], lr=1e-3), alpha="auto")
    composed.load_state_dict(torch.optim.AdamW([p], lr=1e-3).state_dict())  # warnings are errors
    composed.load_state_dict(with_mirror_step(torch.optim.AdamW([p], lr=1e-2), alpha="auto").state_dict())
    composed = with_mirror_step(torch.optim.AdamW([p], lr=1e-3), alpha="auto")
    with pytest.warns(UserWarning, match=r"mirror_alpha=.* for lr=0.001, and .* has lr=0.01"):
        composed.load_state_dict(torch.optim.AdamW([p], lr=1e-2).state_dict())


@pytest.mark.parametrize(
    ("base", "options", "text"),
    [
        (torch.optim.AdamW, {}, "build it first"),
        ("adamw", {}, "must be a torch optimizer"),
        (lambda: HORST(params_like([(3,)])), {}, "takes a mirror step already"),
        (lambda: torch.optim.SGD(params_like([(3,)])), {"alpha": (5.0, 1.0)}, "alpha"),
        (lambda: torch.optim.SGD([{"params": params_like([(3,)]), "max_step": "5"}]), {}, "max_step"),
    ],
)
def test_bad_input_is_refused(base, options, text):
    if callable(base) and not isinstance(base, type):
        base = base()
    with pytest.raises(TypeError, match=text):
        with_mirror_step(base, **options)


class Codes(torch.optim.SGD):
    """An optimizer that keeps codes in its state and saves a table with them, as those of 8 bits do."""

    def state_dict(self):
        return {**super().state_dict(), "table": [0.5]}

    def load_state_dict(self, state_dict):
        codes = [entry["codes"].clone() for entry in state_dict["state"].values()]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "table"})
        self.table = state_dict["table"]
        for p, code in zip(self.param_groups[0]["params"], codes, strict=True):
            self.state[p]["codes"] = code


def test_a_base_that_saves_and_loads_in_its_own_way_does_so_with_a_mirror_step():
    def make():
        params = params_like([(4,)], torch.bfloat16)
        base = Codes(params)
        base.state[params[0]]["codes"] = torch.tensor([1, 2, 3, 255], dtype=torch.uint8)
        return with_mirror_step(base, alpha=3.0)

    saved = make().state_dict()
    assert saved["param_groups"][0]["mirror_alpha"] == 3.0
    loaded = make()
    loaded.load_state_dict(saved)
    (state,) = loaded.state.values()
    assert state["codes"].dtype is torch.uint8
    assert loaded.base.table == [0.5]


def test_counters_of_an_operator_load_as_they_were_saved():
    def make():
        params = params_like([(4,)], torch.bfloat16)
        return with_mirror_step(OperatorOptimizer(params, Adam() @ Mirror(HyperbolicEntropy(0.1)) @ Adam()))

    optimizer, loaded = make(), make()
    give_gradients(optimizer.param_groups[0]["params"])
    optimizer.step()
    (state,) = optimizer.state.values()
    counters = [key for key in state if key.endswith(".step")]
    for key in counters:
        state[key].fill_(259.0)  # which bfloat16 lacks
    loaded.load_state_dict(optimizer.state_dict())
    (state,) = loaded.state.values()
    assert [state[key] for key in counters] == [torch.tensor(259.0)] * 2


@pytest.mark.parametrize("change", ["group", "state"])
def test_a_group_that_came_past_the_mirror_step_says_where_to_add_it(change):
    a, b = params_like([(3,), (2,)])
    adamw = torch.optim.AdamW([a])
    state = copy.deepcopy(adamw.state_dict())
    optimizer = with_mirror_step(adamw)
    if change == "group":
        adamw.add_param_group({"params": [b]})
    else:
        adamw.load_state_dict(state)
    for use in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        with pytest.raises(RuntimeError, match=r"a group of AdamW has no mirror_alpha.*what with_mirror_step returned"):
            use()


def test_hooks_of_saving_and_loading_run_once_each_on_both_optimizers():
    composed, seen = with_mirror_step(torch.optim.SGD(params_like([(4,)]))), []
    for optimizer in (composed, composed.base):
        name = type(optimizer).__name__
        optimizer.register_state_dict_pre_hook(lambda o, name=name: seen.append(f"saves {name}"))
        optimizer.register_state_dict_post_hook(lambda o, s, name=name: {**s, name: seen.append(f"saved {name}")})
        optimizer.register_load_state_dict_pre_hook(lambda o, s, name=name: seen.append(f"loads {name}"))
        optimizer.register_load_state_dict_post_hook(lambda o, name=name: seen.append(f"loaded {name}"))
    state = composed.state_dict()
    assert {"SGD", "WithMirrorStep"} <= set(state)
    composed.load_state_dict(state)
    assert seen == [
        *("saves WithMirrorStep", "saves SGD", "saved SGD", "saved WithMirrorStep"),
        *("loads WithMirrorStep", "loads SGD", "loaded SGD", "loaded WithMirrorStep"),
    ]


def test_a_hook_may_replace_the_state_that_is_loaded():
    composed = with_mirror_step(torch.optim.SGD(params_like([(4,)]), lr=0.1))
    state = composed.state_dict()
    other = copy.deepcopy(state)
    other["param_groups"][0].update(lr=0.2, mirror_alpha=1.0)
    composed.register_load_state_dict_pre_hook(lambda optimizer, given: other)
    composed.load_state_dict(state)
    assert (composed.param_groups[0]["lr"], composed.param_groups[0]["mirror_alpha"]) == (0.2, 1.0)


def test_a_mirror_step_beside_another_optimizer_loads_the_state_of_both():
    def make(lr):
        a, b = params_like([(4,), (3,)])
        return Together(with_mirror_step(torch.optim.AdamW([a], lr=lr), alpha=3.0), torch.optim.SGD([b], lr=lr))

    trained, loaded = make(0.1), make(0.2)
    pairs = [[p for group in o.param_groups for p in group["params"]] for o in (trained, loaded)]
    for k in range(2):
        give_gradients(*pairs, seed=k)
        trained.step()
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    with torch.no_grad():
        for p, q in zip(*pairs, strict=True):
            q.copy_(p)
    give_gradients(*pairs, seed=3)
    for optimizer in (trained, loaded):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(*pairs, strict=True))
