"""optax: HORST as a gradient transformation, jitted, on scikit-learn's digits; then pruned by magnitude."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from horst.integrations.optax import horst, matrices

images, labels = load_digits(return_X_y=True)
x, y = jnp.asarray(images, jnp.float32) / 16, jnp.asarray(labels)


def loss(params):
    logits = jax.nn.gelu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(alpha, steps=1000):
    schedule = optax.cosine_decay_schedule(1e-3, steps)
    optimizer = horst(schedule, weight_decay=0.1, alpha=alpha, mask=matrices, mirror_mask=matrices)

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)  # the mirror step needs the weights
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(0))
    params = {"w1": jax.random.normal(keys[0], (64, 128)) / 8, "b1": jnp.zeros(128)}
    params |= {"w2": jax.random.normal(keys[1], (128, 10)) / 12, "b2": jnp.zeros(10)}
    return jax.lax.scan(step, (params, optimizer.init(params)), length=steps)[0][0]


for alpha in (0.0, 5.0):  # 0 is AdamW
    params = train(alpha)
    pruned = {k: jnp.where(abs(w) < jnp.quantile(abs(w), 0.8), 0, w) if k[0] == "w" else w for k, w in params.items()}
    print(f"alpha {alpha}: loss {loss(params):.3f}, with 80 % of the weights pruned {loss(pruned):.3f}")
