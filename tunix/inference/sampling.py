"""Choice of the next token, and the tokens that end an answer."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard
from tokenizers import Tokenizer

from tunix.base.errors import UserError
from tunix.base.files import read_json
from tunix.config import Generate
from tunix.config import Sampling as SamplingKeys
from tunix.data.tokenizer import Vocab, special_tokens
from tunix.sharding.layout import Layout

# Tokens that end an answer.

SOURCES = ("generation_config.json", "config.json")  # files of a model that name such tokens, the first that does wins
TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def read_stop_ids(folder: Path) -> list[int]:
    """Return the ids that the files of Hugging Face's model name; none if they name none.

    Raises:
        UserError: a file has something else there than numbers.
    """
    for file in (folder / name for name in SOURCES):
        ids = read_json(file).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(number) is int for number in ids):
                raise UserError(f"{file}: eos_token_id must be a number or a list of numbers, not {str(ids)[:80]}")
            return sorted({*ids})
    return []


def find_stop_ids(
    tokenizer: Vocab | Tokenizer, stop_strings: tuple[str, ...], folder: Path | None, key: str = "sampling.stop"
) -> tuple[int, ...]:
    """Return the ids that end an answer, in order: each of them is a token of the answer, and is trained.

    They are those that the files of the model in `folder` name, and `stop_strings`, the value of `key`; with the
    tokenizer of a run also the end of a document, and the first special token after an answer in its chat template.

    Raises:
        UserError: one of `stop_strings` is not a token of the tokenizer.
    """
    ends = set(read_stop_ids(folder) if folder else ())
    backend = tokenizer.backend if isinstance(tokenizer, Vocab) else tokenizer
    if isinstance(tokenizer, Vocab):
        ends.add(tokenizer.eos)
    if isinstance(tokenizer, Vocab) and tokenizer.chat_template is not None:
        # The last segment of a chat of two turns is the answer and what closes it, like `2<|im_end|>`.
        answered, special = tokenizer.chat.segments(TURNS)[-1][0], special_tokens(backend)
        ids = backend.encode(answered, add_special_tokens=False).ids
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


def select_sampling(keys: SamplingKeys | Generate, stop: tuple[int, ...]) -> Sampling:
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
    log_probs: jax.Array  # float32, nats: of the distribution that the token was drawn from


def sample(
    logits: jax.Array,
    key: jax.Array | RowChoices,
    number: jax.Array,
    count: jax.Array,
    sampling: Sampling,
    layout: Layout,
) -> Sampled:
    """Draw a token of each answer, of logits [B, V]: token `count` [B] of the answer `number` [B], both int32.

    Each data shard draws its own rows. Noise depends on the key and these two numbers alone. Where the
    mesh splits the vocabulary, logits of a row are put together on the devices of its shard. With `RowChoices` in place
    of the key, `number` is a place in them, and they alone say how a row draws.
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
    tokens = _find_largest(logits)
    return Sampled(tokens, _compute_log_probs(logits, tokens), jnp.zeros_like(logits[:, 0]))


def select(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> Sampled:
    """Draw a token for each row of logits [B, V] float32, with a key of its own, [B]; not at temperature 0."""
    tokens, log_probs = _sample(_filter(logits / sampling.temperature, sampling), keys)
    is_models = sampling.temperature == 1 and (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None)
    return Sampled(tokens, log_probs if is_models else _compute_log_probs(logits, tokens), log_probs)


def select_by_row(logits: jax.Array, rows: RowChoices, count: jax.Array) -> Sampled:
    """Draw a token for each row of logits [B, V] float32 by its own choices [B]: token `count` [B] of its answer.

    The token is the one that `select` draws with these values and the row's seed.
    """

    def fold(seed: jax.Array, answer: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), answer), count)

    greedy = rows.temperature == 0
    scaled = _filter_by_row(logits / jnp.where(greedy, 1, rows.temperature)[:, None], rows)
    tokens, log_probs = _sample(scaled, jax.vmap(fold)(rows.seed, rows.answer, count))
    tokens = jnp.where(greedy, _find_largest(logits), tokens)
    return Sampled(tokens, _compute_log_probs(logits, tokens), jnp.where(greedy, 0, log_probs))


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


def _find_largest(logits: jax.Array) -> jax.Array:
    """Return the first of the largest logits [B, V] of each row, int32 [B].

    It is looked for in its block alone: XLA's CPU backend takes V steps of one number each for an `argmax`.
    """
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
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
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
    rows = rows._replace(**{name: getattr(rows, name)[:, None] for name in ("top_k", "top_p", "min_p")})

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
