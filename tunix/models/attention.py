"""Attention between the tokens of one document. Never communicates: each device has its sequences and its heads."""

from functools import partial

import jax
import jax.numpy as jnp

from tunix.sharding.layout import Layout

QUERY_BLOCK = 512  # queries, at most, whose scores exist at one time, with the plain kernel


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, window: jax.Array, *, layout: Layout, kernel: str
) -> jax.Array:
    """Causal attention over [B, T, N, H] queries and [B, T, K, H] keys and values.

    A token attends to itself and to the `window - 1` tokens before it that have its segment id ([B, T] int32).
    Scores and softmax are float32. `kernel` is a key of `KERNELS`.
    """
    specs = [layout.activation(letters) for letters in ("BTNH", "BTKH", "BTKH", "BT")]

    @partial(jax.shard_map, in_specs=(*specs, jax.P()), out_specs=specs[0])
    def local(q, k, v, segment_ids, window):
        k, v = (layout.own_kv_heads(x, q.shape[2]) for x in (k, v))
        return KERNELS[kernel](q, k, v, segment_ids, window)

    return local(q, k, v, segment_ids, window)


def causal(segment_ids: jax.Array, window: jax.Array, layout: Layout, kernel: str):
    """Attention within documents as a block takes it: of [B, T, N, H] and twice [B, T, K, H]; nothing is kept."""

    def mix(q, k, v):
        return attend(q, k, v, segment_ids, window, layout=layout, kernel=kernel), None

    return mix


def _mask(segment_ids: jax.Array, queries: jax.Array, window: jax.Array) -> jax.Array:
    """Who may attend to whom, [B, 1, len(queries), T] bool."""
    keys = jnp.arange(segment_ids.shape[1])
    distance = queries[:, None] - keys
    near = (distance >= 0) & (distance < window)
    same = segment_ids[:, queries, None] == segment_ids[:, None, :]
    return (near & same)[:, None]


def _xla(q, k, v, segment_ids, window):
    """Blocks of queries one after the other, scores recomputed backward: memory grows with T, not with its square (Rabe
    and Staats 2021, arXiv:2112.05682). Queries come scaled."""
    batch, length, heads, dim = q.shape
    block = max(n for n in range(1, min(length, QUERY_BLOCK) + 1) if length % n == 0)

    def one_block(start, *arrays):
        q, k, v, segment_ids, window = arrays
        queries = start + jnp.arange(block)
        rows = jax.lax.dynamic_slice_in_dim(q, start, block, axis=1)
        return jax.nn.dot_product_attention(rows, k, v, mask=_mask(segment_ids, queries, window), scale=1.0)

    if block < length:
        one_block = _recomputed(one_block)
    arrays = (q, k, v, segment_ids, window)
    blocks = jax.lax.map(
        lambda start: one_block(start, *arrays), jnp.arange(0, length, block)
    )  # [T / block, B, block, N, H]
    return blocks.swapaxes(0, 1).reshape(batch, length, heads, dim)


def _recomputed(function):
    """As jax.checkpoint, whose inside the policy of a checkpoint around it would decide upon: remat=none keeps all."""
    kept = jax.custom_vjp(function)
    kept.defvjp(lambda *args: (function(*args), args), lambda args, g: jax.vjp(function, *args)[1](g))
    return kept


def _cudnn(q, k, v, segment_ids, window):
    mask = _mask(segment_ids, jnp.arange(q.shape[1]), window)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=1.0, implementation="cudnn")


KERNELS = {"xla": _xla, "cudnn": _cudnn}
