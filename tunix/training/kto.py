"""Loss of single answers with a label: a desirable one becomes likelier, an undesirable one less likely.

A row of the batch has whole documents, in the form of the pairs of training/dpo.py. The first segment of a document is
its prompt with its own answer; the second is the same prompt with the answer of another document, which is not learnt.

    segment_ids           1 1 1 1 2 2 2 3 3 3 4 4 4 4 0 0     two documents
    loss_mask             0 0 1 1 0 1 1 0 1 1 0 0 1 1 0 0     the tokens of the answers
    labels                0 0 0 + 0 0 0 0 0 - 0 0 0 0 0 0     1 or -1, at the last token of each own answer
    reference_log_probs   0 0 0 x 0 0 y 0 0 z 0 0 0 w 0 0     of each answer, at its last token

    gain = log p(own answer) - x                              nats: how much likelier it has become since step 0
    kl = max(0, mean over documents (log p(other answer) - y))

The divergence `kl` is the point from which a gain counts. It is a mean over the whole step, which is computed before
the step and has no gradient: so the loss is the same on every mesh and for every size of a microbatch.

KTO is arXiv:2402.01306; the estimate of the divergence from answers to other prompts is that of its section 4.1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.config import Config
from tunix.config.task import Kto
from tunix.data.batches import Batch, Field
from tunix.models.transformer import Transformer
from tunix.sharding.layout import activation_spec
from tunix.training.dpo import PAIR_FIELDS, sum_answers
from tunix.training.grpo import ALMOST_NOTHING
from tunix.training.logprobs import Loss, Mean, Sums, add_block_sums, compute_token_log_probs

LABELLED_FIELDS = {
    **PAIR_FIELDS,
    "labels": Field("ABT", "float32"),  # 1 desirable, -1 undesirable, at the last token of an own answer
    "kl": Field("AB", "float32"),  # the same number for all rows of a step, nats
}


def make_kl_estimate(cfg: Config, module: Callable[[Any], Transformer]) -> Callable[[dict[str, Any], Batch], Batch]:
    """Return the function of (parameters, batch [A, B, T]) that gives the batch its field `kl`."""
    chunk_size = cfg.training.loss_chunk_size

    def add_kl(params: dict[str, Any], batch: Batch) -> Batch:
        def one_microbatch(_, rows):
            log_probs, _ = compute_token_log_probs(module(params), rows, None, chunk_size=chunk_size)
            other, before = (
                sum_answers(x, rows).rejected for x in (log_probs * rows["loss_mask"], rows["reference_log_probs"])
            )
            is_document = sum_answers(rows["labels"], rows).chosen != 0
            return None, (jnp.sum((other - before) * is_document), jnp.sum(is_document))

        with jax.named_scope("kl"):
            totals, counts = jax.lax.scan(one_microbatch, None, batch)[1]
            kl = jnp.maximum(jnp.sum(totals) / jnp.maximum(jnp.sum(counts), 1), 0.0)
            field = reshard(jnp.broadcast_to(kl, batch["tokens"].shape[:2]), activation_spec("AB"))
        return batch | {"kl": field}

    return add_kl


def labelled_loss(
    model: Transformer, batch: Batch, seed: jax.Array | None = None, *, task: Kto, chunk_size: int | str
) -> Loss:
    """Compute the loss of the documents of a batch [B, T], summed over documents; its weight is their number."""
    per_token, blocks = compute_token_log_probs(model, batch, seed, chunk_size=chunk_size)
    with jax.named_scope("loss"):
        log_probs, reference, num_tokens, label = (
            sum_answers(x, batch).chosen
            for x in (
                per_token * batch["loss_mask"], batch["reference_log_probs"], batch["loss_mask"], batch["labels"],
            )
        )  # fmt: skip
        is_document = ((label != 0) & (num_tokens > 0)).astype(jnp.float32)
        gains, kl = log_probs - reference, batch["kl"][:, None]
        value = jax.nn.sigmoid(label * task.beta * (gains - kl))
        weights = jnp.where(label > 0, task.desirable_weight, task.undesirable_weight)
        ahead = jax.lax.stop_gradient(label * (gains - kl))

        def total(per_document):
            return jnp.sum(per_document * is_document)

        def mean_reward(sign):
            chosen = is_document * (label == sign)
            # A step without such documents has 0, and no division by 0.
            return Mean(jnp.sum(jax.lax.stop_gradient(task.beta * gains) * chosen), jnp.sum(chosen) + ALMOST_NOTHING)

        penalty, block_sums = add_block_sums(blocks, jnp.sum(is_document, 1))
        loss = total(weights * (1 - value))
        sums: Sums = {
            "loss": loss,
            "accuracy": total((ahead > 0) + 0.5 * (ahead == 0)),
            "kl": total(kl),
            "reward_desirable": mean_reward(1),
            "reward_undesirable": mean_reward(-1),
            **block_sums,
        }
        return Loss(loss + penalty, jnp.sum(is_document), sums)
