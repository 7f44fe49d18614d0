"""The rows of a cache of keys and values, and its pages: made, filled with prompts, moved, and counted.

What a cache is says `kv_cache.py`, which has the passes through the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tunix.costs.rollout import PAGE
from tunix.models.linear_attention import Memory


class Pages(NamedTuple):
    """The cache of a layer in pages: arrays [P, ..., S, H] like those of slots, in which a page stands for a row."""

    arrays: tuple[jax.Array, ...]


class LastState(NamedTuple):
    """Input of the layer of `model.mtp` for each row: the state [B, D] behind the final norm of its last token."""

    hidden: jax.Array


Cache = list[tuple[jax.Array, ...] | Memory | Pages | LastState]

FIXED = (Memory, LastState)  # they have no slots
SLOTS = -2  # the dimension of the slots, in each array of a cache


def insert_rows(
    cache: Cache, entries: Cache, source: jax.Array, rows: jax.Array, pages: jax.Array | None = None
) -> Cache:
    """Return the cache with the rows `source` [R] of `entries` (of `prefill`) in its rows `rows` [R].

    Both count on their data shard. A row behind the last one is left out, and so is a page behind the last one of
    `pages` [R, W], which say where the tokens of a row go in layers with pages.
    """

    def insert_slots(old, new, source, rows):
        # A cache with fewer slots than the entries has room for all tokens that count.
        num_slots = min(old.shape[SLOTS], new.shape[SLOTS])
        chosen = new[source][..., :num_slots, :]
        return old.at[rows, ..., :num_slots, :].set(chosen.astype(old.dtype), mode="drop")

    def insert_fixed(old, new, source, rows):
        return old.at[rows].set(new[source], mode="drop")

    def insert_pages(old, new, source, pages):
        (count, width), (_, num_heads, size, dim) = pages.shape, old.shape
        chosen = new[source]
        chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, width * size - chosen.shape[SLOTS]), (0, 0)))
        chosen = jnp.moveaxis(chosen.reshape(count, num_heads, width, size, dim), 2, 1)
        return old.at[pages].set(chosen.astype(old.dtype), mode="drop")

    def insert(old, new):
        if isinstance(old, Pages):
            return Pages(on_shards(insert_pages, old.arrays, new, source, pages))
        return on_shards(insert_fixed if isinstance(old, FIXED) else insert_slots, old, new, source, rows)

    return [insert(old, new) for old, new in zip(cache, entries, strict=True)]


def make_cache(
    entries: Cache, num_rows: int, windows: tuple[int, ...], paged: tuple[bool, ...] = (), num_pages: int = 0
) -> Cache:
    """Return an empty cache of `num_rows` rows, of layers with these windows, like the entries of `prefill`.

    Of the layers that are `paged` it has `num_pages` pages.
    """

    def make(x: jax.Array, count: int, window: int | None) -> jax.Array:
        shape = list(x.shape)
        shape[0] = count
        if window is not None:
            shape[SLOTS] = window
        return jnp.zeros(shape, x.dtype, out_sharding=jax.typeof(x).sharding)

    cache: Cache = []
    for cached, window, has_pages in zip(entries, windows, paged or (False,) * len(windows), strict=True):
        if has_pages and cached:
            cache.append(Pages(jax.tree.map(lambda x: make(x, num_pages, PAGE), cached)))
        else:
            each = None if isinstance(cached, FIXED) else window
            cache.append(jax.tree.map(lambda x, each=each: make(x, num_rows, each), cached))
    return cache


def add_pages(pages: list[Pages], num_pages: int) -> list[Pages]:
    """Return pages with empty ones behind them, so that a data shard has `num_pages`."""
    return on_shards(lambda x: jnp.pad(x, ((0, num_pages - len(x)), *[(0, 0)] * (x.ndim - 1))), pages)


def resize(cache: Cache, rows: jax.Array, windows: tuple[int, ...]) -> Cache:
    """Return a cache of some rows [B], numbers on their data shard, and of layers with these windows.

    A number behind the last row gives any row. Windows are as long as before or longer. A cache that is shorter than
    its window was never full, and time t stands in slot t: the new slots come behind.
    """

    def pad(x: jax.Array, window: int) -> jax.Array:
        return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, window - x.shape[SLOTS]), (0, 0)])

    return [
        cached if isinstance(cached, FIXED) else tuple(pad(x, window) for x in cached)
        for cached, window in zip(take_rows(cache, rows), windows, strict=True)
    ]


def list_slots(cache: Cache, table: jax.Array | None = None) -> list[int]:
    """Return the slots of a row in each layer: 0 for linear attention, and for a layer without a cache.

    In pages it has those of all pages in a row of the `table` [B, W].
    """

    def count(cached: Any) -> int:
        if isinstance(cached, Pages):
            assert table is not None
            return table.shape[1] * cached.arrays[0].shape[SLOTS]
        return 0 if isinstance(cached, FIXED) or not cached else cached[0].shape[SLOTS]

    return [count(cached) for cached in cache]


def set_rows(cached: Any, new: Any, rows: jax.Array) -> Any:
    """Return arrays [B, ...] with those of some rows [A] in their places; a number behind the last is left out."""
    return on_shards(lambda x, y, rows: x.at[rows].set(y, mode="drop"), cached, new, rows)


def split_mtp(cache: Cache) -> tuple[Cache, tuple[jax.Array, ...], LastState]:
    """Return a cache without what is for `model.mtp`, that layer's slots [B, K, S, H], and the state that waits."""
    *layers, cached, last = cache
    assert isinstance(last, LastState)
    assert not isinstance(cached, (*FIXED, Pages))
    return layers, cached, last


def take_rows(tree: Any, rows: jax.Array) -> Any:
    """Return the rows [A] of arrays [B, ...], numbers on their data shard; a number behind the last gives any row."""
    return on_shards(lambda x, rows: jnp.take(x, rows, axis=0, mode="clip"), tree, rows)


def on_shards(function: Callable, tree: Any, *others: Any) -> Any:
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
