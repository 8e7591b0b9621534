"""HORST for JAX: Algorithm 2 as an optax gradient transformation, and its mirror step for the end of any chain."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from horst.extras import how_to_install
from horst.optimizers.hyperparameters import check_number

try:
    import jax
    import jax.numpy as jnp
    import optax  # type: ignore[import-untyped]
except ImportError as error:
    raise ImportError(f"horst.integrations.optax needs optax and JAX; {how_to_install('optax')}") from error

__all__ = ["MirrorStepState", "horst", "matrices", "mirror_step"]

Scalar = float | jax.Array
# A tree of booleans shaped like the parameters or like the top of their tree, or a function from them to one.
Mask = Any


class MirrorStepState(NamedTuple):
    """The number of steps taken, at which a schedule of the learning rate is read."""

    count: jax.Array  # type: ignore[assignment]  # optax's name for it, and a method of tuples


def horst(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 1e-2,
    *,
    alpha: Scalar = 5.0,
    beta: Scalar = 0.0,
    mask: Mask | None = None,
    mirror_mask: Mask | None = None,
    mu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW, then an entropy-mirror step along the same direction: :class:`horst.HORST` for JAX.

    With :math:`u_k = \eta\, \hat m_k / (\sqrt{\hat v_k} + \epsilon)`, Adam's step at rate ``learning_rate``,

    .. math::
        \theta_{k+1/2} &= \theta_k - u_k - \eta \lambda\, \theta_k \\
        \theta_{k+1} &= \theta_{k+1/2} \odot
            \exp(-\alpha\, \mathrm{sign}(\theta_{k+1/2}) \odot u_k - \eta \beta)

    where :math:`\eta, \lambda, \epsilon, \alpha, \beta` are ``learning_rate``, ``weight_decay``, ``eps``, ``alpha``,
    ``beta``. The update is :math:`\theta_{k+1} - \theta_k`, so ``update`` needs ``params``. ``alpha=0, beta=0`` is
    ``optax.adamw``.

    Args:
        learning_rate: Number, or schedule: a function of the step.
        b1, b2: Decay rates of the averages of the gradient and of its square.
        eps: Constant added to the denominator.
        weight_decay: Decoupled decay. The default is that of torch; ``optax.adamw`` has 1e-4.
        alpha: Strength of the mirror step relative to ``learning_rate``.
        beta: Decay inside the mirror step.
        mask: Parameters that decay, as in ``optax.adamw``; None is all.
        mirror_mask: Parameters that get the mirror step; None is all, as in the torch class, and :func:`matrices`
            leaves out norms and biases.
        mu_dtype: Dtype of the first moment; None is that of the parameters.

    Half-precision parameters get float32 updates, so that ``optax.apply_updates`` rounds once.

    Under ``optax.inject_hyperparams``, masks that are functions go into ``static_args=("mask", "mirror_mask")``.

    Example:
        >>> params = {"w": jnp.array([1.0, -1.0])}
        >>> optimizer = horst(0.1, eps=0.0, weight_decay=0.5, alpha=5.0)
        >>> updates, state = optimizer.update({"w": jnp.array([2.0, 2.0])}, optimizer.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> [f"{weight:.4f}" for weight in params["w"]]  # 0.85 exp(-0.5) and -1.05 exp(0.5)
        ['0.5156', '-1.7312']

    References: HORST, Algorithm 2 and Corollary 4.5.
    """
    for name, value in (("b1", b1), ("b2", b2)):
        if not isinstance(value, jax.Array) and not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must lie in [0, 1), got {value!r}.")
    _check(eps=eps, learning_rate=learning_rate)
    return optax.chain(
        _scale_by_adam(b1, b2, eps, mu_dtype),
        optax.scale_by_learning_rate(learning_rate),
        mirror_step(
            alpha,
            beta=beta,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            mask=mask,
            mirror_mask=mirror_mask,
        ),
    )


