"""HORST in optax: the torch optimizer's weights, under every wrapper that optax has."""

import math
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis.extra.numpy import arrays

from horst import HORST, param_groups, with_mirror_step
from horst.integrations.optax import horst, matrices, mirror_step
from horst.kernels.horst_step.reference import horst_step_reference

STEPS = 100
# It moved out of jax.experimental in 2025.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
# The paper's two settings.
VISION = {"lr": 5e-3, "betas": (0.9, 0.999), "weight_decay": 0.1, "beta": 1e-2}
LANGUAGE = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def as_optax(options):
    options = dict(options)
    b1, b2 = options.pop("betas", (0.9, 0.999))
    return horst(options.pop("lr"), b1, b2, **options)


def weights(scale=0.02):
    rng = np.random.default_rng(0)
    return {
        "fc": {"w": rng.normal(0, scale, (32, 16)), "b": rng.normal(0, scale, 16)},
        "out": rng.normal(0, 1, (16, 4)),
    }


def gradients(steps=STEPS, like=None):
    """Gradients whose size changes by a factor of a thousand from step to step, and which are sometimes 0."""
    rng = np.random.default_rng(1)
    like = weights() if like is None else like
    sizes = rng.choice([0.0, 0.01, 0.1, 1, 10], steps)
    return [jax.tree.map(lambda p, size=size: size * rng.normal(0.3, 1, p.shape), like) for size in sizes]


def to_jax(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def run_optax(optimizer, dtype=jnp.float32, *, params=None, grads=None, jit=True):
    params = to_jax(weights() if params is None else params, dtype)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update) if jit else optimizer.update
    for g in gradients() if grads is None else grads:
        updates, state = update(to_jax(g, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def run_torch(make, dtype=torch.float32, *, params=None, grads=None, schedule=None):
    start, tree = jax.tree.flatten(weights() if params is None else params)
    leaves = [torch.nn.Parameter(torch.tensor(x, dtype=dtype)) for x in start]
    optimizer = make(leaves)
    for k, g in enumerate(gradients() if grads is None else grads):
        for p, x in zip(leaves, jax.tree.leaves(g), strict=True):
            p.grad = torch.tensor(x, dtype=dtype)
        if schedule is not None:
            optimizer.param_groups[0]["lr"] = float(schedule(k))
        optimizer.step()
    return jax.tree.unflatten(
        tree, [p.detach().float().numpy() if dtype.itemsize == 2 else p.detach().numpy() for p in leaves]
    )


def horst_with(params, options):
    return HORST([{"params": params, **options}])


def assert_close(actual, expected, *, atol=0.0, rtol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a, b.dtype), b, rtol, atol), actual, expected)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("options", [VISION, LANGUAGE], ids=["vision", "language"])
def test_a_hundred_steps_equal_torchs_to_a_millionth(options):
    small = {"fc": weights()["fc"]}  # a transformer's weights are of this size; at 1, torch's own rounding is 3e-6
    grads = gradients(like=small)
    actual, _ = run_optax(as_optax(options), params=small, grads=grads)
    assert_close(actual, run_torch(lambda p: horst_with(p, options), params=small, grads=grads), atol=1e-6)


@pytest.mark.parametrize("options", [VISION, LANGUAGE], ids=["vision", "language"])
def test_a_hundred_steps_equal_torchs_in_float64(options):
    with enable_x64(True):
        actual, _ = run_optax(as_optax(options), jnp.float64)
    assert_close(actual, run_torch(lambda p: horst_with(p, options), torch.float64), rtol=1e-11, atol=1e-14)


def test_a_schedule_moves_decay_and_mirror_step_with_it():
    def schedule(count):
        return 5e-3 / (1 + 0.05 * count)

    with enable_x64(True):
        actual, _ = run_optax(as_optax({**VISION, "lr": schedule}), jnp.float64)
        expected = run_torch(lambda p: HORST(p, **VISION), torch.float64, schedule=schedule)
    assert_close(actual, expected, rtol=1e-11, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*bfloat16 weights without stochastic_rounding")
def test_half_precision_is_rounded_once_a_step():
    grads = gradients(10)
    actual, state = run_optax(as_optax(VISION), jnp.bfloat16, grads=grads)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves((actual, state[0].mu, state[0].nu)))
    expected = run_torch(lambda p: HORST(p, **VISION), torch.bfloat16, grads=grads)
    assert_close(actual, expected, rtol=2**-8)  # one bfloat16 apart, where a last digit of float32 decides


def test_without_mirror_step_it_is_adamw():
    with enable_x64(True):
        ours, _ = run_optax(horst(1e-3, weight_decay=0.1, alpha=0.0, mask=matrices), jnp.float64)
        adamw, _ = run_optax(optax.adamw(1e-3, weight_decay=0.1, mask=matrices), jnp.float64)
    assert_close(ours, adamw, rtol=1e-12)


floats32 = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6)


