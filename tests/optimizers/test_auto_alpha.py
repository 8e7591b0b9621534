"""alpha="auto": the rule, the bound on the learning rate, and what loads, warns and is refused."""

import copy
import math
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from horst import HAM, HORST, param_groups, with_mirror_step
from horst.integrations.matrices import MatrixHORST
from horst.optimizers.auto_alpha import root_mean_square
from horst.optimizers.l1 import soft_threshold

BETAS = (0.9, 0.95)
RATE = 0.2 * math.sqrt(1 - 0.95)  # of these betas


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def size(module: nn.Module) -> float:
    flat = torch.cat([p.detach().flatten() for p in module.parameters() if p.dim() > 1])
    return flat.square().mean().sqrt().item()


@given(
    lr=st.floats(1e-7, 1.0),
    beta2=st.floats(0.0, 0.9999),
    sizes=st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=3),
    prefix=st.sampled_from(["", "mirror_"]),
)
def test_alpha_is_the_rate_over_the_clipped_learning_rate_and_at_most_4_over_the_weights_size(lr, beta2, sizes, prefix):
    weights = [nn.Parameter(torch.full((i + 2, 3), size, dtype=torch.float64)) for i, size in enumerate(sizes)]
    rms = math.sqrt(
        sum(p.numel() * size**2 for p, size in zip(weights, sizes, strict=True)) / sum(map(torch.numel, weights))
    )
    rate, max_step = 0.2 * math.sqrt(1 - beta2), 0.1 * rms
    assume(abs(lr / max_step - 1) > 1e-6)
    bias = nn.Parameter(torch.full((5,), 100.0))  # matrices alone count
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if prefix:
            adamw = torch.optim.AdamW([*weights, bias], lr=lr, betas=(0.9, beta2))
            (group,) = with_mirror_step(adamw, alpha="auto").param_groups
        else:
            (group,) = HORST([*weights, bias], lr=lr, betas=(0.9, beta2), alpha="auto").param_groups
    assert group[prefix + "alpha"] == pytest.approx(min(rate / min(lr, max_step), 2 / rms))
    assert group[prefix + "max_step"] == pytest.approx(max_step)
    assert ["clips it to" in str(warning.message) for warning in told] == [True] * (lr > max_step)


@pytest.mark.parametrize(("beta2", "rate"), [(0.999, 0.0063), (0.95, 0.0447), (0.8, 0.0894)])
def test_the_rate_follows_the_memory_of_squared_gradients(beta2, rate):
    (group,) = HORST([nn.Parameter(torch.full((4, 4), 0.02))], lr=1e-3, alpha="auto", betas=(0.9, beta2)).param_groups
    assert group["alpha"] * 1e-3 == pytest.approx(rate, abs=5e-5)


def test_each_group_has_its_own_learning_rate_and_the_size_of_all():
    net = model()
    groups = param_groups(net, weight_decay=0.1, alpha="auto", mirror="matrices")
    groups[0]["lr"] = 1e-2
    resolved = HORST(groups, lr=torch.tensor(1e-3), betas=BETAS).param_groups
    assert [g["alpha"] for g in resolved] == [pytest.approx(RATE / 1e-2), 0.0]
    assert resolved[0]["max_step"] == pytest.approx(0.1 * size(net))
    assert resolved[1]["max_step"] is None  # which has no alpha to choose
    assert root_mean_square([torch.full((3,), 2.0)]) == 2.0


@given(scale=st.floats(1e-3, 2.0), lr=st.floats(1e-7, 1e-1), beta2=st.sampled_from([0.9, 0.95, 0.999]))
def test_the_mirror_half_is_a_small_multiple_of_adams_half_whatever_the_learning_rate(scale, lr, beta2):
    """A rate alone made alpha 791 at a learning rate of 2e-5, which destroyed a trained model within five steps."""
    weight = nn.Parameter(torch.full((16, 16), scale))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a learning rate that is large beside the weights is clipped
        (group,) = HORST([weight], lr=lr, betas=(0.9, beta2), alpha="auto").param_groups
    assert group["alpha"] * scale <= 4.0 * (1 + 1e-6)
    assert group["alpha"] * min(lr, group["max_step"]) <= 0.2


