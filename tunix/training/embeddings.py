"""Loss of the vectors of texts: a query's is nearer to its document's than to those of all other documents of the step.

A row of the batch is a group: a query, its document, and documents that do not answer it. Each is a segment:

    segment_ids           1 1 1 2 2 2 2 3 3 0     query, document, one negative
    loss_mask             0 0 1 0 0 0 1 0 1 0     1 at the last token of each text
    vector_gradients      [A, B, u, D]            gradient of the step's loss by the vector of each text

    loss of a query = -log(exp(cos(query, own) / temperature) / sum over documents exp(cos(query, it) / temperature))

The documents of all rows of a step are compared, over all devices and microbatches. So a pass before the step computes
all vectors, the loss, and its gradient by each vector; the step minimises the product of vectors and these gradients,
which has the same gradient by the parameters. Its memory is that of a microbatch, and the loss is the same on every
mesh and for every size of a microbatch (gradient caching, arXiv:2101.06983).

InfoNCE is arXiv:1807.03748; vectors of several sizes (Matryoshka) are arXiv:2205.13147.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, reshard

from tunix.config import Config
from tunix.config.task import Embed
from tunix.data.batches import Batch, Field
from tunix.models.layers import BlockSums
from tunix.models.scores import normalize, pool
from tunix.models.transformer import Transformer
from tunix.sharding.layout import activation_spec
from tunix.training.logprobs import Loss, Sums, add_block_sums

MASKED = -1e30  # a score that no document reaches


def _name_accuracies(task: Embed) -> dict[int | None, str]:
    """Return the names of the accuracies by the size of the vectors; None is the whole one."""
    return {None: "accuracy", **{size: f"accuracy_{size}" for size in task.sizes or ()}}


def embed_fields(cfg: Config) -> Mapping[str, Field]:
    """Return the fields of a batch that `make_gradients` fills."""
    assert isinstance(cfg.task, Embed)
    sizes = (("u", cfg.task.num_texts), ("D", cfg.model.embed_dim))
    return {
        "vector_gradients": Field("ABuD", "float32", sizes=sizes),
        "query_loss": Field("AB", "float32"),
        **dict.fromkeys(_name_accuracies(cfg.task).values(), Field("AB", "float32")),
    }


def embed_texts(model: Transformer, batch: Batch, seed: jax.Array | None, task: Embed) -> tuple[jax.Array, BlockSums]:
    """Return the vectors [B, u, D] float32 of the texts of a batch [B, T], and the blocks' numbers."""
    arrays = batch["tokens"], batch["positions"], batch["segment_ids"]
    hidden, blocks = model.hidden(model.vocab_weights(), *arrays, seed)
    return pool(hidden, batch["segment_ids"], model.layout, task.pooling, task.num_texts), blocks


MULTIPLIER = 0x9E3779B1  # odd: no token of a row is lost in the product


def hash_rows(tokens: jax.Array) -> jax.Array:
    """Return a number [A, B] for each row of tokens [A, B, T]: equal rows have equal ones."""
    powers = np.multiply.accumulate(np.full(tokens.shape[-1], MULTIPLIER, np.uint32))  # modulo 2^32, like the sum
    return jnp.sum(tokens.astype(jnp.uint32) * powers, -1)


def compare(
    vectors: jax.Array, is_text: jax.Array, hashes: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """Return the loss [A, B] of each query, and whether its document is the nearest of all, [A, B] float32.

    `vectors` [A, B, u, D], `is_text` [A, B, u] and `hashes` [A, B] of the rows are those of a step. An absent query
    has 0.
    """
    steps, rows, count, width = vectors.shape
    vectors = normalize(vectors)
    # Each device compares its queries with the documents of all.
    documents = reshard(vectors[:, :, 1:], PartitionSpec()).reshape(-1, width)
    is_document = reshard(is_text[:, :, 1:], PartitionSpec()).reshape(-1)
    scores = jnp.einsum(
        "ABD,nD->ABn", vectors[:, :, 0], documents, precision="highest",
        out_sharding=PartitionSpec(*activation_spec("AB"), None),
    ) / temperature  # fmt: skip
    numbers = jnp.arange(len(is_document))
    row = reshard(jnp.arange(steps * rows).reshape(steps, rows), activation_spec("AB"))[..., None]
    is_repeat = jnp.repeat(reshard(hashes, PartitionSpec()).reshape(-1), count - 1) == hashes[..., None]
    is_compared = is_document & ((numbers // (count - 1) == row) | ~is_repeat)
    scores = jnp.where(is_compared, scores, MASKED)
    is_local = numbers == row * (count - 1)
    positive = jnp.sum(jnp.where(is_local, scores, 0), -1)
    nearest_other = jnp.max(jnp.where(is_local, MASKED, scores), -1)
    is_query = is_text[:, :, 0]
    losses = jnp.where(is_query, jax.nn.logsumexp(scores, -1) - positive, 0)
    return losses, (is_query & (positive > nearest_other)).astype(jnp.float32)


def make_gradients(cfg: Config, module: Callable[[Any], Transformer]) -> Callable[[dict[str, Any], Batch], Batch]:
    """Return the function of (parameters, batch [A, B, T]) that gives the batch the loss of each query, accuracies,
    and the gradient of the sum of losses by each vector."""
    task = cfg.task
    assert isinstance(task, Embed)

    def total(
        vectors: jax.Array, is_text: jax.Array, hashes: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, dict[str, jax.Array]]]:
        found = {
            name: compare(vectors[..., :size], is_text, hashes, task.temperature)
            for size, name in _name_accuracies(task).items()
        }
        losses = jnp.sum(jnp.stack([each for each, _ in found.values()]), 0)
        return jnp.sum(losses), (losses, {name: hits for name, (_, hits) in found.items()})

    def add_gradients(params: dict[str, Any], batch: Batch) -> Batch:
        with jax.named_scope("vectors"):
            vectors = jax.lax.scan(lambda _, x: (None, embed_texts(module(params), x, None, task)[0]), None, batch)[1]
            numbers = 1 + jnp.arange(task.num_texts)
            is_text = jnp.any(reshard(batch["segment_ids"], activation_spec("ABS"))[..., None] == numbers, 2)
            hashes = hash_rows(reshard(batch["tokens"], activation_spec("ABS")))
            gradients, (losses, hits) = jax.grad(total, has_aux=True)(vectors, is_text, hashes)
            fields = {"vector_gradients": gradients, "query_loss": losses, **hits}
            return batch | {name: reshard(x, activation_spec("ABuD"[: x.ndim])) for name, x in fields.items()}

    return add_gradients


def embedding_loss(model: Transformer, batch: Batch, seed: jax.Array | None = None, *, task: Embed) -> Loss:
    """Compute what has the gradient of the loss of the queries of a batch [B, T]; its weight is their number."""
    vectors, blocks = embed_texts(model, batch, seed, task)
    with jax.named_scope("loss"):
        is_query = jnp.any(batch["segment_ids"] == 1, 1).astype(jnp.float32)
        penalty, block_sums = add_block_sums(blocks, is_query)
        names = {"loss": "query_loss", **{name: name for name in _name_accuracies(task).values()}}
        sums: Sums = {**{name: jnp.sum(batch[field]) for name, field in names.items()}, **block_sums}
        return Loss(jnp.sum(vectors * batch["vector_gradients"]) + penalty, jnp.sum(is_query), sums)
