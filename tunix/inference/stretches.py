"""The two programs of a rollout: the first token of each answer, and a stretch of further ones.

Time counts the tokens of a row from its first place, padding included. All prompts of a wave end at time `length`, so
all rows are at the same time, and one number says where the loop is:

    time        0  1  2  3 | 4  5  6          length = 4
    row 0       .  .  p  p | a  b  c          first = 2
    row 1       p  p  p  p | d  e  f          first = 0
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.costs.rollout_sizes import STRETCH
from tunix.inference.cache import Cache, decode, prefill, repeat_rows
from tunix.inference.drawing import Drawn, Sampling, draw
from tunix.inference.gathered import Gathered
from tunix.training.state import Architecture


class Prompts(NamedTuple):
    """Prompts of a wave, int32 arrays, and the answers that are drawn to each: B / P of them."""

    tokens: jax.Array  # [P, T], padded on the left
    first: jax.Array  # [P], the time at which each begins
    numbers: jax.Array  # [B], of the answers in the whole rollout; those to a prompt stand one after the other


class Rows(NamedTuple):
    """Answers at work: arrays [B] int32 and the cache, whose rows live where their prompts do."""

    token: jax.Array  # the newest
    first: jax.Array  # time at which the prompt begins
    number: jax.Array  # of the answer in the whole rollout, which its noise depends on
    cache: Cache


class Stretch(NamedTuple):
    """Tokens that are drawn between two looks of the host, as int32 scalars: one program serves all stretches."""

    length: Any  # tokens that prompts are padded to
    begin: Any  # tokens that the answers have already
    end: Any  # tokens that they have after it


def begin(
    arch: Architecture, weights: Gathered, prompts: Prompts, key: jax.Array, *, how: Sampling, num_slots: int
) -> tuple[Rows, Drawn]:
    """Return rows after the first token of their answers, and that token, [B, 1] on every device.

    A prompt is computed once. Its keys and values are then repeated for each of its answers.
    """
    model, (tokens, first, numbers) = weights.module(arch), prompts
    logits, cache = prefill(model, weights, tokens, first, num_slots, tokens.shape[1] + how.max_new_tokens)
    logits, first, cache = repeat_rows((logits, first, cache), len(numbers) // len(tokens))
    drawn = draw(logits, key, numbers, jnp.int32(0), how, model.layout)
    return Rows(drawn.tokens, first, numbers, cache), _replicate(Drawn(*(each[:, None] for each in drawn)))


def draw_stretch(
    arch: Architecture, weights: Gathered, rows: Rows, key: jax.Array, stretch: Stretch, *, how: Sampling
) -> tuple[Rows, Drawn]:
    """Return rows after a stretch, and its tokens: [B, STRETCH] on every device, the first `end` - `begin` count."""
    model, (length, number, end) = weights.module(arch), stretch
    of_rows = model.layout.activation("B")

    def step(state):
        now, token, cache, chunk = state  # `now` counts the tokens of an answer: `token` is its number now - 1
        logits, cache = decode(
            model, _keep_in_loop(now, weights), cache, token, length + now - 1, rows.first, length + how.max_new_tokens
        )
        drawn = draw(logits, key, rows.number, now, how, model.layout)
        chunk = jax.tree.map(
            lambda tokens, new: jax.lax.dynamic_update_slice_in_dim(tokens, new[:, None], now - number, 1), chunk, drawn
        )
        return now + 1, drawn.tokens, cache, chunk

    def empty(dtype):
        return jnp.zeros((len(rows.token), STRETCH), dtype, out_sharding=of_rows)

    # The number of tokens is data and not a shape: so the loop is one program, however long the stretch is.
    chunk = Drawn(empty("int32"), empty("float32"), empty("float32"))
    start = (number, rows.token, rows.cache, chunk)
    _, token, cache, chunk = jax.lax.while_loop(lambda state: state[0] < end, step, start)
    return rows._replace(token=token, cache=cache), _replicate(chunk)


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
