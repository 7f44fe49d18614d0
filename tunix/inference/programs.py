"""The compiled programs of the engine: each for few shapes, whatever the rows of a rollout do.

    prefill         prompts -> their entries, and logits              [prompts, tokens], and slots of images
    insert          entries into rows of the cache; the first token   [rows]
    extend          several tokens behind those of some rows          [rows, tokens]
    decode          up to `CHUNK` tokens of all rows at work, as one loop on the devices
    resize          more slots; more or fewer rows; `add_pages`: more pages

Shapes are rounded up (`costs/rollout.py`). All that rows are about, tokens, clocks, limits and stop ids, is data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, reshard

from tunix.costs.rollout import CHUNK
from tunix.inference.cache_rows import (
    SLOTS,
    Cache,
    add_pages,
    insert_rows,
    make_cache,
    resize,
    split_mtp,
    take_rows,
)
from tunix.inference.gathered import Gathered
from tunix.inference.kv_cache import compute_last_logits, decode, prefill, run_after, run_mtp_after
from tunix.inference.sampling import Sampled, Sampling, sample
from tunix.models.kernels import select_cache
from tunix.models.transformer import Transformer
from tunix.models.vision import Images
from tunix.sharding.mesh import data_shards
from tunix.training.state import Architecture

TOKENS_UNCHECKED = 8  # that the loop draws between two looks at how many rows are at work
PASSES_UNCHECKED = 4  # the same with guesses, each of which may draw several tokens
NO_TOKEN = -1  # in the place of the tokens of a row that is not at work


class Drawing(NamedTuple):
    """Rows that are to draw a token: arrays [B]."""

    token: jax.Array  # int32, the newest, which is not in the cache yet
    length: jax.Array  # int32, tokens in the cache
    number: jax.Array  # int32, of the answer, which its noise depends on
    num_sampled: jax.Array  # int32, tokens drawn so far, in all turns
    limit: jax.Array  # int32, of `num_sampled`: the turn ends when it is reached
    working: jax.Array  # bool
    shift: jax.Array  # int32, of positions behind images (`Vision.shift_positions`)
    table: jax.Array | None = None  # [B, W] int32, the pages of each row, where the cache has pages


class Placement(NamedTuple):
    """Answers that get rows: int32 arrays [R]."""

    source: jax.Array  # row of the prompt among those that were computed, on its data shard
    row: jax.Array  # of the cache, on its data shard; the number of all of them for a filler
    number: jax.Array  # of the answer, which its noise depends on
    pages: jax.Array | None = None  # [R, W], where the prompt is to be written; behind the last page where it stands


class Extension(NamedTuple):
    """Tokens that are to follow those of some rows: int32 arrays [A], `tokens` [A, C]."""

    row: jax.Array  # of the cache, on its data shard; the number of all of them for a filler
    tokens: jax.Array
    start: jax.Array  # tokens in the cache
    num_tokens: jax.Array  # of `tokens`, which are filled up behind these
    number: jax.Array  # of the answer
    num_sampled: jax.Array  # tokens drawn so far, in all turns
    shift: jax.Array  # of positions behind images
    table: jax.Array | None = None  # [A, W], the pages of each row


class Extent(NamedTuple):
    """Bounds of a loop over tokens, int32 scalars, and ids [n] int32 that end a turn. They are data: one program."""

    steps: Any  # tokens at most
    fewest: Any  # the loop ends when fewer rows are at work
    final_length: Any  # tokens of the longest row when it ends
    stop: Any


class Programs:
    """The programs of engines of one model on one mesh. Engines come and go; compiled programs stay."""

    def __init__(self, arch: Architecture, mesh: Mesh):
        self.arch, self.mesh, self.num_shards = arch, mesh, data_shards(mesh.shape)
        self.prefill = jax.jit(partial(_prefill, arch), static_argnames=("cache_dtype", "with_mtp"))
        self.insert = jax.jit(partial(_insert, arch), static_argnames="sampling", donate_argnames="cache")
        self.extend = jax.jit(partial(_extend, arch), static_argnames="sampling", donate_argnames="cache")
        self.decode = jax.jit(partial(_decode, arch), static_argnames="sampling", donate_argnames="cache")
        self.guess = jax.jit(partial(_decode_guesses, arch), static_argnames="sampling", donate_argnames="cache")
        self.make_cache = jax.jit(make_cache, static_argnums=(1, 2, 3, 4))
        self.add_pages = jax.jit(add_pages, static_argnums=1)
        self.resize = jax.jit(resize, static_argnums=2)

    def find_paged(self, sampling: Sampling) -> tuple[bool, ...]:
        """Return which parts of a cache have pages: layers, and what guesses by `model.mtp` need behind them.

        Raises:
            UserError: pages are asked for, and the model cannot have them.
        """
        model, device = self.arch.model, self.mesh.abstract_mesh.abstract_device
        has_pages = select_cache(sampling.cache, model, self.arch.layout.compute, device) == "pages"
        of_mtp = (False, False) if sampling.by_mtp else ()
        return (*(has_pages and model.is_paged(layer) for layer in range(model.num_layers)), *of_mtp)

    @property
    def num_compiled(self) -> int:
        """Programs of the model that have been compiled."""
        programs: list[Any] = [self.prefill, self.extend, self.decode, self.guess]
        return sum(each._cache_size() for each in programs)


def _prefill(
    arch: Architecture,
    weights: Gathered,
    tokens: jax.Array,
    count: jax.Array,
    final_length: jax.Array,
    images: Images | None = None,
    *,
    cache_dtype: str | None,
    with_mtp: bool,
) -> tuple[jax.Array, Cache]:
    """Return the logits [P, V] after prompts [P, C], and their entries; see `kv_cache.prefill`."""
    model = weights.module(arch)
    hidden, entries = prefill(model, weights, tokens, count, final_length, cache_dtype, images, with_mtp)
    return compute_last_logits(model, hidden, count), entries


def _insert(
    arch: Architecture,
    cache: Cache,
    computed: tuple[jax.Array, Cache],
    answers: Placement,
    key: jax.Array,
    *,
    sampling: Sampling,
) -> tuple[Cache, Sampled]:
    """Put entries of prompts into rows [R] of the cache; return it, and the first token of each, [R] on every device.

    `computed` is what `_prefill` returns.
    """
    logits, entries = computed
    cache = insert_rows(cache, entries, answers.source, answers.row, answers.pages)
    first = take_rows(logits, answers.source)
    sampled = sample(first, key, answers.number, jnp.zeros_like(answers.number), sampling, arch.layout)
    return cache, _replicate(sampled)


def _extend(
    arch: Architecture,
    weights: Gathered,
    cache: Cache,
    more: Extension,
    key: jax.Array,
    final_length: jax.Array,
    *,
    sampling: Sampling,
) -> tuple[Cache, Sampled]:
    """Give rows [A] more tokens [A, C]; return the cache, and the token behind them, [A] on every device."""
    model = weights.module(arch)
    text = more.row, more.tokens, more.start
    hidden, write = run_after(model, weights, cache, *text, final_length, more.shift, more.table)
    logits = compute_last_logits(model, hidden, more.num_tokens)
    sampled = sample(logits, key, more.number, more.num_sampled, sampling, arch.layout)
    return write(more.num_tokens), _replicate(sampled)


def _decode(
    arch: Architecture,
    weights: Gathered,
    cache: Cache,
    rows: Drawing,
    key: jax.Array,
    extent: Extent,
    *,
    sampling: Sampling,
) -> tuple[Cache, Sampled]:
    """Draw tokens of the rows at work; return the cache and the tokens, [B, CHUNK] on every device.

    A row rests when it has drawn a stop id, or reached its limit. From there on its tokens are `NO_TOKEN`. The loop
    ends when fewer rows than `fewest` are at work; it counts them after every few tokens, because a count is a sum over
    devices.
    """
    model = weights.module(arch)
    of_rows = model.layout.activation("B")

    def step(state):
        n, rows, cache, chunk = state
        bound = _keep_in_loop(n, weights)
        state_of_rows = rows.token, rows.length, rows.working, extent.final_length, rows.shift, rows.table
        logits, cache = decode(model, bound, cache, *state_of_rows)
        sampled = sample(logits, key, rows.number, rows.num_sampled, sampling, model.layout)
        chunk = jax.tree.map(
            lambda tokens, new: jax.lax.dynamic_update_slice_in_dim(
                tokens, jnp.where(rows.working, new, jnp.asarray(NO_TOKEN, new.dtype))[:, None], n, 1
            ),
            chunk,
            sampled,
        )
        one = rows.working.astype(jnp.int32)
        num_sampled = rows.num_sampled + one
        ends = jnp.any(sampled.tokens[:, None] == extent.stop, axis=1) | (num_sampled >= rows.limit)
        rows = rows._replace(
            token=jnp.where(rows.working, sampled.tokens, rows.token),
            length=rows.length + one,
            num_sampled=num_sampled,
            working=rows.working & ~ends,
        )
        return n + 1, rows, cache, chunk

    def steps(state):
        (n, *_), _ = state
        last = jnp.minimum(n + TOKENS_UNCHECKED, extent.steps)
        after = jax.lax.while_loop(lambda inner: inner[0] < last, step, state[0])
        return after, jnp.sum(after[1].working.astype(jnp.int32))

    def goes_on(state):
        (n, *_), count = state
        return (n < extent.steps) & (count >= extent.fewest)

    def empty(dtype):
        return jnp.full((len(rows.token), CHUNK), NO_TOKEN, dtype, out_sharding=of_rows)

    chunk = Sampled(empty("int32"), empty("float32"), empty("float32"))
    start = (jnp.int32(0), rows, cache, chunk), jnp.sum(rows.working.astype(jnp.int32))
    (_, _, cache, chunk), _ = jax.lax.while_loop(goes_on, steps, start)
    return cache, _replicate(chunk)


# Guesses. By prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding): where the two newest tokens of a
# row have stood before in it, the tokens that followed them there are guessed to follow again.
#
#     text       the cat sat on the mat . the cat          guessed: sat on the
#     drawn                                     sat in     sat is right; behind it comes `in`, and not `on`
#
# By the layer of `model.mtp`: it takes the newest token beside the state before it, and gives logits of the token that
# follows. A further guess takes the guess before beside the layer's own result.
#
# One pass through the model draws the token behind the newest one, and behind each guess. Those that are drawn behind
# right guesses count. Noise belongs to the number of a token, so the tokens are those that would be drawn without
# guesses, one after the other. The layer draws a guess with the noise of the token that it guesses: with logits like
# those of the model, this is the same token.


def _decode_guesses(
    arch: Architecture,
    weights: Gathered,
    cache: Cache,
    rows: Drawing,
    text: jax.Array,
    key: jax.Array,
    extent: Extent,
    *,
    sampling: Sampling,
) -> tuple[Cache, Sampled, jax.Array]:
    """Do as `_decode`, with the guesses of `sampling.guess`: tokens [B, CHUNK + guess] on every device, and the passes
    [B] that have drawn them.

    `text` [B, S] int32 has all tokens of each row, the newest one too. A row that has drawn `steps` tokens waits for
    the others.
    """
    model = weights.module(arch)
    of_rows, width = model.layout.activation("B"), CHUNK + sampling.guess
    text = reshard(text, PartitionSpec(*of_rows, None))

    def step(state):
        n, rows, text, filled, passes, cache, chunk = state
        bound = _keep_in_loop(n, weights)
        at_work = rows.working & (filled < extent.steps)
        if sampling.by_mtp:
            guesses, cache = _guess_by_mtp(model, bound, cache, rows, at_work, key, extent.final_length, sampling)
        else:
            guesses = _on_rows(partial(_find_guesses, count=sampling.guess), text, rows.length)
        tokens = jnp.concatenate([rows.token[:, None], guesses], axis=1)
        arguments = rows.length, extent.final_length, rows.shift, rows.table
        hidden, write = run_after(model, bound, cache, None, tokens, *arguments)
        logits = model.logits(model.vocab_weights(), hidden)
        samples = [
            sample(logits[:, index], key, rows.number, rows.num_sampled + index, sampling, model.layout)
            for index in range(sampling.guess + 1)
        ]
        sampled = Sampled(*(jnp.stack(each, axis=1) for each in zip(*samples, strict=True)))
        offsets = jnp.arange(sampling.guess + 1)
        ends = jnp.any(sampled.tokens[:, :, None] == extent.stop, axis=2)
        ends |= rows.num_sampled[:, None] + offsets + 1 >= rows.limit[:, None]
        # A token counts behind right guesses, and before an end.
        goes_on = (tokens[:, 1:] == sampled.tokens[:, :-1]) & ~ends[:, :-1]
        first = jnp.ones_like(ends[:, :1])
        counts = jnp.cumprod(jnp.concatenate([first, goes_on], axis=1).astype(jnp.int32), axis=1)
        counts = counts * at_work[:, None]
        count = jnp.sum(counts, axis=1)
        last_token = jnp.sum(jnp.where(offsets == count[:, None] - 1, sampled.tokens, 0), axis=1)
        ended = jnp.any(ends & (counts > 0), axis=1)
        chunk = Sampled(*(_put(old, new, filled, counts) for old, new in zip(chunk, sampled, strict=True)))
        text = _put(text, sampled.tokens, rows.length + 1, counts)
        cache = write(count)
        rows = rows._replace(
            token=jnp.where(at_work, last_token, rows.token),
            length=rows.length + count,
            num_sampled=rows.num_sampled + count,
            working=rows.working & ~ended,
        )
        return n + 1, rows, text, filled + count, passes + at_work, cache, chunk

    def count_at_work(state) -> jax.Array:
        return jnp.sum((state[1].working & (state[3] < extent.steps)).astype(jnp.int32))

    def steps(state):
        after = jax.lax.fori_loop(0, PASSES_UNCHECKED, lambda _, inner: step(inner), state[0])
        return after, count_at_work(after)

    def empty(dtype):
        return jnp.full((len(rows.token), width), NO_TOKEN, dtype, out_sharding=of_rows)

    chunk = Sampled(empty("int32"), empty("float32"), empty("float32"))
    start = jnp.int32(0), rows, text, jnp.zeros_like(rows.length), jnp.zeros_like(rows.length), cache, chunk
    goes_on = lambda state: state[1] >= extent.fewest  # noqa: E731
    (*_, passes, cache, chunk), _ = jax.lax.while_loop(goes_on, steps, (start, count_at_work(start)))
    return cache, *_replicate((chunk, passes))


def _guess_by_mtp(
    model: Transformer,
    weights: Gathered,
    cache: Cache,
    rows: Drawing,
    at_work: jax.Array,
    key: jax.Array,
    final_length: jax.Array,
    sampling: Sampling,
) -> tuple[jax.Array, Cache]:
    """Return `sampling.guess` tokens [B, n] that may follow the newest ones, and the cache, which has them in slots of
    the layer that are not seen: `run_after` writes them anew, beside states of the model."""
    layers, kept, last = split_mtp(cache)
    token, state, guesses = rows.token, last.hidden, []
    for index in range(sampling.guess):
        time = rows.length - 1 + index
        arguments = state[:, None], token[:, None], time, final_length, rows.shift
        hidden, write = run_mtp_after(model, weights, kept, None, *arguments)
        logits = model.logits(model.vocab_weights(), hidden)[:, 0]
        token, state = (
            sample(logits, key, rows.number, rows.num_sampled + index, sampling, model.layout).tokens,
            hidden[:, 0],
        )
        guesses.append(token)
        # Behind the last slot it would take the place of a token that is still seen.
        kept = write((at_work & (time < kept[0].shape[SLOTS])).astype(jnp.int32))
    return jnp.stack(guesses, axis=1), [*layers, kept, last]


def _find_guesses(text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """Return `count` tokens [B, count] that may follow token `length` [B] of texts [B, S]; without a guess, any."""
    before, last_token = (jnp.take_along_axis(text, (length - back)[:, None], axis=1) for back in (1, 0))
    positions = jnp.arange(text.shape[1] - 1)
    same = (text[:, :-1] == before) & (text[:, 1:] == last_token) & (positions + 1 < length[:, None])
    last = jnp.max(jnp.where(same, positions, 0), axis=1)
    # Behind the newest token nothing is known: there the guess goes on from the beginning of the pair.
    index = jnp.minimum((last + 2)[:, None] + jnp.arange(count), length[:, None])
    return jnp.take_along_axis(text, index, axis=1)


def _put(old: jax.Array, new: jax.Array, start: jax.Array, counts: jax.Array) -> jax.Array:
    """Return arrays [B, n] with the numbers [B, C] that count, [B, C], from the positions `start` [B] on."""

    def put(old, new, start, counts):
        index = jnp.where(counts > 0, start[:, None] + jnp.arange(new.shape[1]), old.shape[1])
        return old.at[jnp.arange(len(old))[:, None], index].set(new, mode="drop")

    return _on_rows(put, old, new, start, counts)


def _on_rows(function: Callable, *arrays: jax.Array) -> jax.Array:
    """Return what a function of arrays [B, ...] returns on each data shard apart, laid out like the first of them."""
    specs = [jax.typeof(each).sharding.spec for each in arrays]
    return jax.shard_map(function, in_specs=tuple(specs), out_specs=specs[0])(*arrays)


def _keep_in_loop(now: jax.Array, weights: Gathered) -> Gathered:
    """Return the weights; quantized ones are made to depend on `now`, the number of the token.

    XLA moves out of a loop what does not depend on its turn. For quantized weights that would be their conversion to
    matrices, and the matrices of all layers would be in memory at one time.
    """
    if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights)):
        return weights
    return jax.lax.optimization_barrier((weights, now))[0]


def _replicate(tree: Any) -> Any:
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()), tree)
