"""The option l1 of HORST: a soft threshold at the end of every step, on every backend; and the hook for others."""

import copy
import io
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.testing import assert_close

from horst import HAM, HORST, with_mirror_step
from horst.integrations.matrices import MatrixHORST
from horst.kernels.horst_step import StepOptions, StepTensors, eager, horst_step, horst_step_reference
from horst.lab.baselines.penalize_l1 import penalize_l1
from horst.lab.baselines.together import Together
from horst.optimizers.l1 import soft_threshold

# Some tests mean bfloat16 weights that are rounded to the nearest.
pytestmark = pytest.mark.filterwarnings("ignore:.*bfloat16 weights without stochastic_rounding")

SHAPES = [(9, 5), (13,), (), (0, 3), (2, 3, 4)]
BACKENDS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
finite = st.floats(1e-6, 1e2) | st.floats(-1e2, -1e-6) | st.just(0.0)


def weights_like(shapes, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) * 0.1 for s in shapes]
    return [nn.Parameter(t.to(device, dtype)) for t in drawn]


def shrunk(theta, threshold):
    return theta.sign() * (theta.abs() - threshold).clamp(min=0)


def give_gradients(columns, k):
    """The same to each parameter of a row, at some steps none."""
    generator = torch.Generator().manual_seed(k)
    for i, row in enumerate(zip(*columns, strict=True)):
        g = torch.randn(row[0].shape, generator=generator, dtype=torch.float64)
        for p in row:
            p.grad = None if (k + i) % 4 == 3 else g.to(p)


class Reference:
    """The formula, in float64: the step of the paper, then the threshold at this step's rate.

    Tensors of fewer than ``min_dims`` dimensions get AdamW's step.
    """

    def __init__(self, params, l1, min_dims=0):
        self.l1, self.params, self.min_dims = l1, params, min_dims
        self.theta = [p.detach().double().cpu() for p in params]
        self.m, self.v = ([torch.zeros_like(t) for t in self.theta] for _ in range(2))
        self.steps = [0] * len(params)

    def step(self, lr):
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            self.steps[i] += 1
            on = p.ndim >= self.min_dims
            theta, self.m[i], self.v[i] = horst_step_reference(
                self.theta[i], p.grad.double().cpu(), self.m[i], self.v[i], self.steps[i], lr=lr, beta1=0.9,
                beta2=0.999, eps=1e-8, weight_decay=0.1, alpha=5.0 * on, beta=0.2 * on,
            )  # fmt: skip
            self.theta[i] = shrunk(theta, lr * self.l1 * on)


