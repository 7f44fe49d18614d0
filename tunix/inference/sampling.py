"""Sampling: what ends an answer, the choice of the next token, and the compiled programs in which rows draw tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.config import Generate, Serve
from tunix.config import Sampling as SamplingKeys
from tunix.config.task import FILTERS
from tunix.costs.rollout import CHUNK
from tunix.data.tokenizer import Vocab, find_tokenizer_files, read_backend, read_settings, special_tokens, token_text
from tunix.inference.gathered import Gathered
from tunix.inference.kv_cache import (
    SLOTS,
    Cache,
    NewTokens,
    add_pages,
    compute_last_logits,
    decode,
    insert_rows,
    make_cache,
    on_shards,
    prefill,
    resize,
    run_after,
    run_mtp_after,
    split_mtp,
    take_rows,
)
from tunix.models.kernels import select_cache
from tunix.models.transformer import Transformer
from tunix.models.vision import Images
from tunix.sharding.layout import Layout
from tunix.sharding.mesh import data_shards
from tunix.training.state import Architecture

# Tokens that end an answer.

SOURCES = ("generation_config.json", "config.json")  # files of a model that name such tokens, the first that does wins
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of these files


def read_token_ids(info: dict[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens in such a file; of a model that sees, its text_config may have them."""
    ids: dict[str, Any] = {}
    for part in (info.get("text_config", {}), info):
        ids |= {key: part[key] for key in TOKEN_IDS if key in part and (part[key] is not None or key not in ids)}
    return ids


def read_stop_ids(folder: Path) -> list[int]:
    """Return the ids that the files of Hugging Face's model name; none if they name none. Raises `UserError` where a
    file has something else there than numbers."""
    for file in (folder / name for name in SOURCES):
        ids = read_token_ids(read_json(file)).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(number) is int for number in ids):
                raise UserError(f"{file}: eos_token_id must be a number or a list of numbers, not {str(ids)[:80]}")
            return sorted({*ids})
    return []