def test_fine_tuning_with_auto_stays_near_adamw():
    """A trained network goes on with a learning rate of 2e-5: no optimizer may lose what was learnt."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    inputs = torch.randn(512, 16)
    targets = torch.sin(2 * inputs)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss_of(module):
        return (module(inputs) - targets).square().mean()

    def train(module, optimizer, steps):
        for _ in range(steps):
            loss_of(module).backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss_of(module).item()

    trained = train(net, adam, 300)
    tuned = {}
    for name, options in {"adamw": {"alpha": 0.0}, "auto": {"alpha": "auto"}}.items():
        own = copy.deepcopy(net)
        tuned[name] = train(own, HORST(own.parameters(), lr=2e-5, betas=BETAS, **options), 20)
    assert tuned["adamw"] < trained
    assert tuned["auto"] < trained


def mirrored(params, lr, bounds=None, **options):
    return HORST([{"params": list(params), **(bounds or {})}], lr=lr, betas=BETAS, **options)


def with_adamw(params, lr, bounds=None, **options):
    base = torch.optim.AdamW([{"params": list(params), **(bounds or {})}], lr=lr, betas=BETAS)
    return with_mirror_step(base, **options)


BOTH = pytest.mark.parametrize(("make", "prefix"), [(mirrored, ""), (with_adamw, "mirror_")])


@BOTH
def test_a_learning_rate_that_is_large_beside_the_weights_is_held(make, prefix):
    """Neither half of a step moves a weight of the usual size by more than a tenth."""
    start = torch.full((8, 8), 0.02)

    def train(lr, alpha, **options) -> tuple[torch.Tensor, dict]:
        p = nn.Parameter(start.clone())
        optimizer = make([p], lr, alpha=alpha, **options)
        for _ in range(3):
            p.grad = torch.ones(8, 8)
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == lr  # what the schedule and the logs see
        return p.detach(), optimizer.param_groups[0]

    with pytest.warns(UserWarning, match=r"lr=0.05 is more than 0.1 times .* clips it to 0.002. Lower lr, or keep all"):
        held, group = train(0.05, "auto")
    exactly, at_the_bound = train(0.1 * root_mean_square([start]), "auto")
    torch.testing.assert_close(held, exactly, rtol=0, atol=0)
    options = [prefix + name for name in ("alpha", "max_step")]
    assert [group[option] for option in options] == [at_the_bound[option] for option in options]
    assert group[prefix + "max_step"] == pytest.approx(0.002)
    free, group = train(0.05, "auto", bounds={"max_step": 0.05})  # silent: warnings are errors here
    assert group[prefix + "max_step"] == 0.05
    assert group[prefix + "alpha"] * 0.05 == pytest.approx(RATE)
    assert free.max() < held.min()


@BOTH
@pytest.mark.parametrize("kind", ["float", "tensor"])
@given(lr=st.floats(1e-4, 1e-1), bound=st.floats(1e-4, 1e-1), beta=st.sampled_from([0.0, 0.1]))
def test_a_bounded_learning_rate_is_the_smaller_of_the_two_in_every_part_of_the_step(
    make, prefix, kind, lr, bound, beta
):
    del prefix

    def train(lr, **options) -> torch.Tensor:
        p = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))
        rate = torch.tensor(lr, dtype=torch.float64) if kind == "tensor" else lr
        optimizer = make([p], rate, alpha=5.0, beta=beta, **options)
        for i in range(3):
            p.grad = torch.cos(torch.arange(16, dtype=torch.float64) + i).reshape(4, 4)
            optimizer.step()
        return p.detach()

    torch.testing.assert_close(train(lr, bounds={"max_step": bound}), train(min(lr, bound)), rtol=1e-12, atol=0)


def test_the_soft_threshold_follows_the_bounded_learning_rate_and_unmirrored_tensors_the_given_one():
    weight, bias = nn.Parameter(torch.full((4, 4), 0.02)), nn.Parameter(torch.full((4,), 0.02))
    group = {"params": [weight, bias], "max_step": 1e-3}
    optimizer = MatrixHORST([group], lr=0.1, weight_decay=0.0, alpha=1.0, l1=1.0)
    weight.grad, bias.grad = torch.zeros(4, 4), torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 0.019))
    torch.testing.assert_close(bias.detach(), torch.full((4,), -0.08))


@pytest.mark.parametrize("backend", [{"foreach": False}, {"foreach": True}, {"capturable": True}])
def test_a_compiled_step_holds_the_learning_rate_too(backend):
    def train(compiled: bool) -> torch.Tensor:
        p = nn.Parameter(torch.full((8, 8), 0.02))
        lr = torch.tensor(0.05)
        optimizer = HORST([{"params": [p], "max_step": 2e-3}], lr=lr, betas=BETAS, alpha="auto", **backend)
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for rate in (0.05, 1e-3, 1e-2):
            lr.fill_(rate)
            p.grad = torch.ones(8, 8)
            step()
        return p.detach()

    torch.testing.assert_close(train(compiled=True), train(compiled=False), rtol=1e-6, atol=0)


def test_each_group_has_the_rate_of_its_own_memory_and_an_optimizer_without_one_that_of_095():
    net = model()
    groups = [{"params": [net[0].weight]}, {"params": [net[2].weight], "betas": BETAS}]
    long, short = (group["alpha"] for group in HORST(groups, lr=1e-2, alpha="auto").param_groups)
    assert long == pytest.approx(0.2 * math.sqrt(1e-3) / 1e-2)
    assert short == pytest.approx(RATE / 1e-2)
    muon = torch.optim.Muon([nn.Parameter(torch.full((4, 4), 0.2))], lr=1e-2, adjust_lr_fn="match_rms_adamw")
    assert with_mirror_step(muon, alpha="auto").param_groups[0]["mirror_alpha"] == pytest.approx(short)
    adamw = torch.optim.AdamW(model().parameters(), lr=1e-2)
    assert with_mirror_step(adamw, alpha="auto").param_groups[0]["mirror_alpha"] == pytest.approx(long)


def test_empty_tensors_and_scalars_have_a_size():
    weights = [nn.Parameter(torch.tensor(0.02)), nn.Parameter(torch.zeros(0, 5))]  # an empty matrix is no matrix
    (group,) = HORST(weights, lr=1e-3, alpha="auto", betas=BETAS).param_groups
    assert group["alpha"] == pytest.approx(RATE / 1e-3)
    assert group["max_step"] == pytest.approx(0.002)


def test_a_group_added_later_is_resolved_by_its_own_weights():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = HORST(first.parameters(), lr=1e-3, alpha="auto", betas=BETAS)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 1e-2})
    assert optimizer.param_groups[1]["alpha"] == pytest.approx(RATE / 1e-2)
    assert optimizer.param_groups[1]["max_step"] == pytest.approx(0.1 * size(second))
    with pytest.raises(ValueError, match="lr is 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": 0.0})
    assert len(optimizer.param_groups) == 2


def test_a_schedule_scales_both_steps_and_a_checkpoint_keeps_the_choice():
    net = model()
    optimizer = HORST(net.parameters(), lr=1e-2, alpha="auto", betas=BETAS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    assert optimizer.param_groups[0]["alpha"] * scheduler.get_last_lr()[0] == pytest.approx(0.1 * RATE)
    other = model()
    for p in other.parameters():
        p.data.mul_(3)
    resumed = HORST(other.parameters(), lr=7e-3, alpha="auto", betas=BETAS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    chosen = {key: optimizer.param_groups[0][key] for key in ("alpha", "max_step")}
    assert resumed.param_groups[0].items() >= chosen.items()
    resumed.load_state_dict(torch.optim.AdamW(net.parameters()).state_dict())
    assert resumed.param_groups[0].items() >= chosen.items()


def test_adamw_with_a_mirror_step_and_auto_is_horst_with_auto():
    nets = [model().double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    groups = [param_groups(net, weight_decay=0.1, alpha="auto", mirror="all") for net in nets]
    optimizers = [HORST(groups[0], lr=1e-2), with_mirror_step(torch.optim.AdamW(groups[1], lr=1e-2))]
    for _ in range(50):
        x = torch.randn(16, 6, dtype=torch.float64)
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-10)
    for option in ("alpha", "max_step"):
        assert optimizers[1].param_groups[0][f"mirror_{option}"] == optimizers[0].param_groups[0][option]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: HORST(model().parameters(), lr=0.0, alpha="auto"), "peak of the schedule"),
        (lambda: HORST(model().to("meta").parameters(), alpha="auto"), "meta device"),
        (lambda: HORST([nn.Parameter(torch.zeros(2, 2))], alpha="auto"), "root mean square is 0"),
        (lambda: HORST(model().parameters(), alpha="automatic"), "'auto', got 'automatic'"),
        (lambda: mirrored(model().parameters(), 1e-3, {"max_step": 0.0}), "max_step must be above 0"),
        (lambda: mirrored(model().parameters(), 1e-3, {"max_step": math.nan}), "max_step must be a number"),
        (lambda: mirrored(model().parameters(), 1e-3, {"max_step": "5"}), "max_step must be a number"),
        (lambda: with_adamw(model().parameters(), 1e-3, {"max_step": -1}), "max_step must be a number"),
        (lambda: param_groups(model(), weight_decay=0.0, alpha="Auto"), "'auto', got 'Auto'"),
        (lambda: HAM(model().parameters(), alpha="auto"), "HAM's mirror step goes along the raw gradient"),
        (lambda: with_mirror_step(torch.optim.SGD(model().parameters(), lr=0.1), alpha="auto"), "SGD is not known to"),
    ],
)
def test_what_auto_cannot_know_is_refused(make, error):
    with pytest.raises((TypeError, ValueError), match=error):
        make()


def test_a_state_of_adamw_made_with_our_groups_leaves_the_choice_as_it_is():
    model = nn.Linear(16, 16)

    def groups():
        return param_groups(model, weight_decay=0.1, alpha="auto")

    adamw = torch.optim.AdamW(groups(), lr=1e-3)
    model(torch.ones(1, 16)).sum().backward()
    adamw.step()
    horst = HORST(groups(), lr=1e-3, betas=BETAS)
    before = [(g["alpha"], g["max_step"]) for g in horst.param_groups]
    horst.load_state_dict(adamw.state_dict())
    assert [(g["alpha"], g["max_step"]) for g in horst.param_groups] == before
    horst.step()


@BOTH
def test_a_learning_rate_above_the_one_it_was_built_for_warns_once(make, prefix):
    weight = nn.Parameter(torch.full((8, 8), 0.02))
    optimizer = make([weight], 5e-4, alpha="auto")
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # silent: warnings are errors here
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.warns(
        UserWarning, match=r"for lr=0.0005, and it now has lr=0.001: alpha \* lr is 0.0894, not 0.0447"
    ) as told:
        optimizer.step()
    assert [warning.filename for warning in told] == [__file__]
    optimizer.step()

    optimizer = make([weight], 1e-3, alpha="auto")
    state = torch.optim.AdamW([weight], lr=1e-2).state_dict()
    said = rf"has lr=0.01, clipped to {prefix}max_step=0.00\d+: alpha \* lr is"
    with pytest.warns(UserWarning, match=said) as told:
        optimizer.load_state_dict(state)
    assert [warning.filename for warning in told] == [__file__]
    optimizer.step()


@BOTH
def test_a_learning_rate_that_is_clipped_later_is_told_and_one_that_was_from_the_start_is_not_told_again(make, prefix):
    del prefix
    weight = nn.Parameter(torch.full((8, 8), 0.02))
    weight.grad = torch.ones_like(weight)
    optimizer = make([weight], 0.0019, alpha="auto")  # just below the bound
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.warns(UserWarning, match="it now has lr=0.05, clipped to"):
        optimizer.step()
    with pytest.warns(UserWarning, match="clips it to 0.00") as told:
        optimizer = make([weight], 0.01, alpha="auto")
    assert [warning.filename for warning in told] == [__file__]
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()


def test_groups_that_are_clipped_are_told_of_once_and_an_error_leaves_no_group_behind():
    weights = [nn.Parameter(torch.full((8, 8), 0.02)) for _ in range(3)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(weights, (1e-2, 5e-3, 1e-3), strict=True)]
    with pytest.warns(UserWarning, match=r"lr=0.01 is more than .* group\['max_step'\] = 0.01 in each") as told:
        optimizer = HORST(groups, betas=BETAS, alpha="auto")
    assert len(told) == 1
    assert [group["max_step"] for group in optimizer.param_groups] == pytest.approx([0.002] * 3)
    with pytest.raises(UserWarning, match="clips it to"):  # warnings are errors here
        optimizer.add_param_group({"params": [nn.Parameter(torch.full((8, 8), 0.02))], "lr": 0.1})
    assert len(optimizer.param_groups) == 3


def test_a_bounded_learning_rate_is_the_one_whose_product_is_warned_of():
    p = nn.Parameter(torch.ones(4, 4))
    p.grad = torch.ones(4, 4)
    mirrored([p], 1.0, {"max_step": 1e-3}, alpha=5.0).step()  # silent: the product is 0.005
    with pytest.warns(UserWarning, match=r"alpha \* lr is 5"):
        HORST([p], lr=1.0, alpha=5.0).step()


def test_a_closure_sees_the_learning_rate_that_was_given_and_may_schedule_it():
    weight = nn.Parameter(torch.full((8, 8), 0.02))
    optimizer = with_adamw([weight], 0.01, {"max_step": 1e-3}, alpha=5.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    seen = []

    def closure():
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        scheduler.step()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert seen == [0.01, 0.005]
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert weight.max() > 0.017  # two steps of 1e-3


def test_a_rate_that_the_optimizer_sets_itself_stays():
    class Halving(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] /= 2

    weight = nn.Parameter(torch.ones(3))
    optimizer = with_mirror_step(Halving([{"params": [weight], "max_step": 0.1}], lr=0.4), alpha=1.0)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05  # half of what it was given


def test_a_soft_threshold_after_a_mirror_step_follows_its_bound():
    weight = nn.Parameter(torch.full((8, 8), 0.02))
    base = torch.optim.AdamW([{"params": [weight], "l1": 1.0, "max_step": 0.002}], lr=0.01, weight_decay=0.0)
    optimizer = with_mirror_step(base, alpha=5.0)
    soft_threshold(optimizer)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((8, 8), 0.018))


def test_a_bound_that_was_given_survives_a_state_of_adamw_with_our_groups():
    net = model()
    adamw = torch.optim.AdamW(param_groups(net, weight_decay=0.1, alpha=5.0), lr=1e-3)
    groups = param_groups(net, weight_decay=0.1, alpha=5.0)
    optimizer = HORST([{**group, "max_step": 5e-4} for group in groups], lr=1e-3)
    optimizer.load_state_dict(adamw.state_dict())
    assert {group["max_step"] for group in optimizer.param_groups} == {5e-4}


def test_the_peak_that_a_group_knows_of_counts_and_not_a_moment_of_its_schedule():
    weight = nn.Parameter(torch.full((8, 8), 0.02))
    (group,) = HORST([{"params": [weight], "lr": 1e-5, "initial_lr": 1e-3}], betas=BETAS, alpha="auto").param_groups
    assert group["alpha"] == pytest.approx(RATE / 1e-3)


def test_frozen_weights_do_not_count():
    small, large = nn.Parameter(torch.full((8, 64), 0.1)), nn.Parameter(torch.full((400, 400), 0.5))
    large.requires_grad_(False)
    (group,) = HORST([small, large], lr=1e-3, betas=BETAS, alpha="auto").param_groups
    (alone,) = HORST([small], lr=1e-3, betas=BETAS, alpha="auto").param_groups
    assert (group["alpha"], group["max_step"]) == (alone["alpha"], alone["max_step"])


@pytest.mark.parametrize("optimizer_class", [HORST, MatrixHORST])
def test_a_group_of_zeros_that_is_added_later_takes_the_size_of_the_others(optimizer_class):
    weight = nn.Parameter(torch.full((16, 16), 0.02))
    optimizer = optimizer_class([weight], lr=1e-3, betas=BETAS, alpha="auto")
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))]})
    first, second = optimizer.param_groups
    assert (second["alpha"], second["max_step"]) == pytest.approx((first["alpha"], first["max_step"]))


def test_where_nothing_gets_the_mirror_step_there_is_nothing_to_choose():
    optimizer = MatrixHORST([nn.Parameter(torch.zeros(8))], lr=1e-3, alpha="auto")  # biases alone are tuned
    assert optimizer.param_groups[0]["alpha"] == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda m: MatrixHORST(m.parameters()),
        lambda m: HAM(m.parameters()),
        lambda m: HORST(m.parameters(), alpha="auto"),
        lambda m: param_groups(m, weight_decay=0.1, alpha=5.0),
    ],
)
def test_pieces_that_fsdp1_has_flattened_are_refused_where_shapes_count(make):
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().flatten())
    for p in model.parameters():
        p._fsdp_flattened = True  # what FullyShardedDataParallel marks them by
    with pytest.raises(ValueError, match=r"has flattened these\. Use FSDP2"):
        make(model)
    HORST(model.parameters(), alpha=5.0)  # takes the mirror step on everything, whatever its shape