@pytest.mark.parametrize("rate", ["number", "tensor", "capturable"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(("cls", "min_dims"), [(HORST, 0), (MatrixHORST, 2)])
def test_every_backend_takes_the_step_and_then_the_threshold_of_the_groups_current_rate(
    cls, min_dims, backend, rate, device
):
    a, b = (weights_like(SHAPES, torch.float64, device) for _ in range(2))
    lr = 0.02 if rate == "number" else torch.tensor(0.02, dtype=torch.float64, device=device)
    options = {"weight_decay": 0.1, "alpha": 5.0, "beta": 0.2, "capturable": rate == "capturable", **backend}
    optimizer = cls([{"params": a, "l1": 0.7}, {"params": b}], lr=lr, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with_l1, without = Reference(a, 0.7, min_dims), Reference(b, 0.0, min_dims)
    for k in range(5):
        give_gradients([a, b], k)
        with_l1.step(0.02 * 0.5**k)
        without.step(0.02 * 0.5**k)
        optimizer.step()
        schedule.step()
    for found, expected in ((a, with_l1.theta), (b, without.theta)):
        for p, theta in zip(found, expected, strict=True):
            assert_close(p.detach().cpu(), theta, rtol=1e-9, atol=1e-12)
    assert any((p == 0).any() for p in a)
    assert not any((p == 0).any() for p in b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@given(theta=st.lists(finite, min_size=1), g=finite, lr=st.floats(1e-4, 0.05), l1=st.floats(1e-3, 1e3))
def test_zero_is_the_step_bit_for_bit_and_more_takes_the_threshold_off_it(foreach, dtype, theta, g, lr, l1):
    start = torch.tensor(theta, dtype=dtype)
    zeros = torch.zeros_like(start)
    tensors = StepTensors([start.clone()], [zeros + g], [zeros.clone()], [zeros.clone()], [torch.zeros(())])
    options = StepOptions(lr, 0.9, 0.999, 1e-8, 1e-2, alpha=5.0, beta=0.0)
    horst_step(tensors, options, "foreach" if foreach else "for-loop")
    plain, threshold = tensors.params[0], torch.tensor(lr * l1, dtype=dtype)
    for given_l1, expected in (({}, plain), ({"l1": 0.0}, plain), ({"l1": l1}, shrunk(plain, threshold))):
        p = nn.Parameter(start.clone())
        p.grad = zeros + g
        optimizer = HORST([p], lr=lr, foreach=foreach, **given_l1)
        optimizer.step()
        assert torch.equal(p, expected)
        assert torch.equal(optimizer.state[p]["exp_avg"], tensors.exp_avgs[0])
    assert torch.equal(p.abs(), plain.abs() - plain.abs().minimum(threshold))


def test_without_l1_the_threshold_is_not_even_called(monkeypatch):
    monkeypatch.setattr(eager, "soft_threshold_", lambda *a, **k: pytest.fail("called"))
    params = weights_like(SHAPES)
    optimizer = HORST(params, lr=0.1)
    give_gradients([params], 0)
    optimizer.step()
    optimizer.param_groups[0]["l1"] = 0.5  # a schedule may switch it on
    with pytest.raises(pytest.fail.Exception):
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True], ids=["for-loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_reads_a_devices_memory_on_the_host(foreach, dtype):
    """Tensors of the meta device have no memory at all: reading one fails, as it would in a CUDA graph."""
    params = weights_like(SHAPES, dtype, "meta")
    lr = torch.tensor(1e-2, device="meta")
    optimizer = HORST(params, lr=lr, l1=0.5, foreach=foreach, capturable=True, stochastic_rounding=True)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    shrink_after_a_scaled_step(params, lr, torch.zeros(1, device="meta"))


def shrink_after_a_scaled_step(params, lr, found_inf):
    """The hook alone, as after a fused step under GradScaler."""
    optimizer = torch.optim.SGD([{"params": params, "l1": 0.5}], lr=0.1)
    handle = soft_threshold(optimizer)
    optimizer.param_groups[0]["lr"], optimizer.found_inf = lr, found_inf
    optimizer._optimizer_step_post_hooks[handle.id](optimizer, (), {})


def test_where_a_trainer_makes_the_groups_norms_and_biases_do_not_shrink():
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in [(4, 4), (4,)])
    optimizer = MatrixHORST([matrix, vector], lr=1e-2, l1=1.0, weight_decay=0.0)
    for p in (matrix, vector):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (matrix == 1 - 1e-2).all()
    assert (vector == 1).all()


@pytest.mark.parametrize(("name", "value"), [("l1", -1.0), ("lr", float("nan"))])
def test_a_threshold_that_a_schedule_has_spoilt_is_told(name, value):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = HORST([weight], lr=1e-2, l1=1.0)
    weight.grad = torch.zeros(3)
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match="lr \\* l1 must be a number of at least 0, got"):
        optimizer.step()


@pytest.mark.parametrize("found", [0.0, 1.0, 2.0])  # GradScaler adds it up over devices
def test_a_step_that_the_scaler_skips_shrinks_nothing(found):
    (p,) = weights_like([(20,)])
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    shrink_after_a_scaled_step([p], torch.tensor([0.1]), torch.tensor([found]))
    assert_close(p.detach(), before if found else shrunk(before, 0.05), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["horst", "hook"])
def test_a_fused_step_under_a_scaler_shrinks_only_when_it_steps(name, device):
    def make(p, fused):
        if name == "horst":
            return HORST([p], lr=1e-2, l1=0.5, fused=fused)
        optimizer = torch.optim.AdamW([{"params": [p], "l1": 0.5}], lr=1e-2, fused=fused)
        soft_threshold(optimizer)
        return optimizer

    (p,), (q,) = weights_like([(8, 3)], device=device), weights_like([(8, 3)], device=device)
    scaled, plain = make(p, True), make(q, False)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=10**6)
    for k in range(3):
        x = torch.full_like(p, torch.inf if k == 1 else 1.0 + k)
        scaled.zero_grad()
        scaler.scale((p * x).sum()).backward()
        before = p.detach().clone()
        scaler.step(scaled)
        scaler.update(256.0)
        if k == 1:
            assert torch.equal(p, before)
        else:
            q.grad = x
            plain.step()
    assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert (p == 0).any()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_stochastic_rounding_keeps_the_threshold_on_average(backend, device):
    """The weights' resolution is 0.004, a step's decay 5e-4 of them and its threshold 1e-4."""
    n, steps = 20_000, 6
    p = nn.Parameter(torch.cat([torch.ones(n), -torch.ones(n)]).to(device, torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer = HORST([p], lr=1e-2, weight_decay=0.05, l1=0.01, stochastic_rounding=True, **backend)
    expected = 1.0
    for _ in range(steps):
        optimizer.step()
        expected = expected * (1 - 5e-4) - 1e-4
    spread = 0.004 * (steps * 0.15 / n) ** 0.5  # a weight goes down one notch with probability 0.15
    for half, sign in zip(p.detach().double().split(n), (1, -1), strict=True):
        assert abs(float(half.mean()) - sign * expected) < 4 * spread


def test_rounding_to_nearest_loses_the_threshold_of_large_weights_and_keeps_it_of_small_ones():
    p = nn.Parameter(torch.tensor([1.0, -1.0, 9e-5, -9e-5, 1e-3], dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    HORST([p], lr=1e-2, weight_decay=0.0, l1=0.01).step()
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0, float(torch.tensor(1e-3).bfloat16()) - 1e-4]).bfloat16()
    assert_close(p.detach(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_shrunk_in_float32_and_rounded_once(dtype):
    (p,) = weights_like([(300,)], dtype)
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer = torch.optim.SGD([{"params": [p], "l1": 0.0123}], lr=1.0)
    soft_threshold(optimizer)
    optimizer.step()
    assert_close(p.detach(), shrunk(before.double(), 0.0123).to(dtype), rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_masked_weights_stay_zero_and_the_others_shrink(backend, device):
    shapes = [(6, 5), (30,)]
    a, b = weights_like(shapes, device=device), weights_like(shapes, device=device)
    masked, plain = (HORST(params, lr=1e-2, l1=0.5, **backend) for params in (a, b))
    keep = torch.rand(6, 5, device=device) < 0.5
    masked.set_masks({a[0]: keep})
    for k in range(3):
        give_gradients([a, b], k)
        masked.step()
        plain.step()
        with torch.no_grad():
            b[0].masked_fill_(~keep, 0)
        for p, q in zip(a, b, strict=True):
            assert_close(p, q, rtol=0, atol=0)
    assert (a[0][~keep] == 0).all()


def resumed_by_state_dict(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    params = [nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]
    other = HORST(params, lr=0.5, l1=9.0)  # what was saved wins
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), resumed_by_state_dict],
    ids=["deepcopy", "pickle", "state_dict"],
)
def test_the_option_survives_saving_and_copying_and_goes_on_acting(clone):
    params = weights_like([(9, 5), (5,)])
    optimizer = HORST(params, lr=1e-2, l1=0.5)
    give_gradients([params], 0)
    optimizer.step()
    other = clone(optimizer)
    copies = other.param_groups[0]["params"]
    assert other.param_groups[0]["l1"] == 0.5
    for k in (1, 2):
        give_gradients([params, copies], k)
        optimizer.step()
        other.step()
    for p, q in zip(params, copies, strict=True):
        assert p is not q
        assert torch.equal(p, q)
    assert (copies[0] == 0).any()


def test_states_from_before_the_option_load():
    (p,) = weights_like([(4,)])
    old = HORST([p]).state_dict()
    del old["param_groups"][0]["l1"]
    for state in (old, torch.optim.AdamW([p]).state_dict()):
        optimizer = HORST([p])
        optimizer.load_state_dict(copy.deepcopy(state))
        assert optimizer.param_groups[0]["l1"] == 0.0
        asked = HORST([p], l1=0.3)  # what a state lacks keeps its value, as with alpha
        asked.load_state_dict(copy.deepcopy(state))
        assert asked.param_groups[0]["l1"] == 0.3


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_compiled_step_shrinks_alike_and_a_tensor_rate_does_not_recompile(backend, device):
    torch._dynamo.reset()
    shapes = [(9, 5), (30,), ()]
    a, b = weights_like(shapes, device=device), weights_like(shapes, device=device)
    compiled = HORST(a, lr=torch.tensor(1e-2, device=device), l1=0.5, **backend)
    eager = HORST(b, lr=1e-2, l1=0.5, foreach=False)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (compiled, eager)]

    @torch.compile
    def step():
        compiled.step()

    for k in range(5):
        if k == 2:
            compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for p, q in zip(a, b, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        eager.step()
        for schedule in schedules:
            schedule.step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiles
    for p, q in zip(a, b, strict=True):
        assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert (a[0] == 0).any()
    assert torch.equal(a[0] == 0, b[0] == 0)


def test_a_compiled_step_with_a_rate_that_is_a_number():
    torch._dynamo.reset()
    (p,), (q,) = weights_like([(9, 5)]), weights_like([(9, 5)])
    compiled, eager = HORST([p], lr=1e-2, l1=0.5), HORST([q], lr=1e-2, l1=0.5)
    step = torch.compile(compiled.step)
    for k in range(2):
        give_gradients([[p], [q]], k)
        step()
        eager.step()
    assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hook", [soft_threshold, penalize_l1])
def test_hooks_refuse_an_optimizer_with_a_threshold_of_its_own(hook):
    a, b = weights_like([(4, 3), (3,)])
    for optimizer in (HORST([a]), Together(torch.optim.AdamW([b]), HORST([a]))):
        with pytest.raises(ValueError, match=r"HORST shrinks .* itself.*Leave (soft_threshold|penalize_l1) out"):
            hook(optimizer)
    other = torch.optim.SGD([{"params": [b], "l1": 0.5}], lr=0.1)
    hook(other)
    both = Together(other, HORST([a], lr=0.1, l1=0.5))
    before = b.detach().clone()
    for p in (a, b):
        p.grad = torch.zeros_like(p)
    both.step()
    expected = shrunk(before, 0.05) if hook is soft_threshold else before - 0.05 * before.sign()
    assert_close(b.detach(), expected)


def test_a_second_threshold_is_refused_and_one_after_remove_is_not():
    (weight,) = weights_like([(4, 3)])
    optimizer = torch.optim.SGD([{"params": [weight], "l1": 0.5}], lr=0.1)
    handle = soft_threshold(optimizer)
    with pytest.raises(ValueError, match=r"SGD has a soft threshold already.*twice.*remove\(\)"):
        soft_threshold(optimizer)
    with pytest.raises(ValueError, match=r"SGD has a soft threshold already"):
        soft_threshold(with_mirror_step(optimizer))
    handle.remove()
    soft_threshold(optimizer)
    soft_threshold(copy.deepcopy(optimizer))  # a copy has lost the first
    before = weight.detach().clone()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert_close(weight.detach(), shrunk(before, 0.05))


def test_a_second_threshold_under_a_mirror_step_is_refused():
    (weight,) = weights_like([(4, 3)])
    base = torch.optim.SGD([{"params": [weight], "l1": 0.5}], lr=0.1)
    optimizer = with_mirror_step(base)
    handle = soft_threshold(optimizer)
    with pytest.raises(ValueError, match=r"WithMirrorStep has a soft threshold already.*remove\(\)"):
        soft_threshold(base)
    handle.remove()
    soft_threshold(base)


def test_ham_has_no_l1_and_takes_the_hook_as_others_do():
    (a,), (b,) = weights_like([(4, 3)]), weights_like([(4, 3)])
    plain, hooked = (HAM([{"params": [p], "l1": 0.5}], lr=0.1) for p in (a, b))
    soft_threshold(hooked)
    give_gradients([[a], [b]], 0)
    plain.step()
    hooked.step()
    assert not (a == 0).any()
    assert_close(b.detach(), shrunk(a.detach(), 0.05), rtol=0, atol=0)


def test_groups_with_l1_and_a_mirror_step_are_shrunk_by_soft_threshold_as_by_horst():
    a, b = weights_like(SHAPES, torch.float64), weights_like(SHAPES, torch.float64)
    ours = HORST([{"params": a, "l1": 0.7}], lr=1e-2, weight_decay=0.1)
    theirs = with_mirror_step(torch.optim.AdamW([{"params": b, "l1": 0.7}], lr=1e-2, weight_decay=0.1))
    soft_threshold(theirs)
    for k in range(4):
        give_gradients([a, b], k)
        ours.step()
        theirs.step()
    for p, q in zip(a, b, strict=True):
        assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert (b[0] == 0).any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("backend", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_host_never_waits_and_a_graph_sees_the_rate(backend, dtype):
    a, b = weights_like([(33, 65), (7,)], dtype, "cuda"), weights_like([(33, 65), (7,)], dtype, "cuda")
    lr = torch.tensor(1e-2, device="cuda")
    graphed = HORST(a, lr=lr, l1=0.5, capturable=True, **backend)
    eager = HORST(b, lr=1e-2, l1=0.5, **backend)
    grads = [torch.randn_like(p) for p in a]
    for p, q, g in zip(a, b, grads, strict=True):
        p.grad, q.grad = g, g.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for k in range(3):
            torch.cuda.set_sync_debug_mode("error" if k else "default")
            graphed.step()
            torch.cuda.set_sync_debug_mode("default")
            eager.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for rate in (2e-2, 5e-3):
        lr.fill_(rate)
        eager.param_groups[0]["lr"] = rate
        graph.replay()
        eager.step()
    for p, q in zip(a, b, strict=True):
        assert_close(p, q)
    assert (a[0] == 0).any()
