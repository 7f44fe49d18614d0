"""The two programs of a rollout: the first token of each answer, and a stretch of further ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, reshard

from tunix.costs.rollout_sizes import (
    STRETCH,
)
from tunix.inference.cache import Cache, decode, prefill, repeat_rows
from tunix.inference.drawing import Drawn, Sampling, draw
from tunix.inference.gathered import Gathered
from tunix.training.state import Architecture


class Rows(NamedTuple):
    """Answers at work: arrays [B] int32 and the cache, whose rows live where their prompts do."""

    token: jax.Array  # the newest
    first: jax.Array  # time at which the prompt begins
    number: jax.Array  # of the answer in the whole rollout: it draws by it
    cache: Cache


def begin(
    arch: Architecture,
    weights: Gathered,
    tokens: jax.Array,
    first: jax.Array,
    numbers: jax.Array,
    key: jax.Array,
    *,
    how: Sampling,
    repeats: int,
    num_slots: int,
) -> tuple[Rows, Drawn]:
    """Return rows after the first token of their answers, and that token, [B, 1] on every device.

    `tokens` are prompts [B / repeats, T] that begin at `first`; each is the prompt of `repeats` rows that follow one
    another. Answers have the `numbers` [B].
    """
    model = weights.module(arch)
    logits, cache = prefill(model, weights, tokens, first, num_slots, tokens.shape[1] + how.max_new_tokens)
    logits, first, cache = repeat_rows((logits, first, cache), repeats)
    drawn = draw(logits, key, numbers, jnp.int32(0), how, model.layout)
    return Rows(drawn.tokens, first, numbers, cache), _on_every_device(Drawn(*(each[:, None] for each in drawn)))


def stretch(
    arch: Architecture,
    weights: Gathered,
    rows: Rows,
    key: jax.Array,
    length: jax.Array,
    number: jax.Array,
    end: jax.Array,
    *,
    how: Sampling,
) -> tuple[Rows, Drawn]:
    """Return rows that had `number` tokens of their answers when they have `end`, and the new ones.

    The new ones are [B, STRETCH] on every device, of which the first `end` - `number` count. Prompts are padded to
    `length`. The number of tokens is data: one program serves all stretches.
    """
    model = weights.module(arch)
    of_rows = model.layout.activation("B")

    def step(state):
        now, token, cache, chunk = state
        tied = _tied_to(now, weights)
        logits, cache = decode(model, tied, cache, token, length + now - 1, rows.first, length + how.max_new_tokens)
        drawn = draw(logits, key, rows.number, now, how, model.layout)
        chunk = jax.tree.map(
            lambda all_of_them, new: jax.lax.dynamic_update_slice_in_dim(all_of_them, new[:, None], now - number, 1),
            chunk,
            drawn,
        )
        return now + 1, drawn.tokens, cache, chunk

    def empty(dtype):
        return jnp.zeros((len(rows.token), STRETCH), dtype, out_sharding=of_rows)

    chunk = Drawn(empty("int32"), empty("float32"), empty("float32"))
    start = (number, rows.token, rows.cache, chunk)
    _, token, cache, chunk = jax.lax.while_loop(lambda state: state[0] < end, step, start)
    return rows._replace(token=token, cache=cache), _on_every_device(chunk)


def _tied_to(now: jax.Array, weights: Gathered) -> Gathered:
    """Return the weights; those that are codes depend on the number of the token.

    XLA moves out of a loop what does not depend on it. Of codes, that would be all matrices at one time.
    """
    if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(weights)):
        return weights
    return jax.lax.optimization_barrier((weights, now))[0]


def _on_every_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: reshard(x, PartitionSpec()), tree)
