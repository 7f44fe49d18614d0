"""Cache of the keys and values of earlier tokens, so that new tokens compute only their own; the passes that fill it.

Each row of the cache has a clock of its own: token i of a row stands in slot i % S. S is the window of the layer, or
the slots of the cache if those are fewer: a later token takes the place of one that has left the window.

    slots       0  1  2  3  4  5  6  7        a cache of 8 slots, of a layer without a window
    row 0       a  b  c  d  e  -  -  -        5 tokens; the next one goes into slot 5
    row 1       f  g  -  -  -  -  -  -        2 tokens

The cache of a layer is a tuple of arrays [B, ..., S, H]: keys and values [B, K, S, H], or the latents that they are
made of, [B, S, C] and [B, S, R] (models/mla.py); of 8 bits each, with their scales behind them. Rows live on data
shards, heads are split like those of the model. A layer of linear attention has a `Memory` in the place of slots, which
does not grow. A layer that takes keys and values of an earlier one has no arrays: it looks into the slots of that
layer. Behind the layers stand the slots of `model.mtp` and a `LastState`, where rows guess by that layer.

In place of slots, the layers that see all tokens may have pages (sampling.cache=pages): `Pages` holds arrays
[P, K, S, H] of P pages with S slots each, and a table [B, W] says which pages a row has (page_pool.py). Token i of a
row stands in slot i % S of page i // S of its table.

Tokens at work have heads behind times, [B, T, K, H]. The cache has them before the slots, because products of matrices
take one head at a time. Otherwise XLA keeps a copy of the whole cache in that order beside it for the loop over tokens.

Passes through the model:

    prefill     prompts by themselves -> their entries; `insert_rows` writes each into several rows of a cache
    run_after   several tokens after those that some rows have, or all; as many of them are kept as turn out right
    decode      one token behind those that all rows have
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.costs.rollout import PAGE
from tunix.inference.gathered import Gathered
from tunix.inference.page_pool import NO_PAGE
from tunix.models.attention import FEW_QUERIES, Scaled, attend_to_cache, compute_attention
from tunix.models.attention_mask import row_mask_rule
from tunix.models.block import Forward, Layer, Mix, Rows
from tunix.models.kernels import branches_are_cheap, has_product_library
from tunix.models.linear_attention import Memory
from tunix.models.transformer import Transformer
from tunix.models.vision import Images

# The rows of a cache and its pages: made, filled with prompts, moved, and counted.


class Pages(NamedTuple):
    """The cache of a layer in pages: arrays [P, ..., S, H] like those of slots, in which a page stands for a row."""

    arrays: tuple[jax.Array, ...]


class LastState(NamedTuple):
    """Input of the layer of `model.mtp` for each row: the state [B, D] behind the final norm of its last token."""

    hidden: jax.Array


Cache = list[tuple[jax.Array, ...] | Memory | Pages | LastState]

FIXED = (Memory, LastState)  # they have no slots
SLOTS = -2  # the dimension of the slots, in each array of a cache


def insert_rows(cache: Cache, entries: Cache, source: jax.Array, rows: jax.Array, pages: jax.Array | None) -> Cache:
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


# Passes through the model.


MIN_SCALE = 1e-30  # of a vector of 8 bits: one of zeros has the codes 0


def prefill(
    model: Transformer,
    weights: Gathered,
    tokens: jax.Array,
    count: jax.Array,
    final_length: int | jax.Array,
    cache_dtype: str | None = None,
    images: Images | None = None,
    with_mtp: bool = False,
) -> tuple[jax.Array, Cache]:
    """Return the hidden states [P, C, D] of prompts, and a cache of their rows, which has a slot for each token.

    Args:
        tokens: [P, C] int32, of which the first `count` [P] are the prompt.
        final_length: [P] int32, tokens of each row when it ends, or a number for all rows.
        cache_dtype: "int8", or None for the dtype of products.
        images: those of the prompts; None where no prompt has any.
        with_mtp: the cache has what guesses by `model.mtp` need.
    """
    # Tokens that fill a row up stand behind the prompt, which does not see them. They have the last token's position,
    # because a table of positions may end there.
    positions = jnp.minimum(jnp.arange(tokens.shape[1]), count[:, None] - 1)
    segments = jnp.zeros_like(positions)  # whole on each device, as the keys are
    ends = model.find_ends(images)

    def mix_of(layer: Layer, _: None) -> Mix:
        def prompt_attention(q, new, heads):
            mask = row_mask_rule(model.local_segments(segments, layer), layer.window, ends)
            k, v = heads.expand(*new)
            out = compute_attention(q, k, v, mask, model.layout, model.method_of(heads), heads.kv_dim_name)
            cached = _to_bits(new) if cache_dtype is None else quantize(new)
            return out, tuple(_to_slots(_swap_heads(x), count, layer.window) for x in cached)

        return Mix(prompt_attention, lambda recurrence: recurrence.extend(None, count))

    forward = Forward(mix_of, tokens.shape[1], final_length=final_length)
    hidden, entries = _run_blocks(model, weights, tokens, positions, forward, images)
    if with_mtp:
        # The token behind the prompt is not drawn yet, so the last state waits for it. Its slot is not seen until then.
        _, slots = _run_mtp(model, weights, hidden, jnp.roll(tokens, -1, axis=1), positions, forward)
        entries = [*entries, slots, LastState(_take_last(hidden, count)[:, 0])]
    return hidden, entries


class NewTokens(NamedTuple):
    """Tokens that stand behind those that rows of a cache have: int32 arrays [A], `tokens` [A, C]."""

    tokens: jax.Array
    start: jax.Array  # tokens that the row has before
    final_length: jax.Array  # tokens of the row when it ends
    shift: jax.Array  # what positions have beside times, behind images (`Vision.shift_positions`)
    rows: jax.Array | None  # on their data shard; the number of all of them for a filler. None: all rows
    table: jax.Array | None  # [A, W], the pages of the rows, if the cache has pages


def run_after(
    model: Transformer, weights: Gathered, cache: Cache, more: NewTokens
) -> tuple[jax.Array, Callable[[jax.Array], Cache]]:
    """Return the hidden states [A, C, D] of new tokens, and the function that gives the cache with the first so many
    [A] of them."""
    num_layers = model.cfg.num_layers
    mix_of, positions = _mix_after(model, cache[:num_layers], more)
    forward = Forward(mix_of, max(list_slots(cache, more.table)), final_length=more.final_length)
    hidden, writes = _run_blocks(model, weights, more.tokens, positions, forward)

    def write(count: jax.Array) -> Cache:
        # A layer that takes keys and values of an earlier one has no cache to write: () in the place of a function.
        after = [each(count) if callable(each) else each for each in writes]
        if len(cache) == num_layers:
            return after
        _, cached, last = split_mtp(cache)
        # Each token stands beside the state before it: the first one beside the state that waits for it.
        state = last.hidden if more.rows is None else take_rows(last, more.rows).hidden
        first = reshard(state[:, None], jax.typeof(hidden).sharding.spec)
        states = jnp.concatenate([first, hidden[:, :-1]], axis=1)
        _, write_slots = run_mtp_after(model, weights, cached, states, more._replace(start=more.start - 1))
        last_state = LastState(jnp.where(count[:, None] > 0, _take_last(hidden, count)[:, 0], state))
        return [*after, write_slots(count), last_state if more.rows is None else set_rows(last, last_state, more.rows)]

    return hidden, write


def run_mtp_after(
    model: Transformer, weights: Gathered, cached: tuple[jax.Array, ...], states: jax.Array, more: NewTokens
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """Do as `run_after` with the layer of `model.mtp` and its slots `cached`: the tokens stand beside the states
    [A, C, D] of those before them."""
    mix_of, positions = _mix_after(model, [cached], more)
    forward = Forward(mix_of, cached[0].shape[SLOTS], final_length=more.final_length)
    return _run_mtp(model, weights, states, more.tokens, positions, forward)


def _run_mtp(
    model: Transformer, weights: Gathered, states: jax.Array, tokens: jax.Array, positions: jax.Array, forward: Forward
) -> tuple[jax.Array, Any]:
    """Return states [B, T, D] that logits of the tokens after `tokens` [B, T] are taken of, and the layer's cache."""
    assert model.mtp is not None
    with jax.named_scope("mtp"):
        states = reshard(states, model.layout.activation("BTD"))
        x = model.mtp.join(model.embedding.lookup(model.vocab_weights()[0], tokens), states)
        hidden, (cache,) = model.mtp.run_apart(Rows(x, positions, None), forward, weights.mtp_layers)
    return hidden, cache


