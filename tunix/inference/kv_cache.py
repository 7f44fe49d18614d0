"""Cache of the keys and values of earlier tokens, so that new tokens compute only their own; the passes that fill it.

Each row of the cache has a clock of its own: token i of a row stands in slot i % S. S is the window of the layer, or
the slots of the cache if those are fewer: a later token takes the place of one that has left the window.

    slots       0  1  2  3  4  5  6  7        a cache of 8 slots, of a layer without a window
    row 0       a  b  c  d  e  -  -  -        5 tokens; the next one goes into slot 5
    row 1       f  g  -  -  -  -  -  -        2 tokens

The cache of a layer is a tuple of arrays [B, ..., S, H]: keys and values [B, K, S, H], or the latents that they are
made of, [B, S, C] and [B, S, R] (models/mla.py). Rows live on data shards, heads are split like those of the model. A
layer of linear attention has a `Memory` in the place of slots, which does not grow. A layer that takes keys and values
of an earlier one has no arrays: it looks into the slots of that layer.

Tokens at work have heads behind times, [B, T, K, H]. The cache has them before the slots, because products of matrices
take one head at a time. Otherwise XLA keeps a copy of the whole cache in that order beside it for the loop over tokens.

Three passes through the model:

    prefill     prompts by themselves -> their entries; `place_rows` writes each into several rows of a cache
    extend      several tokens behind those that some rows have
    decode      one token behind those that all rows have
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tunix.inference.gathered import Gathered
from tunix.models.attention import attend_to_cache, compute_attention
from tunix.models.attention_mask import row_mask_rule
from tunix.models.block import Forward, Layer, Mix
from tunix.models.linear_attention import Memory
from tunix.models.transformer import Transformer

Cache = list[tuple[jax.Array, ...] | Memory]

SLOTS = -2  # the dimension of the slots, in each array of a cache


def prefill(
    model: Transformer, weights: Gathered, tokens: jax.Array, count: jax.Array, reach: int | jax.Array
) -> tuple[jax.Array, Cache]:
    """Return the logits [P, V] after prompts, and a cache of their rows, which has a slot for each token.

    Args:
        tokens: [P, C] int32, of which the first `count` [P] are the prompt.
        reach: number of tokens of the longest row when it ends.
    """
    # Tokens that fill a row up stand behind the prompt, which does not see them. They have the last token's position,
    # because a table of positions may end there.
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), count[:, None] - 1)
    segments = jnp.zeros_like(positions)  # whole on each device, as the keys are

    def mix_of(layer: Layer, _: None) -> Mix:
        def prompt_attention(q, new, heads):
            mask = row_mask_rule(model.local_segments(segments, layer), layer.window)
            k, v = heads.expand(*new)
            out = compute_attention(q, k, v, mask, model.layout, model.method_of(heads), heads.kv_dim_name)
            return out, tuple(_to_slots(_swap_heads(x), count, layer.window) for x in new)

        return Mix(prompt_attention, lambda recurrence: recurrence.extend(None, count))

    hidden, entries = _run_blocks(model, weights, tokens, positions, Forward(mix_of, tokens.shape[1], reach=reach))
    return _compute_logits(model, hidden, count), entries


def extend(
    model: Transformer,
    weights: Gathered,
    cache: Cache,
    rows: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    count: jax.Array,
    reach: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Return the logits [A, V] after more tokens of some rows, and the cache with these tokens.

    Args:
        rows: [A] int32, numbers of the rows on their data shard; the number of all of them for a filler.
        tokens: [A, C] int32, of which the first `count` [A] stand behind the `start` [A] tokens that the rows have.
        reach: int32 scalar, number of tokens of the longest row when it ends.
    """
    times = start[:, None] + jnp.arange(tokens.shape[1])  # [A, C]
    end = (start + count)[:, None]
    positions = jnp.minimum(times, end - 1)

    def mix_of(layer: Layer, _: None) -> Mix:
        def cache_attention(q, new, heads):
            kept = cache[layer.number]
            size = kept[0].shape[SLOTS]
            # New tokens may take the slots of tokens that others of them see: all look at the old slots and the new
            # tokens, side by side. Of the new ones, those stay that are in the window of the next token.
            old = take_rows(kept, rows)
            entries = tuple(jnp.concatenate([_swap_heads(x), y], axis=1) for x, y in zip(old, new, strict=True))
            key_times = jnp.concatenate([_list_times(start, size), times], axis=1)
            visible = _find_visible(model, layer, times, key_times)
            slots = jnp.where((times < end) & (times >= end - size), times % size, size)
            look = _look_at(model, heads, visible)
            return heads.look_back(q, entries, look), _write(kept, new, rows, slots)

        def recur(recurrence):
            memory = cache[layer.number]
            out, after = recurrence.extend(take_rows(memory, rows), count)
            return out, _on_shards(lambda x, y, rows: x.at[rows].set(y, mode="drop"), memory, after, rows)

        return Mix(cache_attention, recur)

    hidden, cache = _run_blocks(model, weights, tokens, positions, Forward(mix_of, max(list_slots(cache)), reach=reach))
    return _compute_logits(model, hidden, count), cache


