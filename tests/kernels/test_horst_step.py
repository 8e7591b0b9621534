"""Every backend is stepped beside the float64 reference: shapes, dtypes, options, many steps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horst.kernels.horst_step import StepOptions, StepTensors, ham_step_reference, horst_step, horst_step_reference
from horst.kernels.multi_tensor import BLOCK, BLOCKS_PER_CHUNK, LaunchCache

BACKENDS = ["for-loop", "foreach", "fused"]
# scalars, empty, odd, one element past a block, a block exactly, several chunks' worth of blocks is in its own test
SHAPES = [(), (0, 3), (5,), (BLOCK,), (BLOCK + 1,), (300, 7), (2, 3, 4, 5)]
PLAIN = StepOptions(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, alpha=5.0, beta=0.0)
OPTIONS = {
    "paper": PLAIN,
    "with_beta": PLAIN._replace(beta=0.3),
    "adamw": PLAIN._replace(alpha=0.0),
    "only_beta": PLAIN._replace(alpha=0.0, beta=0.5),
    "no_decay": PLAIN._replace(weight_decay=0.0),
    "strong": PLAIN._replace(alpha=50.0, beta=0.1),
    "maximize": PLAIN._replace(maximize=True),
    "betas_zero": PLAIN._replace(beta1=0.0, beta2=0.0),
    "ham": PLAIN._replace(alpha=20.0, beta=1e-3, along_gradient=True),
    "ham_clamped": PLAIN._replace(lr=0.1, alpha=40.0, beta=1e-3, along_gradient=True),  # exponents beyond 5
    "capturable": PLAIN._replace(capturable=True),
    "l1": PLAIN._replace(l1=0.5),
    "l1_adamw": PLAIN._replace(alpha=0.0, l1=0.5),
    "l1_strong": PLAIN._replace(alpha=50.0, beta=0.1, l1=0.5),
    "l1_capturable": PLAIN._replace(capturable=True, l1=0.5),
}


def make_tensors(dtype: torch.dtype, device: torch.device, shapes=SHAPES) -> StepTensors:
    params = [torch.randn(s, dtype=torch.float64).mul_(0.1).to(device, dtype) for s in shapes]
    if any(p.numel() > 2 for p in params):
        next(p for p in params if p.numel() > 2).view(-1)[:2] = 0.0  # a zero weight: the AdamW step revives it
    zeros = [torch.zeros_like(p) for p in params]
    steps = [torch.zeros((), device=device) for _ in params]
    return StepTensors(params, [torch.zeros_like(p) for p in params], zeros, [z.clone() for z in zeros], steps)


def run(backend: str, dtype: torch.dtype, options: StepOptions, device: torch.device, steps: int = 8, shapes=SHAPES):
    """The backend's tensors after some steps, the float64 reference's, and plain PyTorch's in the same dtype."""
    torch.manual_seed(0)
    tensors = make_tensors(dtype, device, shapes)
    reference = ham_step_reference if options.along_gradient else horst_step_reference
    keywords = options._asdict()
    sign = -1.0 if keywords.pop("maximize") else 1.0
    for name in ("along_gradient", "capturable", "stochastic_rounding", *(["l1"] if options.along_gradient else [])):
        del keywords[name]
    rows = list(zip(tensors.params, tensors.exp_avgs, tensors.exp_avg_sqs, strict=True))
    exact = [[t.double().clone() for t in row] for row in rows]
    plain = [[t.clone() for t in row] for row in rows]
    cache = LaunchCache()
    for k in range(1, steps + 1):
        grads = [torch.randn(p.shape, dtype=torch.float64).to(p.device, dtype) for p in tensors.params]
        kept = [g.clone() for g in grads]
        tensors = tensors._replace(grads=grads)
        horst_step(tensors, options, backend, cache=cache)
        for i, g in enumerate(kept):
            torch.testing.assert_close(grads[i], g, rtol=0, atol=0)  # the gradient is the user's
            theta, m, v = exact[i]
            exact[i] = list(reference(theta, sign * g.double(), m, v, k, **keywords))
            theta, m, v = plain[i]
            plain[i] = list(reference(theta, sign * g, m, v, k, **keywords))
    return tensors, exact, plain


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_backend_agrees_with_the_float64_reference(backend, name, device):
    tensors, exact, _ = run(backend, torch.float64, OPTIONS[name], device)
    for i, (theta, m, v) in enumerate(exact):
        torch.testing.assert_close(tensors.params[i].double(), theta, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(tensors.exp_avgs[i].double(), m, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(tensors.exp_avg_sqs[i].double(), v, rtol=1e-11, atol=1e-13)
    assert all(float(s) == 8.0 for s in tensors.steps)  # the empty one's too: another rank may hold its elements
    for p, (theta, _, _) in zip(tensors.params, exact, strict=True):
        assert torch.equal(p == 0, theta == 0)
    assert any((p == 0).any() for p in tensors.params) == (OPTIONS[name].l1 > 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["paper", "with_beta", "capturable", "l1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_at_most_twice_as_far_off_as_plain_pytorch(backend, name, dtype, device):
    tensors, exact, plain = run(backend, dtype, OPTIONS[name], device)
    for i in range(len(exact)):
        if exact[i][0].numel() < 64:  # too few elements for a maximum to mean something
            continue
        error = (tensors.params[i].double() - exact[i][0]).abs().max()
        plain_error = (plain[i][0].double() - exact[i][0]).abs().nan_to_num(math.inf).max()
        assert error <= 2 * plain_error, (error, plain_error)
        assert tensors.params[i].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_exponent_of_ham_is_at_most_5(backend, device):
    theta = torch.tensor([1.0, 1.0], dtype=torch.float64, device=device)
    g = torch.tensor([1e3, -1e3], dtype=torch.float64, device=device)
    zeros = [torch.zeros_like(theta), torch.zeros_like(theta)]
    tensors = StepTensors([theta], [g], [zeros[0]], [zeros[1]], [torch.zeros((), device=device)])
    horst_step(tensors, StepOptions(0.1, 0.9, 0.999, 0.0, 0.0, alpha=200.0, beta=0.0, along_gradient=True), backend)
    expected = [0.9 * math.exp(-5.0), 1.1 * math.exp(5.0)]
    torch.testing.assert_close(theta.cpu(), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_step_by_hand(backend, device):  # eps=0 makes Adam's first direction sign(g), so u = lr
    theta = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64, device=device)
    g = torch.tensor([2.0, 2.0, -3.0], dtype=torch.float64, device=device)
    tensors = StepTensors(
        [theta], [g], [torch.zeros_like(theta)], [torch.zeros_like(theta)], [torch.zeros((), device=device)]
    )
    horst_step(tensors, StepOptions(0.1, 0.9, 0.999, eps=0.0, weight_decay=0.5, alpha=5.0, beta=0.0), backend)
    expected = [0.85 * math.exp(-0.5), -1.05 * math.exp(0.5), 0.1 * math.exp(0.5)]
    torch.testing.assert_close(theta.cpu(), torch.tensor(expected, dtype=torch.float64))


def test_fused_covers_every_block_of_many_chunks(device):
    # several tensors of several chunks in one launch, each with a ragged end; float32 as in training
    shapes = [(BLOCK * 3 + 17,), (1,), (BLOCK * BLOCKS_PER_CHUNK + 5,), (7, 11), (BLOCK,)]
    tensors, exact, _ = run("fused", torch.float32, PLAIN, device, steps=2, shapes=shapes)
    for i in range(len(shapes)):
        torch.testing.assert_close(tensors.params[i].double(), exact[i][0], rtol=1e-5, atol=1e-7)


def test_fused_reads_addresses_anew_when_gradients_move(device):
    tensors = make_tensors(torch.float32, device, [(40,), (3, 3)])
    cache = LaunchCache()
    keep = []  # so that no allocator hands out the same memory twice
    for _ in range(3):
        before = [p.clone() for p in tensors.params]
        tensors = tensors._replace(grads=[torch.ones_like(p) for p in tensors.params])
        keep.append(tensors.grads)
        horst_step(tensors, PLAIN, "fused", cache=cache)
        assert all((p < b).all() for p, b in zip(tensors.params, before, strict=True) if (b > 0).all())
    assert [float(s) for s in tensors.steps] == [3.0, 3.0]


def test_fused_follows_parameters_that_move(device):
    tensors = make_tensors(torch.float32, device, [(40,)])
    twin = StepTensors(*([t.clone() for t in column] for column in tensors))
    cache = LaunchCache()
    for _ in range(2):
        grads = [torch.randn(40, device=device)]
        horst_step(tensors._replace(grads=grads), PLAIN, "fused", cache=cache)
        horst_step(twin._replace(grads=grads), PLAIN, "fused")
        tensors = tensors._replace(params=[tensors.params[0].clone()])
    torch.testing.assert_close(tensors.params[0], twin.params[0], rtol=0, atol=0)


def layouts(device):
    base = torch.randn(6, 10, dtype=torch.float64, device=device)
    wide = torch.randn(6, 20, dtype=torch.float64, device=device)
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device)
    return {
        "transposed": base.t(),
        "with_gaps": wide[:, ::2],
        "slice": wide[1:4, 3:9],
        "channels_last": image.to(memory_format=torch.channels_last),
        "unaligned": torch.randn(61, dtype=torch.float64, device=device)[1:],
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["transposed", "with_gaps", "slice", "channels_last", "unaligned"])
@pytest.mark.parametrize("gradient", ["like_parameter", "contiguous"])
def test_any_layout_gives_the_same_numbers(backend, layout, gradient, device):
    theta = layouts(device)[layout]
    g = torch.randn_like(theta)
    if gradient == "contiguous":
        g = g.contiguous()
    expected, m, v = horst_step_reference(
        theta.clone(), g, torch.zeros_like(g), torch.zeros_like(g), 1,
        lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, alpha=5.0, beta=0.0,
    )  # fmt: skip
    tensors = StepTensors(
        [theta], [g], [torch.zeros_like(theta)], [torch.zeros_like(theta)], [torch.zeros((), device=device)]
    )
    outside = theta._base.clone() if theta._base is not None and layout in ("with_gaps", "slice") else None
    horst_step(tensors, PLAIN, backend)
    torch.testing.assert_close(theta, expected)
    torch.testing.assert_close(tensors.exp_avgs[0], m)
    torch.testing.assert_close(tensors.exp_avg_sqs[0], v)
    if outside is not None:  # what lies in the gaps is somebody else's
        changed = (theta._base != outside).sum()
        assert changed <= theta.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_dtypes_in_one_list(backend, device):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [torch.full((70,), 0.5, dtype=d, device=device) for d in dtypes]
    tensors = StepTensors(
        params,
        [torch.ones_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros((), device=device) for _ in params],
    )
    horst_step(tensors, PLAIN, backend)
    expected = (0.5 * (1 - 1e-3) - 1e-2) * math.exp(-0.05)
    for p in params:
        torch.testing.assert_close(p.double(), torch.full_like(p, expected, dtype=torch.float64), rtol=4e-3, atol=0)
        assert (p == p[0]).all()


@pytest.mark.parametrize("options", [PLAIN, OPTIONS["l1"]], ids=["plain", "l1"])
@pytest.mark.parametrize("found", [1.0, 2.0])  # the scaler adds up what it found on each device
def test_fused_skips_everything_when_the_scaler_found_inf(device, found, options):
    tensors = make_tensors(torch.float32, device)
    empty = torch.zeros(0, device=device)
    tensors = StepTensors(
        *([*column, empty.clone()] for column in tensors[:4]), [*tensors[4], torch.tensor(3.0, device=device)]
    )
    before = [t.clone() for column in tensors for t in column]
    tensors = tensors._replace(grads=[torch.full_like(p, math.inf) for p in tensors.params])
    found_inf = torch.full((1,), found, device=device)
    horst_step(tensors, options, "fused", found_inf=found_inf, grad_scale=torch.ones(1, device=device))
    after = [t for column in tensors._replace(grads=[torch.zeros_like(p) for p in tensors.params]) for t in column]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_fused_divides_by_the_scale(device):
    torch.manual_seed(0)
    scaled = make_tensors(torch.float64, device)
    torch.manual_seed(0)
    plain = make_tensors(torch.float64, device)
    grads = [torch.randn_like(p) for p in plain.params]
    scale = torch.full((1,), 1024.0, device=device)
    zero = torch.zeros(1, device=device)
    horst_step(scaled._replace(grads=[g * 1024 for g in grads]), PLAIN, "fused", grad_scale=scale, found_inf=zero)
    horst_step(plain._replace(grads=grads), PLAIN, "fused")
    for a, b in zip(scaled.params, plain.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("l1", [0.0, 0.5])
def test_tensor_lr_equals_float_lr(backend, capturable, l1, device):
    torch.manual_seed(0)
    a = make_tensors(torch.float64, device)
    torch.manual_seed(0)
    b = make_tensors(torch.float64, device)
    for _ in range(3):
        grads = [torch.randn_like(p) for p in a.params]
        options = PLAIN._replace(capturable=capturable, l1=l1)
        horst_step(a._replace(grads=grads), options, backend)
        lr = torch.tensor(1e-2, dtype=torch.float64, device=device)
        horst_step(b._replace(grads=grads), options._replace(lr=lr), backend)
    for x, y in zip(a.params, b.params, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changes", [{}, {"l1": 100.0}, {"l1": 100.0, "capturable": True}], ids=str)
def test_nan_stays_visible(backend, changes, device):
    tensors = make_tensors(torch.float32, device, [(10,)])
    tensors.params[0][3] = math.nan
    tensors.grads[0][5] = math.nan
    horst_step(tensors, PLAIN._replace(**changes), backend)
    assert tensors.params[0].isnan().nonzero().flatten().tolist() == [3, 5]


magnitudes = st.floats(1e-6, 1e6) | st.just(0.0)
numbers = st.tuples(magnitudes, st.sampled_from([-1.0, 1.0])).map(lambda pair: pair[0] * pair[1])


@given(
    theta=st.lists(numbers, min_size=4, max_size=4),
    g=st.lists(numbers, min_size=4, max_size=4),
    lr=st.floats(1e-6, 0.1),
    alpha=st.floats(0.0, 20.0),
    beta=st.floats(0.0, 1.0),
    weight_decay=st.floats(0.0, 1.0),
    maximize=st.booleans(),
    along_gradient=st.just(False),
)
def test_backends_agree_on_any_input(theta, g, lr, alpha, beta, weight_decay, maximize, along_gradient):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = StepOptions(lr, 0.9, 0.999, 1e-8, weight_decay, alpha, beta, along_gradient, maximize)
    results = []
    for backend in BACKENDS:
        t = torch.tensor(theta, dtype=torch.float64, device=device)
        grad = torch.tensor(g, dtype=torch.float64, device=device)
        zeros, step = torch.zeros_like(t), torch.zeros((), device=device)
        tensors = StepTensors([t], [grad], [zeros], [zeros.clone()], [step])
        horst_step(tensors, options, backend)
        horst_step(tensors, options, backend)
        results.append(t)
    exact, m, v = (torch.tensor(x, dtype=torch.float64, device=device) for x in (theta, [0.0] * 4, [0.0] * 4))
    grad = torch.tensor(g, dtype=torch.float64, device=device) * (-1 if maximize else 1)
    for k in (1, 2):
        exact, m, v = horst_step_reference(
            exact, grad, m, v, k,
            lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=weight_decay, alpha=alpha, beta=beta,
        )  # fmt: skip
    for r in results:
        # theta and u may cancel in theta_half: the error is relative to the larger of them
        torch.testing.assert_close(r, exact, rtol=1e-9, atol=1e-12 * max(1.0, max(map(abs, theta))))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("l1", [0.0, 0.5])
def test_masks_apply_after_the_threshold(backend, l1, device):
    torch.manual_seed(0)
    masked = make_tensors(torch.float32, device, [(300, 7)])
    plain = StepTensors(*([t.clone() for t in column] for column in masked))
    masks = [torch.rand(300, 7, device=device) < 0.5]
    options = PLAIN._replace(l1=l1)
    horst_step(masked, options, backend, masks=masks)
    horst_step(plain, options, backend)
    assert torch.equal(masked.params[0], plain.params[0] * masks[0])


@pytest.mark.parametrize(("lr", "l1"), [(1e-2, -1.0), (math.nan, 1.0), (1e200, 1e200)])
def test_a_threshold_that_is_no_number_is_refused(lr, l1):
    tensors = make_tensors(torch.float32, torch.device("cpu"), [(3,)])
    with pytest.raises(ValueError, match=r"lr \* l1 must be a number of at least 0, got .*Check lr and l1"):
        horst_step(tensors, PLAIN._replace(lr=lr, l1=l1), "for-loop")


def test_eager_backends_refuse_a_scaler():
    tensors = make_tensors(torch.float32, torch.device("cpu"), [(3,)])
    with pytest.raises(RuntimeError, match="fused backend"):
        horst_step(tensors, PLAIN, "foreach", found_inf=torch.zeros(1))