def _mix_after(model: Transformer, cache: Cache, more: NewTokens) -> tuple[Callable[[Layer, None], Mix], jax.Array]:
    """Return how new tokens look at the cache and at one another, and their positions [A, C]. In the place of its cache
    a layer returns the function that writes the first so many [A] of them."""
    rows, start, num_tokens = more.rows, more.start, more.tokens.shape[1]
    times = start[:, None] + jnp.arange(num_tokens)  # [A, C]
    # A table of positions may end before the tokens that only fill up.
    positions = jnp.minimum(times + more.shift[:, None], model.cfg.context_length - 1)

    def mix_of(layer: Layer, _: None) -> Mix:
        def cache_attention(q, new, heads):
            cached = cache[layer.number]
            if isinstance(cached, Pages):
                # A token that does not count takes the slot of a later one, which is written again before it is seen.
                out, cached = _look_into_pages(model, q, new, heads, cached, more.table, times)
                return out, lambda count: cached
            size = cached[0].shape[SLOTS]
            new = _pack(new, cached)
            # New tokens may take the slots of tokens that others of them see. So they look at the old slots and at one
            # another, and are written afterwards: those that are in the window of the next token.
            old = cached if rows is None else take_rows(cached, rows)
            parts = ((old, _list_times(start, size)), (tuple(map(_swap_heads, new)), times))
            out = _look_at_parts(model, layer, q, heads, times, parts)

            def write(count):
                end = (start + count)[:, None]
                slots = jnp.where((times < end) & (times >= end - size), times % size, size)
                return _write(cached, new, rows, slots)

            return out, write

        def recur(recurrence):
            cached = cache[layer.number]
            memory = cached if rows is None else take_rows(cached, rows)

            def write(count):
                _, after = recurrence.extend(memory, count)
                return after if rows is None else set_rows(cached, after, rows)

            return recurrence.extend(memory, jnp.full_like(start, num_tokens))[0], write

        return Mix(cache_attention, recur)

    return mix_of, positions


