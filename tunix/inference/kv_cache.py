"""Cache of the keys and values of earlier tokens, so that a new token computes only its own.

The cache of a layer is a tuple of arrays [B, ..., S, H]: keys and values [B, K, S, H], or the latents that they are
made of, [B, S, C] and [B, S, R] (models/mla.py). S is the layer's window, or the slots of the cache if those are fewer.
Time t stands in slot t % S: a later token takes the place of one that has left the window. Rows begin at different
times, because prompts are unequal and end together. Rows live on the data shard of their prompt, heads are split like
those of the model.

Tokens at work have heads behind times, [B, T, K, H]. The cache has them before the slots, because products of matrices
take one head at a time. Otherwise XLA keeps a copy of the whole cache in that order beside it for the loop over tokens.

A layer of linear attention has a `Memory` in the place of slots, which does not grow. A layer that takes keys and
values of an earlier one has no arrays: it looks into the slots of that layer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tunix.inference.gathered import Gathered
from tunix.models.attention import Method, compute_attention
from tunix.models.attention_mask import MaskRule, row_mask_rule
from tunix.models.block import Forward, Layer, Mix
from tunix.models.linear_attention import Memory
from tunix.models.transformer import Transformer

Cache = list[tuple[jax.Array, ...] | Memory]

SLOTS = -2  # the dimension of the slots, in each array of a cache


def prefill(
    model: Transformer, weights: Gathered, tokens: jax.Array, first: jax.Array, num_slots: int, reach: int | None = None
) -> tuple[jax.Array, Cache]:
    """Return the logits [B, V] after prompts [B, T] int32 that begin at `first` [B], and a cache of `num_slots` slots.

    `reach` is the number of tokens of the longest prompt with its answer, where that is not `num_slots`.
    """
    # Padding before a prompt has position 0 and segment 0, which no token of the prompt (segment 1) attends to.
    times = jnp.arange(tokens.shape[1])
    positions = jnp.maximum(times - first[:, None], 0)
    segments = (times >= first[:, None]).astype(jnp.int32)

    def mix_of(layer: Layer, _: None) -> Mix:
        def prompt_attention(q, cached, heads):
            mask = row_mask_rule(model.local_segments(segments, layer), layer.window)
            k, v = heads.expand(*cached)
            out = compute_attention(q, k, v, mask, model.layout, model.method_of(heads), heads.kv_dim_name)
            return out, tuple(_to_slots(_swap_heads(x), layer.window) for x in cached)

        return Mix(prompt_attention, lambda recurrence: recurrence.run_rows(segments))

    return _compute_logits(model, weights, tokens, positions, Forward(mix_of, num_slots, reach=reach))


def decode(
    model: Transformer,
    weights: Gathered,
    cache: Cache,
    token: jax.Array,
    time: jax.Array,
    first: jax.Array,
    reach: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Return the logits [B, V] after one more token [B] int32 of each row, and the cache.

    It stands at `time` (scalar), and the rows began at `first` [B]. `reach` (scalar) is the number of tokens of the
    longest prompt with its answer.
    """

    def mix_of(layer: Layer, _: None) -> Mix:
        def cache_attention(q, cached, heads):
            slots, size = cache[layer.number], cache[layer.number][0].shape[SLOTS]
            cached = tuple(
                jax.lax.dynamic_update_slice_in_dim(old, _swap_heads(new), time % size, axis=SLOTS)
                for old, new in zip(slots, cached, strict=True)
            )
            # One query has few scores: no kernel does better than the plain one. Layers that attend within chunks see
            # the times from the beginning of the new token's chunk on: in chunks of 4, the token at place 6 of its row
            # sees the places 4, 5 and 6.
            method = Method("xla", "none", model.cfg.attention_options)
            chunked = model.cfg.local_attention == "chunk"
            mask = _find_visible(size, time, first + (time - first) // size * size if chunked else first)

            def look(q, k, v, layout):
                return compute_attention(q, k, v, mask, layout, method, heads.kv_dim_name)

            return heads.look_back(q, tuple(map(_swap_heads, cached)), look), cached

        return Mix(cache_attention, lambda recurrence: recurrence.step(cache[layer.number]))

    forward = Forward(mix_of, max(list_slots(cache)), reach=reach)
    return _compute_logits(model, weights, token[:, None], (time - first)[:, None], forward)


def _compute_logits(
    model: Transformer, weights: Gathered, tokens, positions, forward: Forward
) -> tuple[jax.Array, Cache]:
    tables = model.tables()
    hidden, cache = model.hidden_apart(tables, tokens, positions, forward, weights.layers)
    return model.logits(tables, hidden[:, -1:])[:, 0], cache


def _find_visible(size: int, time: jax.Array, first: jax.Array) -> MaskRule:
    """Return which of the `size` slots of a cache the token at `time` (scalar) sees, of rows or chunks from `first` on.

    The cache of a local layer is as long as its window, so that a slot holds no token that has left the window. A slot
    that no token has taken yet has a time before 0, which is before every row begins. Chunks are as long as the cache
    of their layer; a longer cache has one chunk.
    """
    # Slot s holds the newest time t <= now with t % size = s. With 4 slots at time 5 these are 4, 5, 2 and 3.
    times = time - (time - jnp.arange(size)) % size
    in_row = (times >= first[:, None]).astype(jnp.int32)
    return MaskRule(time[None], times, jnp.ones_like(first)[:, None], in_row, size)


def _swap_heads(x: jax.Array) -> jax.Array:
    """Return [B, T, K, H] as [B, K, T, H], or the other way round; latents [B, T, C], which have no heads, stay."""
    return jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x


def _to_slots(x: jax.Array, size: int) -> jax.Array:
    """Return the cache of `size` slots with the newest of the times [B, ..., T, H]: time t stands in slot t % size.

    times    0 1 2 3 4 5 6        7 times, 4 slots: 3 to 6 stay
    slots    4 5 6 3
    """
    length = x.shape[SLOTS]
    if length <= size:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, size - length), (0, 0)])
    turn = length % size  # the slot of the oldest time that stays, length - size
    last = x[..., length - size :, :]  # in the picture 3 4 5 6 with `turn` 3, which becomes 4 5 6 | 3
    return jnp.concatenate([last[..., size - turn :, :], last[..., : size - turn, :]], axis=SLOTS)


