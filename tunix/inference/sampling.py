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
from tunix.sharding.arrays import local_rows, to_global
from tunix.sharding.mesh_shape import data_shards
from tunix.training.state import Architecture

SMALLEST_BUCKET = 16  # prompts are padded to a power of two from here up, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The filters apply in this order, to logits / temperature."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int | None = None  # keep the k likeliest
    top_p: float | None = None  # keep the likeliest that together have this probability (Holtzman et al. 2020)
    min_p: float | None = None  # keep those with this share of the likeliest's probability (arXiv:2407.01082)
    stop: tuple[int, ...] = ()  # ids that end an answer


@dataclass(frozen=True)
class Answer:
    """What followed one prompt."""

    tokens: list[int]  # with the stop id, if there is one
    log_probabilities: list[float]  # of each token under the model, before temperature and filters
    stopped: bool  # by a stop id, not by the length


class Sampler:
    """A model with its layers apart, and the programs compiled for it so far."""

    def __init__(self, arch: Architecture, params: dict[str, Any], context_length: int, num_layers: int, to_rows):
        """`to_rows` lays host rows [B, ...] out over the data shards."""
        self.arch, self.context_length, self.to_rows = arch, context_length, to_rows
        self.params = params
        self.run = jax.jit(partial(_answer, arch), static_argnums=4)

    def __call__(self, prompts: list[list[int]], how: Sampling, seed: int = 0) -> list[Answer]:
        """An answer to each prompt (token ids); what is drawn for one does not depend on the others.

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
        inputs = (self.to_rows(tokens), self.to_rows(first))
        out, log_probabilities, counts = map(np.asarray, self.run(self.params, *inputs, jax.random.key(seed), how))
        answers = []
        for row in range(len(prompts)):
            ids = out[row, : counts[row]].tolist()
            answers.append(Answer(ids, log_probabilities[row, : counts[row]].tolist(), ids[-1] in how.stop))
        return answers


def _bucket(size: int, smallest: int) -> int:
    return max(smallest, 1 << (size - 1).bit_length())


def _answer(arch: Architecture, params, tokens, first, key, how: Sampling):
    """Tokens [B, M] and their log-probabilities after prompts [B, T], and how many of them count, [B]."""
    model = arch.module(params)
    (rows, length), steps = tokens.shape, how.max_new_tokens
    logits, cache = prefill(model, tokens, first, length + steps)

    def step(state):
        number, logits, cache, out, log_probs, done, counts = state
        whole = reshard(logits, PartitionSpec())
        token = choose(whole, jax.random.fold_in(key, number), how)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(whole), token[:, None], 1)[:, 0]
        out, log_probs = (held.at[:, number].set(new) for held, new in ((out, token), (log_probs, log_prob)))
        counts = counts + ~done
        done = done | jnp.isin(token, jnp.array(how.stop, jnp.int32))
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


def continue_text(
    arch: Architecture, params: dict, mesh: Mesh, prompt: list[int], num_tokens: int, temperature: float, seed: int
) -> list[int]:
    """`num_tokens` tokens that follow `prompt`, with the parameters as training holds them.

    Nothing is laid out anew, so it fits where training does; the whole sequence is computed for each token.
    """
    length = len(prompt) + num_tokens
    rows = len(local_rows(mesh, data_shards(mesh.shape)))  # the prompt once for each data shard
    tokens = np.zeros((1, rows, length), np.int32)
    tokens[:, :, : len(prompt)] = prompt
    how = Sampling(num_tokens, temperature)

    @jax.jit
    def continued(params, tokens, key):
        model = arch.module(params)
        tables = model.tables()

        def next_token(position, tokens):
            hidden = jax.lax.dynamic_slice_in_dim(model.hidden(tables, tokens)[0], position - 1, 1, axis=1)
            logits = reshard(model.logits(tables, hidden), PartitionSpec())[:1, 0]
            token = choose(logits, jax.random.fold_in(key, position), how)
            return jnp.where(jnp.arange(length) == position, token, tokens)

        return jax.lax.fori_loop(len(prompt), length, next_token, tokens[0])

    out = continued(params, to_global({"tokens": tokens}, mesh)["tokens"], jax.random.key(seed))
    return np.asarray(out.addressable_shards[0].data)[0, len(prompt) :].tolist()
