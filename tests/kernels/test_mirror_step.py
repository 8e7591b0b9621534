"""The mirror step on its own, against its float64 reference and against HORST's."""

import pytest
import torch

from horst.kernels.horst_step import horst_step_reference
from horst.kernels.mirror_step import MirrorOptions, mirror_step, mirror_step_reference
from horst.kernels.multi_tensor import BLOCK


@pytest.mark.parametrize("backend", ["for-loop", "fused"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (BLOCK + 1,), (40, 7)])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_agrees_with_the_reference(backend, shape, tensor_lr, device):
    theta = torch.randn(shape, dtype=torch.float64, device=device)
    half = theta + 0.1 * torch.randn_like(theta)
    expected = mirror_step_reference(half, theta, lr=0.01, weight_decay=0.3, alpha=5.0, beta=0.7)
    lr = torch.tensor(0.01, dtype=torch.float64, device=device) if tensor_lr else 0.01
    mirror_step([half], [theta], MirrorOptions(5.0, lr * 0.3, lr * 0.7), backend)
    torch.testing.assert_close(half, expected, rtol=1e-13, atol=0)


def test_recovers_the_second_half_of_algorithm_2():
    theta, g = torch.randn(2, 100, dtype=torch.float64)
    zeros = torch.zeros_like(theta)
    hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.3}
    adamw, _, _ = horst_step_reference(theta, g, zeros, zeros, 1, **hyper, alpha=0.0, beta=0.0)
    horst, _, _ = horst_step_reference(theta, g, zeros, zeros, 1, **hyper, alpha=5.0, beta=0.2)
    composed = mirror_step_reference(adamw, theta, lr=0.01, weight_decay=0.3, alpha=5.0, beta=0.2)
    torch.testing.assert_close(composed, horst, rtol=1e-12, atol=0)


@pytest.mark.parametrize("backend", ["for-loop", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_zero_at_zero_and_signs(backend, dtype, device):
    half = torch.randn(1000, device=device).to(dtype)
    half[::3] = 0
    before = half + 0.1 * torch.randn(1000, device=device).to(dtype)
    signs = half.sign()
    mirror_step([half], [before], MirrorOptions(5.0, 0.0, 0.0), backend)
    assert torch.equal(half.sign(), signs)


@pytest.mark.parametrize("layout", ["transposed", "with_gaps"])
def test_fused_handles_layouts(layout, device):
    whole = torch.randn(6, 20, dtype=torch.float64, device=device)
    half = whole.t() if layout == "transposed" else whole[:, ::2]
    theta = torch.randn_like(half)
    expected = mirror_step_reference(half.clone(), theta, lr=1.0, weight_decay=0.0, alpha=0.5, beta=0.0)
    mirror_step([half], [theta], MirrorOptions(0.5), "fused")
    torch.testing.assert_close(half, expected)
