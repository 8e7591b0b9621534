"""What a change of masks does to the optimizer's state, for any optimizer, entry by entry."""

import itertools

import pytest
import torch
from sparse_methods import Tiny, adamw, loss_of, train_step
from torch import nn

from horst import HORST
from horst.sparsity import ACDC, Phases, StatePolicy
from horst.sparsity.state_policy import FIRST_MOMENTS, SECOND_MOMENTS


def train_to(policy, steps, make_optimizer=adamw, changes=(3, 6, 9)):
    model = Tiny()
    optimizer = make_optimizer(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.5, schedule=Phases(changes, end=20), policy=policy)
    for step in range(steps - 1):
        train_step(model, [optimizer], sparsifier, step)
    optimizer.zero_grad()
    loss_of(model, steps - 1).backward()
    optimizer.step()
    before = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
    masks_before = sparsifier.masks
    sparsifier.step()
    return model, optimizer, sparsifier, before, masks_before


def names_of(moments):
    return {
        "both": FIRST_MOMENTS + SECOND_MOMENTS,
        "first": FIRST_MOMENTS,
        "second": SECOND_MOMENTS,
    }.get(moments, moments)


@pytest.mark.parametrize("make_optimizer", [adamw, lambda p: HORST(p, lr=0.02)], ids=["adamw", "horst"])
@pytest.mark.parametrize(
    ("event", "rule", "moments"),
    [
        *itertools.product(["prune"], ["keep", "reset-pruned", "reset-all"], ["both", "first", "second"]),
        *itertools.product(["restore"], ["keep", "reset-regrown", "reset-all"], ["both", "first", ("exp_avg_sq",)]),
    ],
)
def test_every_policy_resets_what_it_says_and_nothing_else(event, rule, moments, make_optimizer):
    policy = StatePolicy(
        on_prune=rule if event == "prune" else "keep",
        on_restore=rule if event == "restore" else "keep",
        moments=moments,
    )
    _, optimizer, sparsifier, before, masks_before = train_to(policy, 3 if event == "prune" else 6, make_optimizer)
    by_param = {layer.param: layer.name for layer in sparsifier.layers}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            expected = before[p][key].clone()
            if key in names_of(moments) and rule == "reset-all":
                expected.zero_()
            elif key in names_of(moments) and rule != "keep" and p in by_param:
                masks = sparsifier.masks if event == "prune" else masks_before
                expected[~masks[by_param[p]]] = 0
            assert torch.equal(value, expected), (key, rule)


def test_the_acdc_preset_is_the_references():
    from horst.sparsity.state_policy import ACDC_REFERENCE

    def momentum_sgd(p):
        return torch.optim.SGD(p, lr=0.05, momentum=0.9)

    _, optimizer, _, before, _ = train_to(ACDC_REFERENCE, 3, momentum_sgd)  # prune: nothing
    assert all(torch.equal(s["momentum_buffer"], before[p]["momentum_buffer"]) for p, s in optimizer.state.items())
    _, optimizer, _, _, _ = train_to(ACDC_REFERENCE, 6, momentum_sgd)  # restore: the momentum of all parameters
    assert len(optimizer.state) == len(list(Tiny().parameters()))
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_under_adam_the_acdc_preset_keeps_second_moments_and_steps():
    from horst.sparsity.state_policy import ACDC_REFERENCE

    _, optimizer, _, before, _ = train_to(ACDC_REFERENCE, 6)
    for p, state in optimizer.state.items():
        assert not state["exp_avg"].any()
        assert torch.equal(state["exp_avg_sq"], before[p]["exp_avg_sq"])
        assert state["step"] == 6


def test_step_counts_restart_only_when_asked():
    policy = StatePolicy(on_restore="reset-all", reset_step=True)
    _, optimizer, _, _, _ = train_to(policy, 6)
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_the_step_count_of_a_scalar_parameter_is_not_taken_for_a_moment():
    class WithScale(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return self.scale * self.fc(x)

    model = WithScale()
    optimizer = adamw(model.parameters())
    policy = StatePolicy(on_prune="reset-all")
    sparsifier = ACDC(model, optimizer, sparsity=0.5, schedule=Phases((2,), end=5), policy=policy, layers="all_linear")
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        sparsifier.step()
    assert optimizer.state[model.scale]["step"] == 2
    assert optimizer.state[model.scale]["exp_avg"] == 0


def test_other_scalars_of_a_scalar_parameter_are_not_taken_for_moments():
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(4, 4)), "scale": nn.Parameter(torch.tensor(1.0))})
    optimizer = torch.optim.NAdam(model.parameters())
    (model["scale"] * model["w"]).sum().backward()
    optimizer.step()
    product = optimizer.state[model["scale"]]["mu_product"].clone()
    assert product != 0
    StatePolicy(on_prune="reset-all").apply("prune", [optimizer], {})
    assert optimizer.state[model["scale"]]["mu_product"] == product  # NAdam's bias correction, not a moment
    assert optimizer.state[model["scale"]]["exp_avg"] == 0


def test_integer_step_counts_and_foreign_entries():
    """A third-party optimizer: an int step, a factored state, an 8-bit state, and a weight-shaped state."""

    class Foreign(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state.update(step=0, velocity=torch.ones_like(p), rows=torch.ones(p.shape[0]))
                        state["codes"] = torch.ones(p.shape, dtype=torch.uint8)
                    state["step"] += 1

    policy = StatePolicy(on_prune="reset-all", reset_step=True)
    model = Tiny()
    optimizer = Foreign(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.5, schedule=Phases((1,), end=5), policy=policy)
    train_step(model, [optimizer], sparsifier, 0)
    state = optimizer.state[model.blocks[0].fc1.weight]
    assert not state["velocity"].any()
    assert state["rows"].all()
    assert state["codes"].all()
    assert state["step"] == 0


def test_moments_that_the_optimizer_does_not_have_are_refused_at_the_first_step():
    model = Tiny()
    optimizer = torch.optim.Adagrad(model.parameters())
    sparsifier = ACDC(model, optimizer, sparsity=0.5, schedule=Phases((10,), end=20))
    with pytest.raises(ValueError, match=r"the state of Adagrad has \['sum'\]. Name the entries to reset"):
        train_step(model, [optimizer], sparsifier, 0)


def test_plain_sgd_has_no_state_and_that_is_fine():
    train_to(StatePolicy(on_restore="reset-all", moments="first"), 6, lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"on_prune": "reset-regrown"}, "on_prune must be one of"),
        ({"on_restore": "zero"}, "on_restore must be one of"),
        ({"moments": "third"}, "moments must be 'both', 'first', 'second' or a tuple"),
        ({"reset_step": True}, "only 'reset-all' does"),
    ],
)
def test_bad_policies_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        StatePolicy(**arguments)
