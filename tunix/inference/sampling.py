"""Tokens that follow prompts, drawn from the model's distribution."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, reshard

from tunix.base.errors import UserError
from tunix.inference.cache import decode, prefill
from tunix.sharding.arrays import rows_to_global
from tunix.training.state import Architecture

SMALLEST_BUCKET = 16  # prompts are padded to a power of two from here up, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token. The filters apply in this order, to logits / temperature."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together have this probability (Holtzman et al. 2020)
    min_p: float | None = None  # keep those with this share of the likeliest's probability (arXiv:2407.01082)
    stop: tuple[int, ...] = ()  # ids that end an answer


@dataclass(frozen=True)
class Answer:
    """Tokens that followed one prompt."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    stopped: bool  # by a stop id, not by the length


class Sampler:
    """Draws answers with the parameters that it is called with.

    A program is compiled once for each bucket: lengths of prompts and numbers of prompts are rounded up to powers of
    two. The layout of the parameters is that of `arch`, so the same sampler serves a model that is kept whole and one
    in training, whose weights are gathered layer by layer for each token.
    """

    def __init__(self, arch: Architecture, context_length: int, mesh: Mesh):
        self.context_length, self.mesh = context_length, mesh
        self.answer = jax.jit(partial(_answer, arch), static_argnums=4)

    def __call__(self, params: dict[str, Any], prompts: list[list[int]], how: Sampling, seed: int = 0) -> list[Answer]:
        """Return an answer to each prompt (token ids); what is drawn for one does not depend on the others.

        Raises:
            UserError: an empty prompt, or one that with its answer is longer than the context.
        """
        longest = max(map(len, prompts))
        if not all(prompts):
            raise UserError("a prompt is empty: it has no token to continue from")
        if longest + how.max_new_tokens > self.context_length:
            raise UserError(
                f"a prompt of {longest} tokens and max_new_tokens={how.max_new_tokens} are more than the model's "
                f"context of {self.context_length}"
            )
        length, rows = _bucket(longest, SMALLEST_BUCKET), _bucket(len(prompts), 1)
        tokens = np.zeros((rows, length), np.int32)
        first = np.full(rows, length - 1, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, length - len(prompt) :] = prompt
            first[row] = length - len(prompt)
        inputs = (rows_to_global(tokens, self.mesh), rows_to_global(first, self.mesh))
        out, log_probabilities, counts = map(np.asarray, self.answer(params, *inputs, jax.random.key(seed), how))
        answers = []
        for row in range(len(prompts)):
            ids = out[row, : counts[row]].tolist()
            answers.append(Answer(ids, log_probabilities[row, : counts[row]].tolist(), ids[-1] in how.stop))
        return answers


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())


def _answer(arch: Architecture, params, tokens, first, key, how: Sampling):
    """Return tokens [B, M] after prompts [B, T], their log-probabilities, and how many of the tokens count, [B]."""
    (rows, length), steps = tokens.shape, how.max_new_tokens
    model = arch.module(params)

    def tied_to(number):
        """Return the parameters; split ones depend on the number of the token.

        XLA moves out of a loop what does not depend on it. Of weights that rest split, that would be the gathers of all
        layers: the whole model at one time, for which training has no room.
        """
        if not model.layout.strategy.params:
            return params
        return jax.lax.optimization_barrier((params, number))[0]

    logits, cache = prefill(model, tokens, first, length + steps)

    def step(state):
        number, logits, cache, out, log_probs, done, counts = state
        logits = reshard(logits, PartitionSpec())  # every device draws the same tokens for all rows
        token = choose(logits, jax.random.fold_in(key, number), how)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], 1)[:, 0]
        out = out.at[:, number].set(token)
        log_probs = log_probs.at[:, number].set(log_prob)
        counts = counts + ~done
        done = done | jnp.isin(token, jnp.array(how.stop, jnp.int32))
        model = arch.module(tied_to(number))
        fed = reshard(token, model.layout.activation("B"))
        logits, cache = decode(model, cache, fed, length + number, first)
        return number + 1, logits, cache, out, log_probs, done, counts

    def going(state):
        number, *_, done, _ = state
        return (number < steps) & ~jnp.all(done)

    zeros = jnp.zeros((rows, steps), jnp.int32)
    begin = (0, logits, cache, zeros, zeros.astype(jnp.float32), jnp.zeros(rows, bool), jnp.zeros(rows, jnp.int32))
    *_, out, log_probs, _, counts = jax.lax.while_loop(going, step, begin)
    return out, log_probs, counts


def choose(logits: jax.Array, key: jax.Array, how: Sampling) -> jax.Array:
    """The next token [B] int32 of logits [B, V] float32; each row draws from a key of its own."""
    if how.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(logits)))
    filtered = _filtered(logits / how.temperature, how)
    return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)


def _filtered(logits: jax.Array, how: Sampling) -> jax.Array:
    """Logits with minus infinity for the tokens that are not to be drawn."""
    if how.top_k is not None:
        least = jax.lax.top_k(logits, min(how.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.top_p is not None:
        ordered = -jnp.sort(-logits, -1)
        shares = jax.nn.softmax(ordered, -1)
        kept = jnp.cumsum(shares, -1) - shares < how.top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if how.min_p is not None:
        least = jnp.max(logits, -1, keepdims=True) + jnp.log(how.min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