@given(
    theta=arrays(np.float32, 5, elements=floats32), g=arrays(np.float32, 5, elements=floats32), alpha=st.floats(0, 20)
)
def test_one_step_is_the_references_to_rounding(theta, g, alpha):
    optimizer = horst(1e-2, weight_decay=0.1, alpha=alpha, beta=0.5)
    updates, _ = optimizer.update(jnp.asarray(g), optimizer.init(jnp.asarray(theta)), jnp.asarray(theta))
    exact, zeros = torch.tensor(theta, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    options = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "alpha": alpha, "beta": 0.5}
    expected, _, _ = horst_step_reference(exact, torch.tensor(g).double(), zeros, zeros, 1, **options)
    actual = np.asarray(optax.apply_updates(jnp.asarray(theta), updates), np.float64)
    # The update is added to theta: where that nearly cancels, the digits of theta are what is left.
    size = np.maximum(np.abs(theta), 1e-2)
    np.testing.assert_array_less(np.abs(actual - expected.numpy()), 1e-6 * size)


@given(theta=arrays(np.float32, 20, elements=floats32), alpha=st.floats(0, 20))
def test_a_zero_weight_without_a_step_stays_zero(theta, alpha):
    theta = np.where(np.arange(20) % 2 == 0, 0, theta)
    optimizer = mirror_step(alpha, beta=0.5, learning_rate=0.1, weight_decay=0.1)
    updates, _ = optimizer.update(jnp.zeros(20), optimizer.init(theta), jnp.asarray(theta))
    assert not np.asarray(updates)[::2].any()


def test_jit_scan_and_vmap_change_nothing():
    optimizer = as_optax(VISION)
    grads = to_jax(gradients(20), jnp.float32)
    start = to_jax(weights(), jnp.float32)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)

    def one_step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    def train(params, grads):
        return jax.lax.scan(one_step, (params, optimizer.init(params)), grads)[0][0]

    eager, _ = run_optax(optimizer, grads=gradients(20), jit=False)
    scanned = jax.jit(train)(start, stacked)
    assert_close(scanned, eager, rtol=1e-5, atol=1e-7)
    twice = jax.tree.map(lambda x: jnp.stack([x, -x]), start)
    mapped = jax.vmap(train, in_axes=(0, None))(twice, stacked)
    for i in range(2):
        assert_close(
            jax.tree.map(lambda x, i=i: x[i], mapped),
            train(jax.tree.map(lambda x, i=i: x[i], twice), stacked),
            rtol=1e-5,
            atol=1e-7,
        )


def test_masks_say_what_decays_and_what_is_mirrored():
    start = jax.tree.map(lambda x: torch.nn.Parameter(torch.tensor(x)), weights())
    net = torch.nn.ParameterDict({"fc_w": start["fc"]["w"], "fc_b": start["fc"]["b"], "out": start["out"]})
    optimizer = HORST(param_groups(net, weight_decay=0.1, mirror="matrices"), lr=5e-3)
    for g in gradients(30):
        net["fc_w"].grad, net["fc_b"].grad, net["out"].grad = map(torch.tensor, (g["fc"]["w"], g["fc"]["b"], g["out"]))
        optimizer.step()
    expected = {"fc": {"w": net["fc_w"], "b": net["fc_b"]}, "out": net["out"]}
    expected = jax.tree.map(lambda p: p.detach().numpy(), expected)
    with enable_x64(True):
        ours = horst(5e-3, weight_decay=0.1, mask=matrices, mirror_mask=matrices)
        assert_close(run_optax(ours, jnp.float64, grads=gradients(30))[0], expected, rtol=1e-11, atol=1e-14)
        # a mask may cover the top of the tree alone
        top, tree = ({"fc": False, "out": True}, {"fc": {"w": False, "b": False}, "out": True})
        by_top, by_tree = (run_optax(horst(5e-3, mask=m, mirror_mask=m), jnp.float64)[0] for m in (top, tree))
        assert_equal(by_top, by_tree)
        assert not np.array_equal(by_top["out"], run_optax(horst(5e-3, mirror_mask=False), jnp.float64)[0]["out"])


def test_masked_and_multi_transform_leave_the_rest_to_others():
    ours, _ = run_optax(as_optax(VISION))
    masked, _ = run_optax(optax.masked(as_optax(VISION), {"fc": True, "out": False}), grads=gradients(1))
    first, _ = run_optax(as_optax(VISION), grads=gradients(1))
    assert_equal(masked["fc"], first["fc"])
    np.testing.assert_allclose(
        masked["out"], weights()["out"] + gradients(1)[0]["out"], rtol=1e-6
    )  # as optax.masked does
    both = optax.multi_transform(
        {"horst": as_optax(VISION), "adamw": optax.adamw(1e-3)}, {"fc": "horst", "out": "adamw"}
    )
    mixed, _ = run_optax(both)
    assert_close(mixed["fc"], ours["fc"], rtol=1e-5, atol=1e-7)
    assert_close(mixed["out"], run_optax(optax.adamw(1e-3))[0]["out"], rtol=1e-5, atol=1e-7)
    # a mask that is a function sees the tree with the rest taken out
    by_function = horst(5e-3, mask=matrices, mirror_mask=matrices)
    part = {"fc": weights()["fc"]}
    alone, _ = run_optax(by_function, params=part, grads=[{"fc": g["fc"]} for g in gradients(5)])
    inside, _ = run_optax(optax.masked(by_function, {"fc": True, "out": False}), grads=gradients(5))
    assert_equal(inside["fc"], alone["fc"])