def decode(
    model: Transformer, weights: Gathered, cache: Cache, newest: NewTokens, working: jax.Array
) -> tuple[jax.Array, Cache]:
    """Return the logits [B, V] after one new token of each row, and the cache with it.

    The cache of a row that is not `working`, [B] bool, stays as it is; its logits mean nothing.
    """
    time = newest.start[:, None]  # [B, 1]

    def mix_of(layer: Layer, _: None) -> Mix:
        def cache_attention(q, new, heads):
            # The token is written before it looks: what stood in its slot has left the window.
            cached = cache[layer.number]
            if isinstance(cached, Pages):
                times = jnp.where(working[:, None], time, -1)
                return _look_into_pages(model, q, new, heads, cached, newest.table, times)
            size = cached[0].shape[SLOTS]
            cached = _write(cached, _pack(new, cached), None, jnp.where(working[:, None], time % size, size))
            visible = _find_visible(model, layer, time, _list_times(newest.start + 1, size))
            look = _look_at(heads, visible, model.cfg.attention_options)
            return heads.look_back(q, _unpack(cached, q.dtype), look), cached

        def recur(recurrence):
            memory = cache[layer.number]
            out, after = recurrence.step(memory)
            return out, on_shards(
                lambda old, new, working: jnp.where(working.reshape(-1, *[1] * (old.ndim - 1)), new, old),
                memory, after, working,
            )  # fmt: skip

        return Mix(cache_attention, recur)

    forward = Forward(mix_of, max(list_slots(cache, newest.table)), final_length=newest.final_length)
    hidden, cache = _run_blocks(model, weights, newest.tokens, time + newest.shift[:, None], forward)
    return model.logits(model.vocab_weights(), hidden)[:, 0], cache