def find_stop_ids(
    tokenizer: Vocab | Tokenizer,
    stop_strings: tuple[str, ...],
    folder: Path | None,
    key: str = "sampling.stop",
    template_options: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the ids that end an answer, in order: each of them is a token of the answer, and is trained.

    They are those that the files of the model in `folder` name, its `eos_token` too, and `stop_strings`, the value of
    `key`; with the tokenizer of a run also the end of a document, and the first special token after an answer in its
    chat template, which gets `template_options`. An id of the files that is another token in the tokenizer of the run
    is left out.

    Raises:
        UserError: one of `stop_strings` is not a token of the tokenizer.
    """
    ends = set(read_stop_ids(folder) if folder else ())
    backend = tokenizer.backend if isinstance(tokenizer, Vocab) else tokenizer
    if isinstance(tokenizer, Vocab):
        source = read_backend(folder) if folder and ends else None
        ends = {index for index in ends if source is None or source.id_to_token(index) == backend.id_to_token(index)}
        ends.add(tokenizer.eos)
    elif folder and (end := token_text(read_settings(find_tokenizer_files(str(folder))).eos_token)):
        ends |= {index for index in [backend.token_to_id(end)] if index is not None}
    if isinstance(tokenizer, Vocab) and tokenizer.chat_template is not None:
        end_of_turn, special = tokenizer.chat.read_end(template_options or {}), special_tokens(backend)
        ids = backend.encode(end_of_turn, add_special_tokens=False).ids
        ends |= set([token for token in ids if token in special][:1])
    for word in stop_strings:
        index = backend.token_to_id(word)
        if index is None:
            raise UserError(f"{key}={word} is not a token of the tokenizer")
        ends.add(index)
    return tuple(sorted(ends))


# The next token, drawn from logits.
#
# A token i is to be drawn with probability w_i / sum(w). It is drawn by a race: each i gets a random number E_i of the
# exponential distribution, and the smallest E_i / w_i wins. (This is the Gumbel-max trick: -log(E_i) is Gumbel noise.)
#
# The usual way compares one random number with the cumulative sums of w. Another mesh rounds these sums in another
# order: each of them moves a little, and another token may be drawn. In a race, rounding changes the winner only where
# the two smallest numbers are nearly equal, so in practice the same token wins on every mesh.
#
# A race over all V tokens needs V random numbers. Two rounds need V / 128 + 128, and have the same probabilities:
#
#     round 1   between blocks of 128 tokens   w = sum of the block
#     round 2   between tokens of that block   w = w_i            P(block) * P(i | block) = w_i / sum(w)

BLOCK = 128  # tokens of one block


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. The filters apply in this order, to logits / temperature."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together have this probability (Holtzman et al. 2020)
    min_p: float | None = None  # keep those with this share of the likeliest's probability (arXiv:2407.01082)
    stop: tuple[int, ...] = ()  # ids that end an answer
    cache: str = "slots"  # or "pages", or "auto" (models/kernels.py)
    cache_dtype: str | None = None  # "int8", or None for the dtype of products
    guess: int = 0  # tokens that are guessed beside each that is drawn
    guess_by: str = "prompt_lookup"  # or "mtp"

    @property
    def by_mtp(self) -> bool:
        """True where the layer of `model.mtp` guesses, which then has slots in the cache."""
        return self.guess > 0 and self.guess_by == "mtp"


def select_sampling(keys: SamplingKeys | Generate | Serve, stop: tuple[int, ...]) -> Sampling:
    """Return the choice that keys of the config make, with the ids that end an answer."""
    choice = keys.max_new_tokens, keys.temperature, keys.top_k, keys.top_p, keys.min_p
    return Sampling(*choice, stop, keys.cache, keys.cache_dtype, keys.guess, keys.guess_by)


NO_TOP_K, NO_TOP_P, NO_MIN_P = 2**31 - 1, 2.0, 0.0  # in `RowChoices`: values that leave every token in


class RowChoices(NamedTuple):
    """Choices of rows that differ in them, as data of a program: arrays [N], of which row n has the place `number[n]`.

    They stand where the key of a rollout stands, so that requests of a server draw side by side.
    """

    seed: Any  # int32
    answer: Any  # int32, the number of the answer in its request, which its noise depends on
    temperature: Any  # float32; 0 takes the likeliest token
    top_k: Any  # int32
    top_p: Any  # float32
    min_p: Any  # float32


class Sampled(NamedTuple):
    """A token of each row, [B], or several, [B, n]."""

    tokens: jax.Array  # int32
    model_log_probs: jax.Array  # float32, nats: under the model, before temperature and filters
    log_probs: jax.Array  # float32, nats: at the temperature, before filters: of the policy that learns from the token


Key = jax.Array | RowChoices  # what noise follows from


def sample(
    logits: jax.Array, key: Key, number: jax.Array, count: jax.Array, sampling: Sampling, layout: Layout
) -> Sampled:
    """Draw a token of each answer, of logits [B, V]: token `count` [B] of the answer `number` [B], both int32.

    Each data shard draws its own rows. Noise depends on the key and these two numbers alone. Where the mesh splits the
    vocabulary, logits of a row are put together on the devices of its shard. With `RowChoices` in place of the key,
    `number` is a place in them, and they alone say how a row draws.
    """
    split = layout.activation("B")

    @partial(jax.shard_map, in_specs=(split, PartitionSpec(), split, split), out_specs=split)
    def on_each_shard(logits, key, number, count):
        if isinstance(key, RowChoices):
            return select_by_row(logits, RowChoices(*(each[number] for each in key)), count)
        if sampling.temperature == 0:
            return select_greedy(logits)
        fold = jax.vmap(lambda number, count: jax.random.fold_in(jax.random.fold_in(key, number), count))
        return select(logits, fold(number, count), sampling)

    with jax.named_scope("draw"):
        return on_each_shard(reshard(logits, split), key, number, count)


def select_greedy(logits: jax.Array) -> Sampled:
    """Take the likeliest token of each row of logits [B, V] float32."""
    tokens = _find_argmax(logits)
    return Sampled(tokens, _compute_log_probs(logits, tokens), jnp.zeros_like(logits[:, 0]))


def select(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> Sampled:
    """Draw a token for each row of logits [B, V] float32, with a key of its own, [B]; not at temperature 0."""
    scaled = logits / sampling.temperature
    tokens, log_probs = _sample(_filter(scaled, sampling), keys)
    if (sampling.top_k, sampling.top_p, sampling.min_p) != (None, None, None):
        log_probs = _compute_log_probs(scaled, tokens)
    return Sampled(tokens, log_probs if sampling.temperature == 1 else _compute_log_probs(logits, tokens), log_probs)


def select_by_row(logits: jax.Array, rows: RowChoices, count: jax.Array) -> Sampled:
    """Draw a token for each row of logits [B, V] float32 by its own choices [B]: token `count` [B] of its answer.

    The token is the one that `select` draws with these values and the row's seed.
    """

    def fold(seed: jax.Array, answer: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), answer), count)

    greedy = rows.temperature == 0
    scaled = logits / jnp.where(greedy, 1, rows.temperature)[:, None]
    tokens, _ = _sample(_filter_by_row(scaled, rows), jax.vmap(fold)(rows.seed, rows.answer, count))
    tokens = jnp.where(greedy, _find_argmax(logits), tokens)
    log_probs = jnp.where(greedy, 0, _compute_log_probs(scaled, tokens))
    return Sampled(tokens, _compute_log_probs(logits, tokens), log_probs)


def _sample(scaled: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw a token for each row of logits [B, V], and return it with its log-probability under them, both [B]."""
    top = jnp.max(scaled, -1, keepdims=True)
    weights = _split_blocks(jnp.exp(scaled - top), 0)  # the largest is 1: the sums stay in the range of float32
    sums = weights.sum(-1)
    first, second = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    block = _run_race(sums, first)
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0]
    tokens = block * BLOCK + _run_race(inside, second)  # never a token that fills up the last block: its weight is 0
    return tokens, _pick(scaled - top, tokens) - jnp.log(sums.sum(-1))


