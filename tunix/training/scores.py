"""Losses of a model that gives scores (models/scores.py): rewards of pairs of answers; classes, numbers of documents.

Each document is one segment of a row, and its last token has its scores. `loss_mask` is 1 there and 0 elsewhere:

    segment_ids     1 1 1 1 2 2 2 3 3 0      three documents
    loss_mask       0 0 0 1 0 0 1 0 1 0
    label_values    0 0 0 2 0 0 0 0 1 0      of task=classify: classes 2, 0 and 1, or a number of each

Of task=reward two documents are a pair, as in training/dpo.py. Its loss is -log sigmoid(r(chosen) - r(rejected)): the
probability that the chosen answer wins, as Bradley and Terry (1952) have it.
"""

import jax
import jax.numpy as jnp

from tunix.config.task import Classify, Reward
from tunix.data.batches import FIELDS, Batch, Field
from tunix.models.layers import BlockSums
from tunix.models.scores import pool_weights
from tunix.models.transformer import Transformer
from tunix.training.dpo import sum_answers
from tunix.training.logprobs import Loss, Sums, add_block_sums, compute_hidden

EXAMPLE_FIELDS = {
    **FIELDS,
    "label_values": Field("ABT", "float32"),  # number of the class, or a number, at the last token of a document
}


def score_documents(model: Transformer, batch: Batch, seed: jax.Array | None) -> tuple[jax.Array, jax.Array, BlockSums]:
    """Return scores [B, T, v] float32 of tokens, weights [B, T] that make those of documents, and the blocks' numbers.

    The weights are 0 in segments that are no document.
    """
    hidden, blocks = compute_hidden(model, model.vocab_weights(), batch, seed)
    assert model.score is not None
    return model.score(hidden), pool_weights(batch["segment_ids"], model.layout), blocks


def reward_loss(model: Transformer, batch: Batch, seed: jax.Array | None = None, *, task: Reward) -> Loss:
    """Compute the loss of the pairs of a batch [B, T], summed over pairs; its weight is their number."""
    scores, weights, blocks = score_documents(model, batch, seed)
    with jax.named_scope("loss"):
        rewards = sum_answers(scores[..., 0] * weights, batch)
        # A row has room for T / 2 pairs and has fewer.
        is_pair = sum_answers(batch["loss_mask"], batch).rejected

        def total(per_pair):
            return jnp.sum(per_pair * is_pair)

        margin = rewards.chosen - rewards.rejected
        centering = task.center_coefficient * jnp.square(rewards.chosen + rewards.rejected)
        penalty, block_sums = add_block_sums(blocks, jnp.sum(is_pair, 1))
        loss = total(centering - jax.nn.log_sigmoid(margin))
        sums: Sums = {
            "loss": loss,
            "accuracy": total((margin > 0) + 0.5 * (margin == 0)),
            "margin": total(margin),
            "reward_chosen": total(rewards.chosen),
            "reward_rejected": total(rewards.rejected),
            **block_sums,
        }
        return Loss(loss + penalty, jnp.sum(is_pair), sums)


def classification_loss(model: Transformer, batch: Batch, seed: jax.Array | None = None, *, task: Classify) -> Loss:
    """Compute the cross entropy (nats) of the classes of a batch [B, T], or the squared error of its numbers.

    It is a sum over documents, and its weight is their number.
    """
    scores, weights, blocks = score_documents(model, batch, seed)
    with jax.named_scope("loss"):
        # Each token has a loss, of which those of the last tokens count: no document has to be cut out of its row.
        counts = batch["loss_mask"] * weights
        if task.labels is None:
            error = scores[..., 0] - batch["label_values"]
            per_token, numbers = jnp.square(error), {"absolute_error": jnp.abs(error)}
        else:
            classes = batch["label_values"].astype(jnp.int32)[..., None]
            is_local = jnp.arange(len(task.labels)) == classes
            of_class = jnp.sum(jnp.where(is_local, scores, 0), -1)
            per_token = jax.nn.logsumexp(scores, -1) - of_class
            numbers = {"accuracy": jnp.argmax(scores, -1) == classes[..., 0]}
        penalty, block_sums = add_block_sums(blocks, jnp.sum(counts, 1))
        loss = jnp.sum(per_token * counts)
        reported = {name: jnp.sum(each * counts) for name, each in numbers.items()}
        return Loss(loss + penalty, jnp.sum(counts), {"loss": loss, **reported, **block_sums})