def decode(
    model: Transformer,
    weights: Gathered,
    cache: Cache,
    token: jax.Array,
    length: jax.Array,
    working: jax.Array,
    reach: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Return the logits [B, V] after one more token [B] int32 of each row, and the cache with it.

    A row has `length` [B] tokens before it. The cache of a row that is not `working`, [B] bool, stays as it is; its
    logits mean nothing. `reach` (int32 scalar) is the number of tokens of the longest row when it ends.
    """
    time = length[:, None]  # [B, 1]

    def mix_of(layer: Layer, _: None) -> Mix:
        def cache_attention(q, new, heads):
            kept = cache[layer.number]
            size = kept[0].shape[SLOTS]
            kept = _write(kept, new, None, jnp.where(working[:, None], time % size, size))
            visible = _find_visible(model, layer, time, _list_times(length + 1, size))
            return heads.look_back(q, tuple(map(_swap_heads, kept)), _look_at(model, heads, visible)), kept

        def recur(recurrence):
            memory = cache[layer.number]
            out, after = recurrence.step(memory)
            return out, _on_shards(
                lambda old, new, working: jnp.where(working.reshape(-1, *[1] * (old.ndim - 1)), new, old),
                memory, after, working,
            )  # fmt: skip

        return Mix(cache_attention, recur)

    forward = Forward(mix_of, max(list_slots(cache)), reach=reach)
    hidden, cache = _run_blocks(model, weights, token[:, None], time, forward)
    return _compute_logits(model, hidden, None), cache


def _run_blocks(
    model: Transformer, weights: Gathered, tokens: jax.Array, positions: jax.Array, forward: Forward
) -> tuple[jax.Array, Cache]:
    return model.hidden_apart(model.tables(), tokens, positions, forward, weights.layers)


def _compute_logits(model: Transformer, hidden: jax.Array, count: jax.Array | None) -> jax.Array:
    """Return the logits [B, V] of the last of `count` [B] tokens, of hidden states [B, T, D]; None: of the last one."""
    if count is None:
        return model.logits(model.tables(), hidden[:, -1:])[:, 0]
    last = _on_shards(lambda x, count: jnp.take_along_axis(x, count[:, None, None] - 1, axis=1), hidden, count)
    return model.logits(model.tables(), last)[:, 0]


# Which slots a token sees, and where it goes.


def _list_times(length: jax.Array, size: int) -> jax.Array:
    """Return the times of the tokens in `size` slots of rows with `length` [B] tokens: [B, S]; below 0 without one.

    Slot s holds the newest time t < length with t % size = s. With 4 slots after 6 tokens these are 4, 5, 2 and 3.
    """
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(size)) % size


def _find_visible(model: Transformer, layer: Layer, times: jax.Array, key_times: jax.Array) -> jax.Array:
    """Return which keys at the times [B, S] the tokens at `times` [B, T] see in a layer: [B, T, S] bool."""
    distance = times[:, :, None] - key_times[:, None, :]
    visible = (distance >= 0) & (distance < layer.window) & (key_times >= 0)[:, None, :]
    if model.cfg.local_attention == "chunk":
        # A token sees the times from the beginning of its chunk on: in chunks of 4, time 6 sees the times 4, 5 and 6.
        visible &= key_times[:, None, :] >= (times // layer.window * layer.window)[:, :, None]
    return visible


def _look_at(model: Transformer, heads: Any, visible: jax.Array) -> Callable:
    def look(q, k, v, layout):
        return attend_to_cache(q, k, v, visible, layout, model.cfg.attention_options, heads.kv_dim_name)

    return look


def _write(
    kept: tuple[jax.Array, ...], new: tuple[jax.Array, ...], rows: jax.Array | None, slots: jax.Array
) -> tuple[jax.Array, ...]:
    """Return arrays of a cache with new tokens [A, C, ...] in the slots [A, C] of some rows [A], or of all (None).

    A token whose slot or row is behind the last one is left out.
    """

    # One scatter. Inside a loop over tokens, XLA writes it in place.
    def write(old, new, slots, rows=None):
        rows = jnp.arange(old.shape[0]) if rows is None else rows
        return old.at[rows[:, None], ..., slots, :].set(new.astype(old.dtype), mode="drop")

    others = (slots,) if rows is None else (slots, rows)
    return tuple(_on_shards(write, old, each, *others) for old, each in zip(kept, new, strict=True))


def _swap_heads(x: jax.Array) -> jax.Array:
    """Return [B, T, K, H] as [B, K, T, H], or the other way round; latents [B, T, C], which have no heads, stay."""
    return jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x


def _to_slots(x: jax.Array, count: jax.Array, size: int) -> jax.Array:
    """Return the last `size` of the first `count` [B] tokens of [B, ..., T, H] in their slots: time t in t % size.

    times    0 1 2 3 4 5 6        7 tokens, 4 slots: 3 to 6 stay
    slots    4 5 6 3

    Where all tokens find room, those behind `count` stay: a slot without a token of its row is not seen.
    """
    if x.shape[SLOTS] <= size:
        return x

    def take(x, count):
        index = jnp.maximum(_list_times(count, size), 0)
        return jnp.take_along_axis(x, index.reshape(len(x), *[1] * (x.ndim - 3), size, 1), axis=SLOTS)

    return _on_shards(take, x, count)


# Rows of a cache.


def place_rows(cache: Cache, entries: Cache, source: jax.Array, rows: jax.Array) -> Cache:
    """Return the cache with the rows `source` [R] of `entries` (of `prefill`) in its rows `rows` [R].

    Both count on their data shard. A row behind the last one is left out.
    """

    def place_slots(old, new, source, rows):
        # A cache with fewer slots than the entries has room for all tokens that count.
        num_slots = min(old.shape[SLOTS], new.shape[SLOTS])
        taken = new[source][..., :num_slots, :]
        return old.at[rows, ..., :num_slots, :].set(taken.astype(old.dtype), mode="drop")

    def place_memory(old, new, source, rows):
        return old.at[rows].set(new[source], mode="drop")

    return [
        _on_shards(place_memory if isinstance(old, Memory) else place_slots, old, new, source, rows)
        for old, new in zip(cache, entries, strict=True)
    ]


def make_cache(entries: Cache, num_rows: int, windows: tuple[int, ...]) -> Cache:
    """Return an empty cache of `num_rows` rows, of layers with these windows, like the entries of `prefill`."""

    def make(x: jax.Array, window: int | None) -> jax.Array:
        shape = list(x.shape)
        shape[0] = num_rows
        if window is not None:
            shape[SLOTS] = window
        return jnp.zeros(shape, x.dtype, out_sharding=jax.typeof(x).sharding)

    cache: Cache = []
    for kept, window in zip(entries, windows, strict=True):
        each = None if isinstance(kept, Memory) else window
        cache.append(jax.tree.map(lambda x, each=each: make(x, each), kept))
    return cache


def resize(cache: Cache, rows: jax.Array, windows: tuple[int, ...]) -> Cache:
    """Return a cache of some rows [B], numbers on their data shard, and of layers with these windows.

    A number behind the last row gives any row. Windows are as long as before or longer. A cache that is shorter than
    its window was never full, and time t stands in slot t: the new slots come behind.
    """

    def take(x, rows):
        return jnp.take(x, rows, axis=0, mode="clip")

    def pad(x: jax.Array, window: int) -> jax.Array:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, window - x.shape[SLOTS]), (0, 0)])

    taken = [_on_shards(take, kept, rows) for kept in cache]
    return [
        kept if isinstance(kept, Memory) else tuple(pad(x, window) for x in kept)
        for kept, window in zip(taken, windows, strict=True)
    ]


def list_slots(cache: Cache) -> list[int]:
    """Return the number of slots of each layer: 0 for linear attention, and for a layer without a cache."""
    return [0 if isinstance(kept, Memory) or not kept else kept[0].shape[SLOTS] for kept in cache]


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """Return the rows [A] of arrays [B, ...], numbers on their data shard; a number behind the last gives any row."""
    return _on_shards(lambda x, rows: jnp.take(x, rows, axis=0, mode="clip"), tree, rows)


def _on_shards(function: Callable, tree: Any, *others: Any) -> Any:
    """Return what a function returns for each array of a tree, on each data shard apart; laid out like the array.

    Of `others`, trees of the same form give each array its partner, and single arrays are given to all.
    """

    # In a shard_map each device takes its own rows. A plain `x[rows]` might take any row, so it would gather all.
    def apply(x: jax.Array, *partners: jax.Array) -> jax.Array:
        specs = [jax.typeof(each).sharding.spec for each in (x, *partners)]
        return jax.shard_map(function, in_specs=tuple(specs), out_specs=specs[0])(x, *partners)

    structure: Any = jax.tree.structure(tree)
    columns = [
        jax.tree.leaves(other) if jax.tree.structure(other) == structure else [other] * structure.num_leaves
        for other in others
    ]
    leaves = [apply(*each) for each in zip(jax.tree.leaves(tree), *columns, strict=True)]
    return jax.tree.unflatten(structure, leaves)