def _run_blocks(
    model: Transformer,
    weights: Gathered,
    tokens: jax.Array,
    positions: jax.Array,
    forward: Forward,
    images: Images | None = None,
) -> tuple[jax.Array, Cache]:
    return model.hidden_apart(model.vocab_weights(), tokens, positions, forward, weights.layers, images)


def compute_last_logits(model: Transformer, hidden: jax.Array, count: jax.Array) -> jax.Array:
    """Return the logits [B, V] of the last of `count` [B] tokens, of hidden states [B, T, D]."""
    return model.logits(model.vocab_weights(), _take_last(hidden, count))[:, 0]


def _take_last(hidden: jax.Array, count: jax.Array) -> jax.Array:
    """Return the hidden states [B, 1, D] of the last of `count` [B] tokens."""
    return on_shards(lambda x, count: jnp.take_along_axis(x, count[:, None, None] - 1, axis=1), hidden, count)


# Which slots a token sees, and where it goes.


def _list_times(length: jax.Array, size: int) -> jax.Array:
    """Return the times of the tokens in `size` slots of rows with `length` [B] tokens: [B, S]; below 0 without one.
    Slot s holds the newest time t < length with t % size = s. With 4 slots after 6 tokens these are 4, 5, 2 and 3."""
    last = length[:, None] - 1
    return last - (last - jnp.arange(size)) % size


