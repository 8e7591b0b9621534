"""What only a CUDA device can show: graphs, the scaler without a host sync, memory, compilation."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from horst import HAM, HORST, with_mirror_step

pytestmark = pytest.mark.gpu


def params_like(shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, device="cuda", dtype=dtype) * 0.1) for s in shapes]


def test_fused_is_the_default():
    optimizer = HORST(params_like([(3, 4)]))
    assert optimizer._step_supports_amp_scaling


@pytest.mark.parametrize("backend", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize(
    ("cls", "options"), [(HORST, {}), (HORST, {"l1": 0.5}), (HORST, {"max_step": 0.035}), (HAM, {})]
)
def test_a_captured_graph_equals_eager_steps(cls, options, backend):
    shapes = [(33, 65), (7,), (5000,)]
    a, b = params_like(shapes), params_like(shapes)
    lr = torch.tensor(1e-2, device="cuda")
    graphed = cls([{"params": a, **options}], lr=lr, alpha=5.0, capturable=True, **backend)
    eager = cls([{"params": b, **options}], lr=1e-2, alpha=5.0, foreach=False)
    static = [torch.zeros_like(p) for p in a]
    for p, g in zip(a, static, strict=True):
        p.grad = g
    fresh = [[torch.randn_like(p) for p in a] for _ in range(6)]

    def feed(k):
        for g, p, value in zip(static, b, fresh[k], strict=True):
            g.copy_(value)
            p.grad = value.clone()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for k in range(2):
            feed(k)
            graphed.step()
            eager.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for k in range(2, 6):
        rate = 1e-2 * (k + 1)
        lr.fill_(rate)  # a schedule that the graph sees
        eager.param_groups[0]["lr"] = rate
        feed(k)
        graph.replay()
        eager.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert float(graphed.state[a[0]]["step"]) == 6.0


def test_gradients_that_live_in_the_graphs_pool():
    """Capture of backward and step together: the gradients' addresses are first seen while capturing."""
    torch.manual_seed(0)
    model, twin = nn.Linear(16, 16).cuda(), nn.Linear(16, 16).cuda()
    twin.load_state_dict(model.state_dict())
    optimizer, plain = HORST(model.parameters(), lr=1e-2, capturable=True), HORST(twin.parameters(), lr=1e-2)
    x = torch.randn(8, 16, device="cuda")

    def one(m, o):
        o.zero_grad(set_to_none=True)
        m(x).square().mean().backward()
        o.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one(model, optimizer)
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        optimizer.step()
    gc.collect()
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        one(twin, plain)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_capture_without_capturable_is_refused():
    # in a process of its own: a capture that fails leaves torch's generators unusable
    code = """
import torch, horst
p = torch.nn.Parameter(torch.ones(5, device="cuda"))
p.grad = torch.ones_like(p)
optimizer = horst.HORST([p])
optimizer.step()
torch.cuda.synchronize()
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    optimizer.step()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert "Make the optimizer with capturable=True" in found.stderr


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_the_scaler_never_waits_for_the_device():
    params = params_like([(64, 64), (64,)])
    optimizer = HORST(params)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for warm in (True, False):
        loss = sum(p.square().sum() for p in params)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            scaler.step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.update()
    assert float(optimizer.state[params[0]]["step"]) == 2.0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("l1", [0.0, 0.03])
def test_a_plain_step_never_waits_for_the_device(l1):
    params = params_like([(64, 64), (64,)])
    optimizer = HORST(params, lr=torch.tensor(1e-3, device="cuda"), l1=l1)
    for k in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        torch.cuda.set_sync_debug_mode("error" if k else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("cls", "options"), [(HORST, {}), (HORST, {"l1": 0.03}), (HAM, {})])
def test_fused_needs_no_memory_but_its_tables(cls, options):
    params = params_like([(1024, 1024)] * 8)
    optimizer = cls(params, **options)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("l1", [0.0, 0.03])
def test_one_launch_per_group(l1):
    params = params_like([(64, 64), (64,), (3, 5, 7)] * 20)
    optimizer = HORST(params, l1=l1)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        optimizer.step()
        torch.cuda.synchronize()
    kernels = [e.key for e in profile.key_averages() for _ in range(e.count) if e.device_type.name == "CUDA"]
    kernels = [k for k in kernels if "Memcpy" not in k and "Memset" not in k and "Activity" not in k]
    assert len(kernels) == 1, kernels
    assert "horst" in kernels[0]


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights without stochastic_rounding")
def test_a_tensor_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    n = 2**31 + 1025
    p = nn.Parameter(torch.full((n,), 0.5, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    HORST([p], lr=0.1, weight_decay=0.0).step()
    assert (p == p[0]).all()
    assert p[0].item() == pytest.approx(0.4 * 2.718281828 ** (-0.5), abs=2e-3)


@pytest.mark.parametrize("base", ["adamw_fused", "muon"])
def test_a_mirror_step_after_other_optimizers_on_the_device(base):
    shapes = [(32, 16), (16, 32)]
    a, b = params_like(shapes), [nn.Parameter(p.detach().cpu()) for p in params_like(shapes)]

    def make(params, device):
        if base == "muon":
            return with_mirror_step(torch.optim.Muon(params, lr=1e-2))
        return with_mirror_step(torch.optim.AdamW(params, lr=1e-2, fused=device == "cuda"))

    one, two = make(a, "cuda"), make(b, "cpu")
    for _ in range(4):
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn(p.shape)
            p.grad = q.grad.cuda()
        one.step()
        two.step()
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if base == "muon" else {"rtol": 1e-4, "atol": 1e-6}  # Muon works in bf16
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p.cpu(), q, **tolerance)


def test_state_moved_to_the_cpu_and_back_is_followed():
    """People offload optimizer state by assigning to .data: the tensor object stays, its memory does not."""
    (p,), (q,) = params_like([(100,)]), params_like([(100,)])
    one, two = HORST([p], lr=1e-2), HORST([q], lr=1e-2)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        one.step()
        two.step()
        for key in ("exp_avg", "exp_avg_sq"):
            tensor = one.state[p][key]
            tensor.data = tensor.data.cpu().cuda()
    torch.testing.assert_close(p, q, rtol=0, atol=0)