def mirror_step(
    alpha: Scalar = 5.0,
    *,
    beta: Scalar = 0.0,
    learning_rate: optax.ScalarOrSchedule | None = None,
    weight_decay: Scalar = 0.0,
    mask: Mask | None = None,
    mirror_mask: Mask | None = None,
) -> optax.GradientTransformation:
    r"""The entropy-mirror step after any optimizer: the last link of a chain, where its updates are final steps.

    The formulas are those of :func:`horst` with :math:`-u_k` the updates that come in; :math:`\theta_{k+1} - \theta_k`
    goes out. Decay belongs here rather than in the optimizer before: the mirror step follows :math:`u_k` without it.

    Args:
        learning_rate: Number or schedule of the optimizer before. Needed for ``weight_decay`` and ``beta``.

    The other arguments are those of :func:`horst`. The updates that go out have the dtype of those that come in.

    Example:
        >>> optimizer = optax.chain(optax.lion(1e-4, weight_decay=0.0), mirror_step(alpha=5.0))
        >>> params = jnp.ones(3)
        >>> updates, state = optimizer.update(jnp.ones(3), optimizer.init(params), params)
    """
    _check(alpha=alpha, beta=beta, weight_decay=weight_decay, learning_rate=learning_rate)
    if learning_rate is None and not (_is_zero(beta) and _is_zero(weight_decay)):
        raise ValueError(
            f"beta={beta} and weight_decay={weight_decay} act at the learning rate: give mirror_step the learning_rate "
            "of the optimizer before it."
        )

    def init(params: optax.Params) -> MirrorStepState:
        return MirrorStepState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: MirrorStepState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MirrorStepState]:
        if params is None:
            raise ValueError("the mirror step acts on the weights: call update(grads, state, params), with params.")
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        displacement = functools.partial(
            _displacement,
            alpha=alpha,
            decay=0.0 if lr is None else lr * weight_decay,
            shrink=0.0 if lr is None else lr * beta,
        )
        updates = jax.tree.map(displacement, params, updates, _spread(mask, params), _spread(mirror_mask, params))
        return updates, MirrorStepState(optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def matrices(params: optax.Params) -> Any:
    """The mask that is True for arrays of two or more dimensions: ``mirror="matrices"`` of ``horst.param_groups``.

    Example:
        >>> matrices({"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)})
        {'bias': False, 'kernel': True}
        >>> optimizer = horst(1e-3, mask=matrices, mirror_mask=matrices)
    """
    return jax.tree.map(lambda p: jnp.ndim(p) >= 2, params)


def _scale_by_adam(b1: Scalar, b2: Scalar, eps: Scalar, mu_dtype: Any) -> optax.GradientTransformation:
    """Adam's direction, with the state of ``optax.scale_by_adam``.

    Optax's own takes ``1 - 0.999**step`` in float32, which keeps four digits at the first steps, and computes in half
    precision where the parameters have it. The mirror step would carry these errors on.
    """

    def init(params: optax.Params) -> optax.ScaleByAdamState:
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=mu_dtype), params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), mu, jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: optax.Updates, state: optax.ScaleByAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        grads, mu, nu = (jax.tree.map(_at_least_float32, tree) for tree in (grads, state.mu, state.nu))
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, nu, grads)
        correction1, correction2 = _one_minus_power(b1, count), _one_minus_power(b2, count)
        direction = jax.tree.map(lambda m, v: (m / correction1) / (jnp.sqrt(v / correction2) + eps), mu, nu)
        mu, nu = (
            jax.tree.map(lambda new, old: new.astype(old.dtype), *pair) for pair in ((mu, state.mu), (nu, state.nu))
        )
        return direction, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def _one_minus_power(base: Scalar, exponent: jax.Array) -> jax.Array:
    if isinstance(base, jax.Array):
        return -jnp.expm1(exponent * jnp.log(base))
    return -jnp.expm1(exponent * (math.log(base) if base > 0 else -math.inf))


def _at_least_float32(x: jax.typing.ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _displacement(
    theta: jax.Array,
    step: jax.Array,
    decays: bool,
    mirrors: bool,
    *,
    alpha: Scalar,
    decay: Scalar,
    shrink: Scalar,
) -> jax.Array:
    """The whole displacement of one array, given the step of the optimizer before."""
    theta, out_dtype = jnp.asarray(theta), jnp.asarray(step).dtype
    if not jnp.issubdtype(theta.dtype, jnp.floating):
        raise TypeError(
            f"the mirror step needs the sign of a weight, so real floating-point parameters; got {theta.dtype} of "
            f"shape {theta.shape}. Give those to another optimizer with optax.multi_transform."
        )
    # In half precision the exponent of a mirror step has no digits left.
    theta, u = _at_least_float32(theta), -_at_least_float32(step)
    theta_half = theta - u - decay * theta if decays else theta - u
    theta_new = theta_half
    if mirrors:
        theta_new = theta_half * jnp.exp(-alpha * jnp.sign(theta_half) * u - shrink)
    # Within a factor of two the difference is exact (Sterbenz), and adding it to theta gives theta_new to the last bit.
    return (theta_new - theta).astype(out_dtype)


def _spread(mask: Mask | None, params: optax.Params) -> Any:
    """One boolean per parameter: a mask may cover only the top of the tree, and None is True everywhere."""
    mask = True if mask is None else mask(params) if callable(mask) else mask
    return jax.tree.map(lambda flag, below: jax.tree.map(lambda _: bool(flag), below), mask, params)


def _is_zero(value: Scalar) -> bool:
    return not isinstance(value, jax.Array) and value == 0


def _check(**values: Scalar | Callable[..., Any] | None) -> None:
    """Refuse numbers out of range. Arrays, which may be traced, schedules and None are taken as they are."""
    for name, value in values.items():
        if value is not None and not isinstance(value, jax.Array) and not callable(value):
            check_number(name, value, "a JAX array or, for learning_rate, a schedule is allowed too")
