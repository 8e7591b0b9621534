"""torch.compile of the step: the same numbers, and no recompilation when a tensor lr changes."""

import pytest
import torch
from torch import nn

from horst import HAM, HORST


def params_like(shapes, device):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, device=device) * 0.1) for s in shapes]


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("cls", [HORST, HAM])
def test_a_compiled_step_gives_the_same_numbers(cls, foreach, device):
    torch._dynamo.reset()
    shapes = [(9, 5), (300,), ()]
    a, b = params_like(shapes, device), params_like(shapes, device)
    options = {"lr": 1e-2, "beta": 0.1, "alpha": 5.0, "foreach": foreach}
    eager, compiled = (cls(params, **options) for params in (a, b))
    step = torch.compile(compiled.step, fullgraph=False)
    for _ in range(5):
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        eager.step()
        step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert float(compiled.state[q]["step"]) == 5.0


def test_a_tensor_lr_does_not_recompile(device):
    torch._dynamo.reset()
    params = params_like([(9, 5), (30,)], device)
    optimizer = HORST(params, lr=torch.tensor(1e-2, device=device), foreach=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    twins = params_like([(9, 5), (30,)], device)
    eager = HORST(twins, lr=1e-2, foreach=True)
    eager_schedule = torch.optim.lr_scheduler.ExponentialLR(eager, 0.9)

    @torch.compile
    def step():
        optimizer.step()

    for k in range(6):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if k == 2:
            compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        step()
        schedule.step()
        eager.step()
        eager_schedule.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_fused_inside_a_compiled_function_runs_uncompiled(device):
    torch._dynamo.reset()
    (p,), (q,) = params_like([(9, 5)], device), params_like([(9, 5)], device)
    fused, plain = HORST([p], lr=1e-2, fused=True), HORST([q], lr=1e-2)
    step = torch.compile(fused.step)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        step()
        plain.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