def _find_visible(model: Transformer, layer: Layer, times: jax.Array, key_times: jax.Array) -> jax.Array:
    """Return which keys at the times [B, S] the tokens at `times` [B, T] see in a layer: [B, T, S] bool."""
    distance = times[:, :, None] - key_times[:, None, :]
    visible = (distance >= 0) & (distance < layer.window) & (key_times >= 0)[:, None, :]
    if model.cfg.local_attention == "chunk":
        # A token sees the times from the beginning of its chunk on: in chunks of 4, time 6 sees the times 4, 5 and 6.
        visible &= key_times[:, None, :] >= (times // layer.window * layer.window)[:, :, None]
    return visible


def _look_at(heads: Any, visible: jax.Array, options: Mapping[str, Any]) -> Callable:
    def look(q, k, v, layout):
        return attend_to_cache(q, k, v, visible, layout, options, heads.kv_dim_name)

    return look


def _look_at_parts(
    model: Transformer,
    layer: Layer,
    q: jax.Array,
    heads: Any,
    times: jax.Array,
    parts: tuple[tuple[tuple[jax.Array, ...], jax.Array], ...],
) -> Any:
    """Return the results of queries [B, T, N, H] at `times` [B, T] over entries in several parts, each with its times.
    A softmax over all keys is the sum of those over its parts, each with its share of the sum of exp(score). So no copy
    of a cache with the new tokens behind it is made."""
    options, outs, log_sums = model.cfg.attention_options, [], []
    for entries, key_times in parts:
        attend = _look_at(heads, _find_visible(model, layer, times, key_times), {**options, "with_sums": True})

        def look(*arguments, attend=attend):
            out, sums = attend(*arguments)
            log_sums.append(sums)
            return out

        outs.append(heads.look_back(q, _unpack(entries, q.dtype), look))
    total = jax.nn.logsumexp(jnp.stack(log_sums), axis=0)
    shares = [jnp.exp(sums - total)[..., None] for sums in log_sums]
    out = sum(out * share for out, share in zip(outs, shares, strict=True)).astype(q.dtype)
    return (out, total) if "with_sums" in options else out


# Pages.


def _look_into_pages(
    model: Transformer,
    q: jax.Array,
    new: tuple[jax.Array, ...],
    heads: Any,
    cached: Pages,
    table: jax.Array | None,
    times: jax.Array,
) -> tuple[Any, Pages]:
    """Return the results of queries [A, C, N, H] at `times` [A, C], and the pages of a layer with these tokens. They
    are written before they look. One without a page, or with the time -1, is left out."""
    assert table is not None
    options, num_slots = model.cfg.attention_options, cached.arrays[0].shape[SLOTS]

    def find_page(table: jax.Array, times: jax.Array) -> jax.Array:
        page = jnp.take_along_axis(table, times // num_slots, axis=1, mode="fill", fill_value=NO_PAGE)
        return jnp.where(times < 0, NO_PAGE, page)

    page = on_shards(find_page, table, times)
    cached = Pages(_write(cached.arrays, _pack(new, cached.arrays), page, times % num_slots))
    if q.shape[1] <= FEW_QUERIES and not branches_are_cheap():  # a GPU
        from tunix.models.paged_attention import attend_to_pages  # imports Pallas

        k, v = _unpack(cached.arrays, q.dtype)
        return attend_to_pages(q, k, v, table, times, model.layout, options, heads.kv_dim_name), cached
    entries = on_shards(_gather_pages, cached.arrays, table)
    visible = times[:, :, None] >= jnp.arange(entries[0].shape[SLOTS])
    return heads.look_back(q, _unpack(entries, q.dtype), _look_at(heads, visible, options)), cached


def _gather_pages(x: jax.Array, table: jax.Array) -> jax.Array:
    """Return the pages [P, K, S, H] of a table [A, W] as slots of its rows: [A, K, W S, H]."""
    num_heads = x.shape[1]
    index = jnp.minimum(table, len(x) - 1)[:, None] * num_heads + jnp.arange(num_heads)[:, None]  # [A, K, W]
    return x.reshape(-1, *x.shape[2:])[index].reshape(len(table), num_heads, -1, x.shape[3])


# Entries of 8 bits (sampling.cache_dtype=int8): codes, then the scales of all codes. Each vector has a scale of its
# own, its largest number / 127, so a token changes nothing of those before it.


def _pack(entries: tuple[jax.Array, ...], cached: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return the entries of new tokens as a layer keeps them."""
    return quantize(entries) if cached[0].dtype == jnp.int8 else _to_bits(entries)


def _to_bits(entries: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return entries of bfloat16 as uint16 where XLA has no scatter of bfloat16, which is on CPUs; others as they are.
    It would widen the whole cache for each token, and narrow it again."""
    is_narrow = all(x.dtype == jnp.bfloat16 and has_product_library(x.dtype) for x in entries)
    return tuple(jax.lax.bitcast_convert_type(x, jnp.uint16) for x in entries) if is_narrow else entries


def quantize(entries: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return arrays [..., H] as codes of 8 bits, and after all of them their scales [..., 1] float32."""
    scales = [jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True) / 127 for x in entries]
    codes = [
        jnp.round(x.astype(jnp.float32) / jnp.maximum(scale, MIN_SCALE)).astype(jnp.int8)
        for x, scale in zip(entries, scales, strict=True)
    ]
    return (*codes, *scales)


def _unpack(cached: tuple[jax.Array, ...], dtype: Any) -> tuple[Any, ...]:
    """Return the entries of a layer: of 8 bits as `Scaled`; latents in the dtype of products. Latents are added up
    before they are keys, so their scales cannot multiply the scores."""
    if cached[0].dtype != jnp.int8:
        return tuple(x if x.dtype != jnp.uint16 else jax.lax.bitcast_convert_type(x, jnp.bfloat16) for x in cached)
    half = len(cached) // 2
    entries = tuple(map(Scaled, cached[:half], cached[half:]))
    return entries if cached[0].ndim == 4 else tuple(each.read(dtype) for each in entries)


def _write(
    cached: tuple[jax.Array, ...], new: tuple[jax.Array, ...], rows: jax.Array | None, slots: jax.Array
) -> tuple[jax.Array, ...]:
    """Return arrays of a cache with new tokens [A, C, ...] in the slots [A, C] of some rows [A], or of all (None).
    Tokens of one row may go into several rows of the cache, as pages are: then `rows` are [A, C]. A token whose slot or
    row is behind the last one is left out."""

    # One scatter. Inside a loop over tokens, XLA writes it in place.
    def write(old, new, slots, rows=None):
        rows = jnp.arange(old.shape[0]) if rows is None else rows
        rows = rows[:, None] if rows.ndim == 1 else rows
        return old.at[rows, ..., slots, :].set(new.astype(old.dtype), mode="drop")

    others = (slots,) if rows is None else (slots, rows)
    return tuple(on_shards(write, old, each, *others) for old, each in zip(cached, new, strict=True))


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

    return on_shards(take, x, count)
