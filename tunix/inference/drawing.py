"""The next token, drawn from logits.

A token i is to be drawn with probability w_i / sum(w). It is drawn by a race: each i gets a random number E_i of the
exponential distribution, and the smallest E_i / w_i wins. (This is the Gumbel-max trick: -log(E_i) is Gumbel noise.)

The usual way compares one random number with the cumulative sums of w. Another mesh rounds these sums in another order:
each of them moves a little, and another token may be drawn. In a race, rounding changes the winner only where the two
smallest numbers are nearly equal, so in practice the same token wins on every mesh.

A race over all V tokens needs V random numbers. Two rounds need V / 128 + 128, and have the same probabilities:

    round 1   between blocks of 128 tokens   w = sum of the block
    round 2   between tokens of that block   w = w_i            P(block) * P(i | block) = w_i / sum(w)
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.config import Generate
from tunix.config import Sampling as SamplingKeys
from tunix.sharding.layout import Layout

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


def choose_sampling(keys: SamplingKeys | Generate, stop: tuple[int, ...]) -> Sampling:
    """Return the choice that keys of the config make, with the ids that end an answer."""
    return Sampling(keys.max_new_tokens, keys.temperature, keys.top_k, keys.top_p, keys.min_p, stop)


class Drawn(NamedTuple):
    """A token for each row, [B], or several, [B, M]."""

    tokens: jax.Array  # int32
    model_log_probs: jax.Array  # float32, nats: under the model, before temperature and filters
    log_probs: jax.Array  # float32, nats: of the distribution that the token was drawn from


def draw(logits: jax.Array, key: jax.Array, rows: jax.Array, number: jax.Array, how: Sampling, layout: Layout) -> Drawn:
    """Draw token `number` (scalar) of the answers with these global numbers, `rows` [B] int32, of logits [B, V].

    Each data shard draws its own rows. Noise depends on the key, the row and the number of the token alone. Where the
    mesh splits the vocabulary, logits of a row are put together on the devices of its shard.
    """
    split = layout.activation("B")

    @partial(jax.shard_map, in_specs=(split, PartitionSpec(), split, PartitionSpec()), out_specs=split)
    def on_each_shard(logits, key, rows, number):
        if how.temperature == 0:
            return choose_likeliest(logits)
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows)
        return choose(logits, keys, how)

    with jax.named_scope("draw"):
        return on_each_shard(reshard(logits, split), key, rows, number)


def choose_likeliest(logits: jax.Array) -> Drawn:
    """Take the likeliest token of each row of logits [B, V] float32."""
    tokens = jnp.argmax(logits, -1).astype(jnp.int32)
    return Drawn(tokens, _compute_log_probs(logits, tokens), jnp.zeros_like(logits[:, 0]))


def choose(logits: jax.Array, keys: jax.Array, how: Sampling) -> Drawn:
    """Draw a token for each row of logits [B, V] float32, with a key of its own, [B]; not at temperature 0."""
    scaled = _filter(logits / how.temperature, how)
    top = jnp.max(scaled, -1, keepdims=True)
    weights = _split_blocks(jnp.exp(scaled - top))  # the largest is 1: the sums stay in the range of float32
    sums = weights.sum(-1)
    first, second = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    block = _run_race(sums, first)
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0]
    tokens = block * BLOCK + _run_race(inside, second)  # never a token that fills up the last block: its weight is 0
    log_probs = _pick(scaled - top, tokens) - jnp.log(sums.sum(-1))
    is_models = how.temperature == 1 and (how.top_k, how.top_p, how.min_p) == (None, None, None)
    return Drawn(tokens, log_probs if is_models else _compute_log_probs(logits, tokens), log_probs)


def _split_blocks(weights: jax.Array) -> jax.Array:
    """Return weights [B, V] as blocks [B, V / 128, 128]; weights of 0 fill up the last block."""
    rows, size = weights.shape
    return jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)


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


def _filter(logits: jax.Array, how: Sampling) -> jax.Array:
    """Return logits with minus infinity for the tokens that are not to be drawn."""
    if how.top_k is not None:
        least = jax.lax.top_k(logits, min(how.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.top_p is not None:
        # A token is kept if those before it have less than top_p, so the one that reaches top_p is kept too: of the
        # shares 0.5 0.3 0.15 0.05 with top_p = 0.7 the first two. One token at least stays.
        ordered = -jnp.sort(-logits, -1)
        shares = jax.nn.softmax(ordered, -1)
        kept = jnp.cumsum(shares, -1) - shares < how.top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.min_p is not None:  # p_i >= min_p * p_max, of logits: l_i >= l_max + log(min_p)
        least = jnp.max(logits, -1, keepdims=True) + jnp.log(how.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
