"""Keys and values of the tokens so far, so that a new token computes only itself.

The cache of a layer is a pair of [B, S, K, H], S the layer's window or the whole sequence if that is shorter. Time t
stands in slot t % S: a later token takes the place of one that has left the window. Rows begin at different times,
because prompts are unequal and end together.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tunix.models.attention import attend
from tunix.models.transformer import Transformer
from tunix.sharding.layout import Layout

Cache = list[tuple[jax.Array, jax.Array]]


def unstacked(blocks: dict[str, Any], num_layers: int) -> list[dict[str, Any]]:
    """Parameters of each layer, of those stacked for the scan over layers."""
    return [jax.tree.map(lambda weight, n=layer: weight[n], blocks) for layer in range(num_layers)]


def prefill(model: Transformer, blocks, tokens: jax.Array, first: jax.Array, num_times: int) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after prompts [B, T] int32 that begin at `first` [B], and a cache for `num_times` times."""
    times = jnp.arange(tokens.shape[1])
    positions = jnp.maximum(times - first[:, None], 0)
    segments = (times >= first[:, None]).astype(jnp.int32)
    windows = model.cfg.windows(num_times)

    def mix(window: int):
        def whole(q, k, v):
            out = attend(q, k, v, segments, jnp.int32(window), layout=model.layout, kernel=model.cfg.attention)
            return out, (_placed(k, window), _placed(v, window))

        return whole

    return _logits(model, blocks, tokens, positions, [mix(window) for window in windows])


def decode(
    model: Transformer, blocks, cache: Cache, token: jax.Array, time: jax.Array, first: jax.Array
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after one more token [B] int32 at `time` (scalar) of rows begun at `first` [B], and the cache."""

    def mix(keys, values):
        def one(q, k, v):
            size = keys.shape[1]
            k, v = (
                jax.lax.dynamic_update_slice_in_dim(held, new, time % size, axis=1)
                for held, new in ((keys, k), (values, v))
            )
            return _attend_to_cache(q, k, v, time, first, model.layout), (k, v)

        return one

    positions = (time - first)[:, None]
    return _logits(model, blocks, token[:, None], positions, [mix(*layer) for layer in cache])


def _logits(model: Transformer, blocks, tokens, positions, mixes) -> tuple[jax.Array, Cache]:
    tables = model.tables()
    hidden, cache = model.unrolled(tables, tokens, positions, blocks, mixes)
    return model.logits(tables, hidden[:, -1:])[:, 0], cache


def _placed(x: jax.Array, size: int) -> jax.Array:
    """Times [B, T, K, H] in the slots of a cache of `size`."""
    length = x.shape[1]
    if length <= size:
        return jnp.pad(x, ((0, 0), (0, size - length), (0, 0), (0, 0)))
    turn = length % size  # the slot of the oldest time that stays
    last = x[:, length - size :]
    return jnp.concatenate([last[:, size - turn :], last[:, : size - turn]], axis=1)


def _attend_to_cache(q, k, v, time, first, layout: Layout) -> jax.Array:
    """One query [B, 1, N, H] over [B, S, K, H]."""
    specs = [layout.activation(letters) for letters in ("BTNH", "BTKH", "BTKH", "B")]

    def local(q, k, v, first, time):
        k, v = (layout.own_kv_heads(x, q.shape[2]) for x in (k, v))
        size = k.shape[1]
        times = time - (time - jnp.arange(size)) % size  # the newest time of each slot
        mask = times >= jnp.maximum(first, 0)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None], scale=1.0)

    return jax.shard_map(local, in_specs=(*specs, jax.P()), out_specs=specs[0])(q, k, v, first, time)