def test_hyperparameters_can_be_injected_and_scheduled():
    make = optax.inject_hyperparams(horst, static_args=("mask", "mirror_mask"))
    options = {"weight_decay": 0.1, "beta": 0.01, "mask": matrices, "mirror_mask": matrices}
    with enable_x64(True):
        injected, state = run_optax(make(5e-3, alpha=5.0, **options), jnp.float64)
        assert_close(injected, run_optax(horst(5e-3, alpha=5.0, **options), jnp.float64)[0], rtol=1e-11, atol=1e-14)
        assert float(state.hyperparams["alpha"]) == 5.0
        # alpha off for the first half: as AdamW, then as HORST from there
        halves = make(5e-3, alpha=lambda count: jnp.where(count < 50, 0.0, 5.0), **options)
        switched, _ = run_optax(halves, jnp.float64)
        both = [horst(5e-3, alpha=alpha, **options) for alpha in (0.0, 5.0)]
        params, state = run_optax(both[0], jnp.float64, grads=gradients()[:50])
        for g in gradients()[50:]:
            updates, state = both[1].update(to_jax(g, jnp.float64), state, params)
            params = optax.apply_updates(params, updates)
        assert_close(switched, params, rtol=1e-11, atol=1e-14)


def test_multi_steps_take_one_step_along_the_mean():
    grads = gradients(40)
    means = [jax.tree.map(lambda *g: sum(g) / 4, *grads[k : k + 4]) for k in range(0, 40, 4)]
    with enable_x64(True):
        many, _ = run_optax(
            optax.MultiSteps(as_optax(VISION), 4, accumulator_dtype=jnp.float64), jnp.float64, grads=grads
        )
        assert_close(many, run_optax(as_optax(VISION), jnp.float64, grads=means)[0], rtol=1e-11, atol=1e-14)


def test_a_saved_state_goes_on_bit_for_bit():
    grads = gradients()
    optimizer = as_optax({**VISION, "lr": optax.cosine_decay_schedule(5e-3, STEPS)})
    whole, _ = run_optax(optimizer, grads=grads)
    params, state = pickle.loads(pickle.dumps(run_optax(optimizer, grads=grads[:37])))
    update = jax.jit(optimizer.update)
    for g in grads[37:]:
        updates, state = update(to_jax(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
    assert_equal(params, whole)


def test_the_mirror_step_follows_any_optimizer_as_compose_does():
    sgd = optax.chain(optax.sgd(1e-4, momentum=0.9), mirror_step(5.0))
    with enable_x64(True):
        actual, _ = run_optax(sgd, jnp.float64)
        expected = run_torch(
            lambda p: with_mirror_step(torch.optim.SGD(p, lr=1e-4, momentum=0.9), alpha=5.0), torch.float64
        )
        assert_close(actual, expected, rtol=1e-9, atol=1e-12)
        adam = optax.chain(optax.adam(1e-3), mirror_step(5.0, learning_rate=1e-3, weight_decay=0.1))
        assert_close(
            run_optax(adam, jnp.float64)[0],
            run_optax(horst(1e-3, weight_decay=0.1), jnp.float64)[0],
            rtol=1e-11,
            atol=1e-14,
        )


def test_extra_arguments_are_let_through():
    optimizer = horst(1e-3)
    params = jnp.ones(3)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    optimizer.update(params, optimizer.init(params), params, value=1.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: horst(1e-3, alpha=-1.0), ValueError, "alpha must be a number of at least 0, got -1.0"),
        (lambda: horst(1e-3, alpha=math.nan), ValueError, "alpha must be a number of at least 0, got nan"),
        (lambda: horst("1e-3"), TypeError, "learning_rate must be a number of at least 0, got '1e-3'.*a schedule"),
        (lambda: horst(1e-3, b2=1.0), ValueError, r"b2 must lie in \[0, 1\), got 1.0"),
        (
            lambda: mirror_step(weight_decay=0.1),
            ValueError,
            "weight_decay=0.1 act at the learning rate: give mirror_step",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_update_needs_the_real_weights():
    optimizer = horst(1e-3)
    state = optimizer.init(jnp.ones(3))
    with pytest.raises(ValueError, match=r"call update\(grads, state, params\), with params"):
        optimizer.update(jnp.ones(3), state)
    with pytest.raises(TypeError, match="real floating-point parameters; got complex64 of shape"):
        optimizer.update(jnp.ones(3, complex), optimizer.init(jnp.ones(3, complex)), jnp.ones(3, complex))
