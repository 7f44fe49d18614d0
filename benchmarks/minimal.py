"""The default decoder and its training loop, by hand and as short as JAX allows: one device, no mesh, no config.

What `tunix` adds around a step is measured against this. Same equations, sizes, dtypes and optimizer.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

V, D, F, L, N, H, WINDOW, EVERY = 4096, 128, 256, 6, 4, 32, 64, 6


def init(key):
    shapes = {
        "q": (D, N, H), "k": (D, 1, H), "v": (D, 1, H), "o": (N, H, D), "gate": (D, F), "up": (D, F), "down": (F, D),
    }  # fmt: skip
    keys = iter(jax.random.split(key, 8))
    blocks = {
        name: jax.random.normal(next(keys), (L, *shape)) * (N * H if name == "o" else shape[0]) ** -0.5
        for name, shape in shapes.items()
    }
    norms = {name: jnp.zeros((L, D)) for name in ("n1", "n2", "n3", "n4")}
    heads = {name: jnp.zeros((L, H)) for name in ("qn", "kn")}
    table = jax.random.normal(next(keys), (V, D)) * D**-0.5
    return {"table": table, "blocks": blocks | norms | heads, "norm": jnp.zeros(D)}


def norm(x, scale):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * (1 + scale)).astype(x.dtype)


def rope(x, positions, frequencies):
    angles = positions[:, :, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def block(x, scanned, positions, segments):
    w, frequencies, window = scanned
    m = {name: value.astype(jnp.bfloat16) if value.ndim > 1 else value for name, value in w.items()}
    h = norm(x, w["n1"])
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, m[name]) for name in "qkv")
    q = rope(norm(q, w["qn"]), positions, frequencies) * H**-0.5
    k = rope(norm(k, w["kn"]), positions, frequencies)
    distance = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    mask = (distance >= 0) & (distance < window) & (segments[:, :, None] == segments[:, None])
    h = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=1.0)
    x = x + norm(jnp.einsum("btnh,nhd->btd", h, m["o"]), w["n2"])
    h = norm(x, w["n3"])
    h = jax.nn.gelu(h @ m["gate"], approximate=True) * (h @ m["up"])
    return x + norm(h @ m["down"], w["n4"]), None


def loss_sum(params, batch):
    table = params["table"].astype(jnp.bfloat16)
    x = table[batch["tokens"]] * jnp.asarray(D**0.5, jnp.bfloat16)
    is_global = np.arange(1, L + 1) % EVERY == 0
    theta = np.where(is_global, 1e6, 1e4)[:, None]
    frequencies = jnp.asarray(theta ** -(np.arange(0, H, 2) / H), jnp.float32)
    windows = jnp.asarray(np.where(is_global, x.shape[1], WINDOW))
    body = jax.checkpoint(partial(block, positions=batch["positions"], segments=batch["segment_ids"]))
    x, _ = jax.lax.scan(body, x, (params["blocks"], frequencies, windows))

    @jax.checkpoint
    def nll(table, x):
        logits = (norm(x, params["norm"]) @ table.T).astype(jnp.float32)
        targets = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits, -1) - targets) * batch["loss_mask"])

    return nll(table, x)


def make_step(rate):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, 0.9, 0.95, weight_decay=0.1, mask=partial(jax.tree.map, lambda p: p.ndim > 2 or len(p) == V)),
    )

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_sum)(params, batch)
        count = jnp.sum(batch["loss_mask"])
        updates, opt_state = tx.update(jax.tree.map(lambda g: g / count, grads), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss / count

    return tx, step