def grow(cache: Cache, windows: tuple[int, ...]) -> Cache:
    """Return the cache of layers with these windows, which are as long as before or longer.

    A cache that is shorter than its window was never full, and time t stands in slot t: the new slots come behind.
    """
    return [
        cached if isinstance(cached, Memory) else tuple(_to_slots(x, window) for x in cached)
        for cached, window in zip(cache, windows, strict=True)
    ]


def list_slots(cache: Cache) -> list[int]:
    """Return the number of slots of each layer: 0 for linear attention, and for a layer without a cache."""
    return [0 if isinstance(cached, Memory) or not cached else cached[0].shape[SLOTS] for cached in cache]


def repeat_rows(tree: Any, times: int) -> Any:
    """Return arrays [B, ...] with each row `times` times, [B * times, ...], on the shard where it lives."""
    return _apply_on_shards(lambda x: jnp.repeat(x, times, axis=0), tree)


def take_rows(tree: Any, indices: jax.Array) -> Any:
    """Return some rows of arrays [B, ...]; `indices` are split like B and count within the data shard."""
    return _apply_on_shards(lambda x, indices: x[indices], tree, indices)


def _apply_on_shards(function: Callable, tree: Any, *others: jax.Array) -> Any:
    # In a shard_map each device takes its own rows. A plain `x[indices]` might take any row, so it would gather all.
    def apply(x: jax.Array) -> jax.Array:
        specs = [jax.typeof(each).sharding.spec for each in (x, *others)]
        return jax.shard_map(function, in_specs=tuple(specs), out_specs=specs[0])(x, *others)

    return jax.tree.map(apply, tree)