def _find_argmax(logits: jax.Array) -> jax.Array:
    """Return the first of the largest logits [B, V] of each row, int32 [B]. It is looked for in its block alone: XLA's
    CPU backend takes V steps of one number each for an `argmax`."""
    blocks = _split_blocks(logits, -jnp.inf)
    block = jnp.argmax(jnp.max(blocks, -1), -1)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def _split_blocks(values: jax.Array, filler: float) -> jax.Array:
    """Return values [B, V] as blocks [B, V / 128, 128], the last of which is filled up."""
    rows, size = values.shape
    return jnp.pad(values, ((0, 0), (0, -size % BLOCK)), constant_values=filler).reshape(rows, -1, BLOCK)


def _run_race(weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw for each row one of the weights [B, n], in proportion to them; int32 [B]."""
    bits = jax.vmap(lambda key: jax.random.bits(key, weights.shape[1:], "uint32"))(keys)
    # All 32 bits, and never 0. `jax.random.exponential` has 23 bits, and its 0, one in 8 million, beats every weight.
    # Nor 1, to which float32 rounds the largest: its logarithm is infinite, as a weight of 0 makes it.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return jnp.argmin(-jnp.log1p(-uniform) / weights, -1).astype(jnp.int32)


def _pick(values: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the value of one token of each row: [B, V], [B] -> [B]."""
    return jnp.take_along_axis(values, tokens[:, None], 1)[:, 0]


def _compute_log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return _pick(logits, tokens) - jax.nn.logsumexp(logits, -1)


def _filter(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits with minus infinity for the tokens that are not to be drawn."""
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        # A token is kept if those before it have less than top_p, so the one that reaches top_p is kept too: of the
        # shares 0.5 0.3 0.15 0.05 with top_p = 0.7 the first two. One token at least stays.
        ordered = -jnp.sort(-logits, -1)
        probs = jax.nn.softmax(ordered, -1)
        is_likely = jnp.cumsum(probs, -1) - probs < sampling.top_p
        least = jnp.min(jnp.where(is_likely, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.min_p is not None:  # p_i >= min_p * p_max, of logits: l_i >= l_max + log(min_p)
        least = jnp.max(logits, -1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits


def _filter_by_row(logits: jax.Array, rows: RowChoices) -> jax.Array:
    """Do as `_filter`, each row of logits [B, V] with its own values; nothing is sorted where no row asks for it."""
    rows = rows._replace(**{name: getattr(rows, name)[:, None] for name in FILTERS})

    def keep_top(logits: jax.Array) -> jax.Array:
        ordered = -jnp.sort(-logits, -1)
        least = jnp.take_along_axis(ordered, jnp.clip(rows.top_k, 1, logits.shape[-1]) - 1, 1)
        ordered = jnp.where(ordered < least, -jnp.inf, ordered)
        probs = jax.nn.softmax(ordered, -1)
        is_likely = jnp.cumsum(probs, -1) - probs < rows.top_p
        least = jnp.maximum(least, jnp.min(jnp.where(is_likely, ordered, jnp.inf), -1, keepdims=True))
        return jnp.where(logits < least, -jnp.inf, logits)

    is_bound = (rows.top_k < logits.shape[-1]) | (rows.top_p <= 1)
    logits = jax.lax.cond(jnp.any(is_bound), keep_top, lambda logits: logits, logits)
    return jnp.where(logits < jnp.max(logits, -1, keepdims=True) + jnp.log(rows.min_p), -jnp.inf, logits)


# The compiled programs of the engine: each for few shapes, whatever the rows of a rollout do.
#
#     prefill         prompts -> their entries, and logits              [prompts, tokens], and slots of images
#     insert          entries into rows of the cache; the first token   [rows]
#     extend          several tokens behind those of some rows          [rows, tokens]
#     decode          up to `CHUNK` tokens of all rows at work, as one loop on the devices; `guess`: with guesses
#     resize          more slots; more or fewer rows; `add_pages`: more pages
#
# Shapes are rounded up (`costs/rollout.py`). All that rows are about, tokens, clocks, limits and stop ids, is data.


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
    final_length: jax.Array  # int32, tokens of the row when it ends
    table: jax.Array | None = None  # [B, W] int32, the pages of each row, where the cache has pages

    def behind(self, tokens: jax.Array) -> NewTokens:
        """Return tokens [B, C] that stand behind those in the cache."""
        return NewTokens(tokens, self.length, self.final_length, self.shift, None, self.table)


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
    final_length: jax.Array  # tokens of the row when it ends
    table: jax.Array | None = None  # [A, W], the pages of each row


class Extent(NamedTuple):
    """Bounds of a loop over tokens, int32 scalars, and ids [n] int32 that end a turn. They are data: one program."""

    steps: Any  # tokens at most
    min_rows: Any  # the loop ends when fewer rows are at work
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
        """Return which parts of a cache have pages: layers, and what guesses by `model.mtp` need behind them. Raises
        `UserError` where pages are asked for, and the model cannot have them."""
        model, device = self.arch.model, self.mesh.abstract_mesh.abstract_device
        has_pages = select_cache(sampling.cache, model, self.arch.layout.compute, device) == "pages"
        of_mtp = (False, False) if sampling.by_mtp else ()
        return (*(has_pages and model.is_paged(layer) for layer in range(model.num_layers)), *of_mtp)

    @property
    def num_compiled(self) -> int:
        """How many programs that run the model have been compiled."""
        programs: list[Any] = [self.prefill, self.extend, self.decode, self.guess]
        return sum(each._cache_size() for each in programs)


Computed = tuple[jax.Array, Cache]  # of prompts: logits [P, V] behind them, and their entries


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
) -> Computed:
    """Return the logits [P, V] after prompts [P, C], and their entries; see `kv_cache.prefill`."""
    model = weights.module(arch)
    hidden, entries = prefill(model, weights, tokens, count, final_length, cache_dtype, images, with_mtp)
    return compute_last_logits(model, hidden, count), entries


def _insert(
    arch: Architecture, cache: Cache, computed: Computed, answers: Placement, key: Key, *, sampling: Sampling
) -> tuple[Cache, Sampled]:
    """Put entries of prompts into rows [R] of the cache; return it, and the first token of each, [R] on every device.
    `computed` is what `_prefill` returns."""
    logits, entries = computed
    cache = insert_rows(cache, entries, answers.source, answers.row, answers.pages)
    first = take_rows(logits, answers.source)
    sampled = sample(first, key, answers.number, jnp.zeros_like(answers.number), sampling, arch.layout)
    return cache, _replicate(sampled)


def _extend(
    arch: Architecture, weights: Gathered, cache: Cache, more: Extension, key: Key, *, sampling: Sampling
) -> tuple[Cache, Sampled]:
    """Give rows [A] more tokens [A, C]; return the cache, and the token behind them, [A] on every device."""
    model = weights.module(arch)
    new = NewTokens(more.tokens, more.start, more.final_length, more.shift, more.row, more.table)
    hidden, write = run_after(model, weights, cache, new)
    logits = compute_last_logits(model, hidden, more.num_tokens)
    sampled = sample(logits, key, more.number, more.num_sampled, sampling, arch.layout)
    return write(more.num_tokens), _replicate(sampled)


def _decode(
    arch: Architecture, weights: Gathered, cache: Cache, rows: Drawing, key: Key, extent: Extent, *, sampling: Sampling
) -> tuple[Cache, Sampled]:
    """Draw tokens of the rows at work; return the cache and the tokens, [B, CHUNK] on every device. A row rests when it
    has drawn a stop id, or reached its limit. From there on its tokens are `NO_TOKEN`. The loop ends when fewer rows
    than `min_rows` are at work; it counts them after every few tokens, because a count is a sum over devices."""
    model = weights.module(arch)

    def step(state):
        n, rows, cache, chunk = state
        bound = _keep_in_loop(n, weights)
        logits, cache = decode(model, bound, cache, rows.behind(rows.token[:, None]), rows.working)
        sampled = sample(logits, key, rows.number, rows.num_sampled, sampling, model.layout)

        def put(tokens, new):
            new = jnp.where(rows.working, new, jnp.asarray(NO_TOKEN, new.dtype))
            return jax.lax.dynamic_update_slice_in_dim(tokens, new[:, None], n, 1)

        chunk = jax.tree.map(put, chunk, sampled)
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
        return (n < extent.steps) & (count >= extent.min_rows)

    start = (jnp.int32(0), rows, cache, _make_chunk(rows, CHUNK, model.layout)), jnp.sum(rows.working.astype(jnp.int32))
    (_, _, cache, chunk), _ = jax.lax.while_loop(goes_on, steps, start)
    return cache, _replicate(chunk)


def _make_chunk(rows: Drawing, width: int, layout: Layout) -> Sampled:
    """Return room for `width` tokens of each row, [B, width], none of which is drawn yet."""
    shape, spec = (len(rows.token), width), layout.activation("B")
    return Sampled(*(jnp.full(shape, NO_TOKEN, dtype, out_sharding=spec) for dtype in ("int32", "float32", "float32")))


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
    key: Key,
    extent: Extent,
    *,
    sampling: Sampling,
) -> tuple[Cache, Sampled, jax.Array]:
    """Do as `_decode`, with the guesses of `sampling.guess`: tokens [B, CHUNK + guess] on every device, and the passes
    [B] that have drawn them. `text` [B, S] int32 has all tokens of each row, the newest one too. A row that has drawn
    `steps` tokens waits for the others."""
    model = weights.module(arch)
    text = reshard(text, PartitionSpec(*model.layout.activation("B"), None))

    def step(state):
        n, rows, text, filled, passes, cache, chunk = state
        bound = _keep_in_loop(n, weights)
        at_work = rows.working & (filled < extent.steps)
        if sampling.by_mtp:
            guesses, cache = _guess_by_mtp(model, bound, cache, rows, at_work, key, sampling)
        else:
            guesses = on_shards(partial(_find_guesses, count=sampling.guess), text, rows.length)
        tokens = jnp.concatenate([rows.token[:, None], guesses], axis=1)
        hidden, write = run_after(model, bound, cache, rows.behind(tokens))
        logits = model.logits(model.vocab_weights(), hidden)
        sampled = _sample_several(logits, key, rows, sampling, model.layout)
        offsets = jnp.arange(sampling.guess + 1)
        ends = jnp.any(sampled.tokens[:, :, None] == extent.stop, axis=2)
        ends |= rows.num_sampled[:, None] + offsets + 1 >= rows.limit[:, None]
        counts = _count_right(tokens, sampled.tokens, ends) * at_work[:, None]
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

    chunk = _make_chunk(rows, CHUNK + sampling.guess, model.layout)
    start = jnp.int32(0), rows, text, jnp.zeros_like(rows.length), jnp.zeros_like(rows.length), cache, chunk
    goes_on = lambda state: state[1] >= extent.min_rows  # noqa: E731
    (*_, passes, cache, chunk), _ = jax.lax.while_loop(goes_on, steps, (start, count_at_work(start)))
    return cache, *_replicate((chunk, passes))


def _guess_by_mtp(
    model: Transformer, weights: Gathered, cache: Cache, rows: Drawing, at_work: jax.Array, key: Key, sampling: Sampling
) -> tuple[jax.Array, Cache]:
    """Return `sampling.guess` tokens [B, n] that may follow the newest ones, and the cache, which has them in slots of
    the layer that are not seen: `run_after` writes them anew, beside states of the model."""
    layers, kept, last = split_mtp(cache)
    token, state, guesses = rows.token, last.hidden, []
    for index in range(sampling.guess):
        time = rows.length - 1 + index
        new = rows._replace(length=time).behind(token[:, None])
        hidden, write = run_mtp_after(model, weights, kept, state[:, None], new)
        logits = model.logits(model.vocab_weights(), hidden)[:, 0]
        token = sample(logits, key, rows.number, rows.num_sampled + index, sampling, model.layout).tokens
        state = hidden[:, 0]
        guesses.append(token)
        # Behind the last slot it would take the place of a token that is still seen.
        kept = write((at_work & (time < kept[0].shape[SLOTS])).astype(jnp.int32))
    return jnp.stack(guesses, axis=1), [*layers, kept, last]


def _sample_several(logits: jax.Array, key: Key, rows: Drawing, sampling: Sampling, layout: Layout) -> Sampled:
    """Draw the next n tokens [B, n] of rows, of logits [B, n, V] behind the newest token and behind each guess."""
    samples = [
        sample(logits[:, index], key, rows.number, rows.num_sampled + index, sampling, layout)
        for index in range(logits.shape[1])
    ]
    return Sampled(*(jnp.stack(each, axis=1) for each in zip(*samples, strict=True)))


def _count_right(tokens: jax.Array, drawn: jax.Array, ends: jax.Array) -> jax.Array:
    """Return 1 for each of the tokens `drawn` [B, n] that counts, behind right guesses and before an end, else 0.
    `tokens` [B, n] are the newest one and the guesses; `ends` [B, n] bool are drawn tokens that end a turn."""
    goes_on = (tokens[:, 1:] == drawn[:, :-1]) & ~ends[:, :-1]
    return jnp.cumprod(jnp.pad(goes_on.astype(jnp.int32), ((0, 0), (1, 0)), constant_values=1), axis=1)


def _find_guesses(text: jax.Array, length: jax.Array, count: int) -> jax.Array:
    """Return `count` tokens [B, count] that may follow token `length` [B] of texts [B, S]; without a guess, any."""
    before, last_token = (jnp.take_along_axis(text, (length - back)[:, None], axis=1) for back in (1, 0))
    positions = jnp.arange(text.shape[1] - 1)
    same = (text[:, :-1] == before) & (text[:, 1:] == last_token) & (positions + 1 < length[:, None])
    last = jnp.max(jnp.where(same, positions, 0), axis=1)[:, None]
    # Behind the newest token nothing is known: there the guess begins again with what has followed the pair.
    num_known = jnp.maximum(length[:, None] - last - 1, 1)
    return jnp.take_along_axis(text, last + 2 + jnp.arange(count) % num_known, axis=1)


def _put(old: jax.Array, new: jax.Array, start: jax.Array, counts: jax.Array) -> jax.Array:
    """Return arrays [B, n] with the numbers [B, C] that count, [B, C], from the positions `start` [B] on."""

    def put(old, new, start, counts):
        index = jnp.where(counts > 0, start[:, None] + jnp.arange(new.shape[1]), old.shape[1])
        return old.at[jnp.arange(len(old))[:, None], index].set(new, mode="drop")

    return on_shards(put, old, new, start, counts)


def _keep_in_loop(now: jax.Array, weights: Gathered) -> Gathered:
    """Return the weights; quantized ones are made to depend on `now`, the number of the token. XLA moves out of a loop
    what does not depend on its turn. For quantized weights that would be their conversion to matrices, and the matrices
    of all layers would be in memory at one time."""
    if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights)):
        return weights
    return jax.lax.optimization_barrier((weights, now))[0]


def _replicate(tree: Any) -> Any:
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()), tree)
