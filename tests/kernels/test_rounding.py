"""Stochastic rounding: right on average, the same on every backend, and what it is for."""

import math

import pytest
import torch

from horst.kernels.horst_step import StepOptions, StepTensors, horst_step
from horst.kernels.rounding import rounding_noise, stochastic_round

OPTIONS = StepOptions(1e-2, 0.9, 0.999, 1e-8, 0.0, alpha=5.0, beta=0.0, stochastic_rounding=True)


@pytest.mark.parametrize("value", [1.001, -3.14159, 1e-3, 12345.678, 1e-37])
def test_rounds_to_a_neighbour_and_is_right_on_average(value):
    x = torch.full((200_000,), value, dtype=torch.float32)
    noise = rounding_noise(x.shape, torch.tensor(7.0), salt=3, device=x.device) & 0xFFFF
    rounded = stochastic_round(x, noise).double()
    ulp = 2.0 ** (math.floor(math.log2(abs(value))) - 7)
    assert (rounded - value).abs().max() < ulp
    assert rounded.unique().numel() == 2
    # five standard errors of the mean of numbers that differ by one ulp
    assert abs(rounded.mean().item() - x[0].item()) < 5 * ulp / 2 / math.sqrt(x.numel())


def test_what_bfloat16_can_hold_is_not_changed():
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf], dtype=torch.float32)
    for noise in (0, 1, 65535):
        rounded = stochastic_round(x, torch.full(x.shape, noise))
        assert torch.equal(rounded.float(), x)
    nan = stochastic_round(torch.tensor([math.nan, -math.nan]), torch.tensor([65535, 65535]))
    assert nan.isnan().all()


def test_noise_depends_on_step_tensor_and_element():
    def noise(step, salt):
        return rounding_noise(torch.Size([4096]), torch.tensor(float(step)), salt, torch.device("cpu"))

    one = noise(1, 0)
    assert torch.equal(one, noise(1, 0))
    for other in (noise(2, 0), noise(1, 1)):
        agreement = (one == other).double().mean()
        assert agreement < 0.01
    bits = torch.stack([(one >> b) & 1 for b in range(32)]).double().mean(1)
    assert ((bits - 0.5).abs() < 5 * 0.5 / 64).all()  # each bit is fair, within five standard errors
    low, high = (one & 0xFFFF).double(), (one >> 16).double()
    assert torch.corrcoef(torch.stack([low, high]))[0, 1].abs() < 5 / 64  # the two halves are used for two tensors


@pytest.mark.parametrize("l1", [0.0, 2.0])
@pytest.mark.parametrize("backend", ["foreach", "fused"])
def test_backends_round_alike(backend, l1, device):
    torch.manual_seed(0)
    start = [torch.randn(s, device=device).bfloat16() for s in [(1500,), (7, 9), ()]]
    grads = [torch.randn_like(p) for p in start]

    def run(which):
        params = [p.clone() for p in start]
        tensors = StepTensors(
            params,
            grads,
            [torch.zeros_like(p) for p in params],
            [torch.zeros_like(p) for p in params],
            [torch.zeros((), device=device) for _ in params],
        )
        for _ in range(3):
            horst_step(tensors, OPTIONS._replace(l1=l1), which)
        return params + tensors.exp_avg_sqs

    expected, got = run("for-loop"), run(backend)
    total = sum(p.numel() for p in expected)
    # float32 arithmetic differs in the last bit between backends, which flips a rounding now and then
    different = sum(int((a != b).sum()) for a, b in zip(expected, got, strict=True))
    assert different <= 2e-3 * total + 1, f"{different} of {total} differ"


@pytest.mark.parametrize("backend", ["for-loop", "foreach", "fused"])
def test_the_threshold_comes_before_the_one_rounding(backend, device):
    start = (torch.randn(3000, device=device) * 0.05).bfloat16()
    zeros = torch.zeros_like(start)
    tensors = StepTensors([start.clone()], [zeros], [zeros.clone()], [zeros.clone()], [torch.zeros((), device=device)])
    horst_step(tensors, OPTIONS._replace(l1=1.0), backend)  # a gradient of zero: the threshold of 0.01 alone
    exact = start.float().sign() * (start.float().abs() - 0.01).clamp(min=0)
    noise = rounding_noise(start.shape, torch.ones(()), 0, torch.device(device)) & 0xFFFF
    assert torch.equal(tensors.params[0], stochastic_round(exact, noise))
    assert (tensors.params[0] == 0).any()


@pytest.mark.parametrize("backend", ["for-loop", "fused"])
def test_stochastic_rounding_trains_where_plain_rounding_stalls(backend, device):
    """Steps of 1e-3 towards 0.5 from 1: lost by rounding to nearest, whose resolution below 1 is 2**-8."""

    def distance(stochastic):
        theta = torch.ones(2048, dtype=torch.bfloat16, device=device)
        tensors = StepTensors(
            [theta], [theta], [torch.zeros_like(theta)], [torch.zeros_like(theta)], [torch.zeros((), device=device)]
        )
        options = OPTIONS._replace(lr=2e-4, stochastic_rounding=stochastic)
        for _ in range(250):
            horst_step(tensors._replace(grads=[theta - 0.5]), options, backend)
        return (theta.float().mean() - 0.5).abs().item()

    assert distance(stochastic=False) == 0.5  # it never moved
    assert distance(stochastic=True) < 0.3  # 250 steps of about 1.2e-3 each
