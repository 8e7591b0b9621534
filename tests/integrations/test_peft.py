"""LoRA: what alpha does to an adapter, what merging does to zeros, and adapters that leave the zeros alone."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from horst import HORST, param_groups
from horst.integrations.peft import keep_zeros, merge_and_unload

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")


class Net(nn.Module):
    """One of each kind of linear layer that LoRA knows."""

    def __init__(self):
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 10), Conv1D(4, 10)

    def forward(self, x):
        return self.conv(torch.tanh(self.linear(x)))


def pruned_net(dtype=torch.float64):
    torch.manual_seed(0)
    net = Net().to(dtype)
    for layer in (net.linear, net.conv):
        layer.weight.data *= torch.rand(layer.weight.shape) < 0.4
    return net


def with_lora(net, **options):
    config = {"r": 3, "target_modules": ["linear", "conv"], "init_lora_weights": False, **options}
    return get_peft_model(copy.deepcopy(net), LoraConfig(**config), autocast_adapter_dtype=False)


def batch(dtype=torch.float64):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def zeros_of(net):
    return {name: getattr(net, name).weight == 0 for name in ("linear", "conv")}


def train(model):
    optimizer = HORST(param_groups(model, weight_decay=0.0, alpha=5.0), lr=0.02)
    for _ in range(5):
        optimizer.zero_grad()
        (model(batch()) - 1).square().mean().backward()
        optimizer.step()


def test_b_starts_at_zero_and_leaves_it_by_adamws_half():
    model = with_lora(pruned_net(), init_lora_weights=True)
    b = model.base_model.model.linear.lora_B["default"].weight
    assert not b.any()
    optimizer = HORST([b], lr=0.02, eps=0.0, weight_decay=0.0, alpha=5.0)
    model(batch()).square().mean().backward()
    optimizer.step()
    # Adam's first step is lr in size, and the mirror step, which goes the same way, stretches it by exp(alpha * lr)
    moved = b.detach().abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.02 * math.exp(5.0 * 0.02)))


def test_merging_an_ordinary_adapter_fills_the_zeros():
    net = pruned_net()
    merged = with_lora(net).merge_and_unload()
    assert not any((getattr(merged, name).weight == 0).any() for name in zeros_of(net))


def test_the_forward_pass_is_that_of_the_masked_sum():
    net = pruned_net()
    model = with_lora(net)
    keep_zeros(model)
    keep_zeros(model)  # a second call changes nothing
    out = model(batch())
    out.square().sum().backward()
    weights = {}
    grads = {}
    for name, zeros in zeros_of(net).items():
        layer = getattr(model.base_model.model, name)
        a, b = (getattr(layer, f"lora_{key}")["default"].weight for key in "AB")
        grads[name] = (a.grad.clone(), b.grad.clone())
        a, b = (t.detach().clone().requires_grad_() for t in (a, b))
        delta = layer.scaling["default"] * (b @ a)
        weights[name] = (
            getattr(net, name).weight.detach() + torch.where(zeros, 0, delta.T if name == "conv" else delta),
            a,
            b,
        )
    hidden = torch.tanh(batch() @ weights["linear"][0].T + net.linear.bias)
    expected = hidden @ weights["conv"][0] + net.conv.bias
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    expected.square().sum().backward()
    for name, (_, a, b) in weights.items():
        torch.testing.assert_close(grads[name], (a.grad, b.grad), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_is_merged_is_what_was_trained_and_its_zeros_are_the_bases(dropout):
    net = pruned_net()
    model = with_lora(net, init_lora_weights=True, lora_dropout=dropout)
    keep_zeros(model)
    train(model)
    model.eval()
    expected = model(batch())
    with model.disable_adapter():
        torch.testing.assert_close(model(batch()), net(batch()))
    merged = merge_and_unload(model)
    torch.testing.assert_close(merged(batch()), expected, rtol=1e-12, atol=1e-12)
    for name, zeros in zeros_of(net).items():
        assert torch.equal(getattr(merged, name).weight == 0, zeros), name
        assert not torch.equal(getattr(merged, name).weight, getattr(net, name).weight), name
    assert not any("horst" in key for key in merged.state_dict())


def test_pefts_own_merging_keeps_the_zeros_and_the_outputs():
    net = pruned_net()
    model = with_lora(net)
    keep_zeros(model)
    expected = model(batch())

    def check(layers):
        torch.testing.assert_close(model(batch()), expected, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(layers[name].weight == 0, zeros) for name, zeros in zeros_of(net).items())

    layers = {name: getattr(model.base_model.model, name).get_base_layer() for name in zeros_of(net)}
    for safe_merge in (False, True):
        model.merge_adapter(safe_merge=safe_merge)
        check(layers)
        model.unmerge_adapter()
        check(layers)
    model = model.merge_and_unload()
    check({name: getattr(model, name) for name in layers})


def test_an_adapter_is_saved_as_pefts_own_and_masked_again_after_loading(tmp_path):
    net = pruned_net()
    model = with_lora(net)
    keep_zeros(model)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(net), tmp_path, autocast_adapter_dtype=False)
    assert not torch.allclose(loaded(batch()), model(batch()))
    keep_zeros(loaded)
    assert torch.equal(loaded(batch()), model(batch()))


def test_a_half_precision_base_keeps_its_dtype():
    net = pruned_net(torch.bfloat16)
    model = get_peft_model(copy.deepcopy(net), LoraConfig(target_modules=["linear"], init_lora_weights=False))
    keep_zeros(model)
    assert model.base_model.model.linear.lora_A["default"].weight.dtype is torch.float32
    assert model(batch(torch.bfloat16)).dtype is torch.bfloat16
    merged = merge_and_unload(model)
    assert torch.equal(merged.linear.weight == 0, net.linear.weight == 0)


def test_the_mask_goes_with_copies_and_moves():
    model = with_lora(pruned_net())
    keep_zeros(model)
    expected = model(batch())
    twin = copy.deepcopy(model)
    for p in model.parameters():
        p.data.zero_()
    assert torch.equal(twin(batch()), expected)
    model.to("meta")
    assert model.base_model.model.linear.horst_kept.is_meta


def test_an_adapter_that_came_after_keep_zeros_fills_no_zero():
    net = pruned_net()
    model = with_lora(net, target_modules=["linear"])
    keep_zeros(model)
    model.add_adapter("late", LoraConfig(r=3, target_modules=["conv"], init_lora_weights=False))
    model.set_adapter("late")
    with pytest.raises(ValueError, match="1 of 2 adapters came after keep_zeros, and would fill the zeros"):
        merge_and_unload(model)
    keep_zeros(model)
    assert (merge_and_unload(model).conv.weight[net.conv.weight == 0] == 0).all()


def test_what_cannot_be_masked_is_refused():
    with pytest.raises(
        ValueError, match=r"none of the 2 weights under a LoRA adapter has a zero. Prune the base model"
    ):
        keep_zeros(with_lora(Net()))
    with pytest.raises(ValueError, match="Net has no LoRA layer"):
        keep_zeros(pruned_net())
    with pytest.raises(NotImplementedError, match=r"linear .*is not plain LoRA on a linear layer.*use_dora"):
        keep_zeros(with_lora(pruned_net(), use_dora=True))
    with pytest.raises(ValueError, match=r"no adapter is masked. Call horst.integrations.peft.keep_zeros"):
        merge_and_unload(with_lora(pruned_net()))
    model = with_lora(pruned_net())
    keep_zeros(model)
    model.eval()
    with pytest.raises(NotImplementedError, match="several adapters in one batch"):
        model(batch(), adapter_names=["default"] * 8)
