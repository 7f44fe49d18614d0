"""Cache of the keys and values of earlier tokens, so that a new token computes only its own.

The cache of a layer is a pair of [B, S, K, H], S the layer's window or the whole sequence if that is shorter. Time t
stands in slot t % S: a later token takes the place of one that has left the window. Rows begin at different times,
because prompts are unequal and end together.
"""

import jax
import jax.numpy as jnp

from tunix.models.attention import Seen, attend, seen_in_row
from tunix.models.transformer import Layer, Mix, Transformer

Cache = list[tuple[jax.Array, jax.Array]]


def prefill(model: Transformer, tokens: jax.Array, first: jax.Array, num_times: int) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after prompts [B, T] int32 that begin at `first` [B], and a cache for `num_times` times."""
    times = jnp.arange(tokens.shape[1])
    positions = jnp.maximum(times - first[:, None], 0)
    segments = (times >= first[:, None]).astype(jnp.int32)

    def mix_of(layer: Layer) -> Mix:
        def mix(q, k, v):
            out = attend(q, k, v, seen_in_row(segments, layer.window), model.layout, model.cfg.attention)
            return out, (_placed(k, layer.window), _placed(v, layer.window))

        return mix

    return _logits(model, tokens, positions, mix_of, num_times)


def decode(
    model: Transformer, cache: Cache, token: jax.Array, time: jax.Array, first: jax.Array
) -> tuple[jax.Array, Cache]:
    """Logits [B, V] after one more token [B] int32 at `time` (scalar) of rows begun at `first` [B], and the cache."""

    def mix_of(layer: Layer) -> Mix:
        def mix(q, k, v):
            slots, size = cache[layer.number], cache[layer.number][0].shape[1]
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(old, new, time % size, axis=1)
                for old, new in zip(slots, (k, v), strict=True)
            )
            # One query has few scores: no kernel does better than the plain one.
            return attend(q, keys, values, _seen_in_cache(size, time, first), model.layout, "xla"), (keys, values)

        return mix

    num_times = max(keys.shape[1] for keys, _ in cache)
    return _logits(model, token[:, None], (time - first)[:, None], mix_of, num_times)


def _logits(model: Transformer, tokens, positions, mix_of, num_times: int) -> tuple[jax.Array, Cache]:
    tables = model.tables()
    hidden, cache, _ = model.run_blocks(tables, tokens, positions, mix_of, num_times, unrolled=True)
    return model.logits(tables, hidden[:, -1:])[:, 0], cache


def _seen_in_cache(size: int, time: jax.Array, first: jax.Array) -> Seen:
    """The rule for the token at `time` (scalar) and the `size` slots of a cache, of rows begun at `first` [B].

    The cache of a local layer is as long as its window, so that a slot holds no token that has left the window. A slot
    that no token has taken yet has a time before 0, which is before every row begins.
    """
    times = time - (time - jnp.arange(size)) % size  # the newest time of each slot
    in_row = (times >= first[:, None]).astype(jnp.int32)
    return Seen(time[None], times, jnp.ones_like(first)[:, None], in_row, size)


def _placed(x: jax.Array, size: int) -> jax.Array:
    """The cache of `size` slots that holds the newest of the times [B, T, K, H]."""
    length = x.shape[1]
    if length <= size:
        return jnp.pad(x, ((0, 0), (0, size - length), (0, 0), (0, 0)))
    turn = length % size  # the slot of the oldest time that stays
    last = x[:, length - size :]
    return jnp.concatenate([last[:, size - turn :], last[:, : size - turn]], axis=1)
