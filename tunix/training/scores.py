"""Scores of the targets of a batch under the model, and the form in which a loss returns its sums."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.data.batch import Batch
from tunix.models.transformer import Transformer


class Mean(NamedTuple):
    """A number that has a divisor of its own, and not the weight of the loss."""

    total: jax.Array
    divisor: jax.Array


class Largest(NamedTuple):
    """A number of which the largest of all microbatches is reported; it is not negative."""

    value: jax.Array


Sums = dict[str, Any]  # a scalar, a Mean or a Largest, by the name of the number


class Loss(NamedTuple):
    """Result of a loss for one microbatch: float32 scalars, each a sum over tokens or sequences.

    The step adds the microbatches up and divides once, because a mean of means is wrong where masks differ.
    """

    objective: jax.Array  # what is minimised: gradients are those of objective / weight
    weight: jax.Array  # what objective and sums are divided by: a count of tokens, of sequences, ...
    sums: Sums  # reported as sum / weight under these names in metrics.jsonl; `loss`, a plain sum, is one of them


# (model, batch with fields [B, T], seed) -> Loss. The seed is an int32 scalar that dropout draws from; None outside of
# training.
LossFn = Callable[[Transformer, Batch, jax.Array | None], Loss]


def add_sums(total: Sums, more: Sums) -> Sums:
    """Return the sums of two microbatches together."""

    def add(a, b):
        return Largest(jnp.maximum(a.value, b.value)) if isinstance(a, Largest) else jax.tree.map(jnp.add, a, b)

    return jax.tree.map(add, total, more, is_leaf=lambda node: isinstance(node, Largest))


def report_sums(sums: Sums, weight: jax.Array) -> dict[str, jax.Array]:
    """Return the numbers of a step by their names in metrics.jsonl, from the sums of all its microbatches."""
    numbers = {}
    for name, value in sums.items():
        if isinstance(value, Mean):
            numbers[name] = value.total / value.divisor
        elif isinstance(value, Largest):
            numbers[name] = value.value
        else:
            numbers[name] = value / weight
    return numbers


class Scores(NamedTuple):
    """Scores of the targets of a batch, each [T / chunk_size, B, chunk_size] float32."""

    nll: jax.Array  # negative log-probability of the target
    log_z_squares: jax.Array  # log(Z)^2; Z is the sum of exp(logits)
    entropy: jax.Array | None  # of the distribution, without a gradient; None where it is not asked for


def score_targets(
    model: Transformer,
    batch: Batch,
    seed: jax.Array | None,
    chunk_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Scores, dict[str, jax.Array]]:
    """Score the targets of a batch in nats under softmax(logits / temperature), and return the sums of the blocks too.

    The sign of `nll` is that of the loss: turned here and back there, the GPU's program of Gemma 3 1B needs 0.1 GiB
    more. Logits exist for `chunk_size` positions of each sequence at one time and are computed again in the backward
    pass: [B, T, V] never exists.
    """
    tables = model.tables()
    hidden, block_sums = model.hidden(tables, batch["tokens"], batch["positions"], batch["segment_ids"], seed)

    @jax.checkpoint
    def one_chunk(_, chunk):
        hidden, targets = chunk
        logits = model.logits(tables, hidden)
        if temperature != 1:
            logits = logits / temperature
        log_z = jax.nn.logsumexp(logits, -1)
        ids = reshard(jnp.arange(logits.shape[-1]), model.layout.activation("V"))
        # A comparison in place of a lookup: it fuses, and needs no communication where the vocabulary is split.
        target_logits = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), -1)
        entropy = _entropy(*jax.lax.stop_gradient((logits, log_z))) if with_entropy else None
        return None, Scores(log_z - target_logits, log_z**2, entropy)

    with jax.named_scope("loss"):
        xs = (split_chunks(hidden, chunk_size), split_chunks(batch["targets"], chunk_size))
        return jax.lax.scan(one_chunk, None, xs)[1], block_sums


def _entropy(logits: jax.Array, log_z: jax.Array) -> jax.Array:
    return log_z - jnp.sum(jnp.exp(logits - log_z[..., None]) * logits, -1)


def token_log_probs(
    model: Transformer, batch: Batch, seed: jax.Array | None, *, chunk_size: int, temperature: float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Log-probability in nats, [B, T] float32, of each target of a batch under the model, and the sums of its blocks.

    A loss adds the sums of the blocks (a router's loss is one) to its objective, and reports them.
    """
    scores, block_sums = score_targets(model, batch, seed, chunk_size, temperature)
    return join_chunks(-scores.nll), block_sums


def split_chunks(x: jax.Array, chunk_size: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk_size, B, chunk_size, ...]"""
    length = x.shape[1]
    num_chunks = max(1, length // chunk_size)
    if num_chunks == 1:  # where B is 1 too, a reshape would not know which of the dimensions the mesh splits
        return x[None]
    return x.reshape(x.shape[0], num_chunks, length // num_chunks, *x.shape[2:]).swapaxes(0, 1)


def join_chunks(x: jax.Array) -> jax.Array:
    """[T / chunk_size, B, chunk_size] -> [B, T], the inverse of `split_chunks`."""
    if len(x) == 1:
        return x[0]
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)
