"""Torch's own inputs for AdamW, given to HORST and HAM: the battery of its test_optim, for what ships with torch."""

import copy
import io
import re

import pytest
import torch
from torch import nn

from horst import HAM, HORST

pytest.importorskip("expecttest", reason="torch.testing._internal needs it")
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("CUDA_HOME", "")  # else it warns where there is no GPU
    patch.setattr(torch.backends, "disable_global_flags", lambda: None)  # which would hold for all other tests
    from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims, optim_inputs_func_adamw

pytestmark = pytest.mark.filterwarnings("default:optimizer parameters need to be organized:FutureWarning")
CLASSES = pytest.mark.parametrize("cls", [HORST, HAM])
INPUTS = [found for found in optim_inputs_func_adamw("cpu") if "amsgrad" not in found.kwargs]
KWARGS = pytest.mark.parametrize("kwargs", [found.kwargs for found in INPUTS], ids=[found.desc for found in INPUTS])
BACKENDS = pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])


def linear() -> tuple[nn.Parameter, nn.Parameter, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(10, 5)), nn.Parameter(torch.randn(10)), torch.randn(5)


def closure_for(optimizer, weight, bias, given):
    def closure():
        optimizer.zero_grad()
        loss = (weight.mv(given) + bias).pow(2).sum()
        loss.backward()
        return loss

    return closure


@CLASSES
@KWARGS
@BACKENDS
def test_it_goes_the_right_way(cls, kwargs, foreach):
    weight, bias, given = linear()
    # HAM's alpha of 200 is for small gradients, which these are not
    optimizer = cls([weight, bias], foreach=foreach, alpha=1.0, **kwargs)
    closure = closure_for(optimizer, weight, bias, given)
    first = closure().item()
    for _ in range(20):
        optimizer.step(closure)
    last = closure().item()
    assert last > first if kwargs.get("maximize") else last < first


@CLASSES
@KWARGS
def test_both_backends_take_the_same_steps(cls, kwargs):
    ends = []
    for foreach in (False, True):
        weight, bias, given = (x.double() for x in linear())
        weight, bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        optimizer = cls([weight, bias], foreach=foreach, **kwargs)
        for _ in range(7):
            optimizer.step(closure_for(optimizer, weight, bias, given))
        ends.append((weight.detach(), bias.detach()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


@CLASSES
@KWARGS
@BACKENDS
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_the_state_dict_is_deterministic(cls, kwargs, foreach, tensor_lr):
    if tensor_lr:
        kwargs = {**kwargs, "lr": torch.tensor(kwargs.get("lr", 1e-3))}
    weight, bias, given = linear()
    optimizer = cls([weight, bias], foreach=foreach, **kwargs)
    for _ in range(5):
        optimizer.step(closure_for(optimizer, weight, bias, given))
    again = [nn.Parameter(p.detach().clone()) for p in (weight, bias)]
    other = cls(again, foreach=foreach, **kwargs)
    before = [set(group) for group in other.param_groups]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [set(group) for group in other.param_groups] == before
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # twice is once
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for _ in range(5):
        optimizer.step(closure_for(optimizer, weight, bias, given))
        other.step(closure_for(other, *again, given))
    torch.testing.assert_close(again, [weight, bias], rtol=0, atol=0)


@CLASSES
@KWARGS
def test_an_older_state_dict_loads(cls, kwargs):
    weight, bias, given = linear()
    optimizer = cls([weight, bias], **kwargs)
    optimizer.step(closure_for(optimizer, weight, bias, given))
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for key in ("foreach", "fused", "maximize", "capturable", "stochastic_rounding", "l1"):
            group.pop(key, None)
    optimizer.load_state_dict(old)
    optimizer.step(closure_for(optimizer, weight, bias, given))
    for entry in old["state"].values():  # torch 1.11 and older counted in a number
        entry["step"] = float(entry["step"])
    optimizer.load_state_dict(old)
    optimizer.step(closure_for(optimizer, weight, bias, given))


@CLASSES
@KWARGS
def test_a_file_loads_with_weights_only(cls, kwargs):
    weight, bias, given = linear()
    optimizer = cls([weight, bias], **kwargs)
    optimizer.step(closure_for(optimizer, weight, bias, given))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.testing.assert_close(loaded["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]


@CLASSES
@KWARGS
def test_without_gradients_nothing_moves(cls, kwargs):
    weight, bias, _ = linear()
    before = [weight.detach().clone(), bias.detach().clone()]
    optimizer = cls([weight, bias], **kwargs)
    optimizer.step()
    torch.testing.assert_close([weight.detach(), bias.detach()], before, rtol=0, atol=0)
    assert not optimizer.state


@CLASSES
def test_a_copy_has_all_public_attributes_and_the_optimizer_prints(cls):
    optimizer = cls([nn.Parameter(torch.ones(3))])
    public = {name for name in vars(optimizer) if not name.startswith("_")}
    assert {name for name in vars(copy.deepcopy(optimizer)) if not name.startswith("_")} == public
    assert repr(optimizer).startswith(f"{cls.__name__} (\nParameter Group 0")


@CLASSES
def test_hooks_of_a_step_run_in_order(cls):
    seen = []
    optimizer = cls([nn.Parameter(torch.ones(3))])
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    assert seen == ["before", "after"]


@CLASSES
@pytest.mark.parametrize("number", range(len(get_error_inputs_for_all_optims("cpu", torch.float32))))
def test_what_every_torch_optimizer_refuses_is_refused(cls, number):
    error = get_error_inputs_for_all_optims("cpu", torch.float32)[number]
    given = error.optimizer_error_input
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            cls(given.params, **given.kwargs)
    else:
        ours = re.escape("lr as a tensor must have one element") if "lr" in given.kwargs else error.error_regex
        with pytest.raises(error.error_type, match=ours):
            cls(given.params, **given.kwargs)
