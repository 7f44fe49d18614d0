"""Loss of pairs of answers: the chosen one becomes likelier than the rejected one, compared with a reference model.

A row of the batch has whole pairs. A pair is two segments: the chosen answer with an odd number, and the rejected one
with the even number behind it.

    segment_ids           1 1 1 1 2 2 2 3 3 3 4 4 4 4 0 0     two pairs
    loss_mask             0 0 1 1 0 1 1 0 1 1 0 0 1 1 0 0     the tokens of the answers
    reference_log_probs   0 0 0 x 0 0 y 0 0 z 0 0 0 w 0 0     of each answer, at its last token

    margin = (log p(chosen) - x) - (log p(rejected) - y)      nats: how far the policy has moved the pair apart

DPO is arXiv:2305.18290, its smoothed labels cDPO (ericmitchell.ai/cdpo.pdf), robust DPO arXiv:2403.00409, IPO
arXiv:2310.12036. SimPO (arXiv:2405.14734) and ORPO (arXiv:2403.07691) have no reference: x, y, z and w are 0.
`PAIR_OBJECTIVES` of config/task.py lists them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.base.dotted_path import import_object
from tunix.config.task import PAIR_OBJECTIVES, Dpo
from tunix.data.batches import FIELDS, Batch, Field
from tunix.models.transformer import Transformer
from tunix.training.logprobs import Loss, Sums, add_block_sums, compute_token_log_probs

PAIR_FIELDS = {
    **FIELDS,
    "reference_log_probs": Field("ABT", "float32"),  # of an answer under the model of step 0, at its last token
}


class Sides(NamedTuple):
    """A number for each side of each pair, [B, T / 2]; 0 where a row has fewer pairs."""

    chosen: jax.Array
    rejected: jax.Array


class Pairs(NamedTuple):
    """Numbers of the pairs of a batch that an objective takes."""

    # How much likelier each answer has become since step 0; without a reference, its log-probability.
    gains: Sides
    nll: jax.Array  # mean over the tokens of the chosen answer and its prompt, nats

    @property
    def margin(self) -> jax.Array:
        """How far the policy has moved each pair apart, nats: [B, T / 2]."""
        return self.gains.chosen - self.gains.rejected


def preference_loss(
    model: Transformer, batch: Batch, seed: jax.Array | None = None, *, task: Dpo, chunk_size: int | str
) -> Loss:
    """Compute the loss of the pairs of a batch [B, T], summed over pairs; its weight is their number."""
    objective = PAIR_OBJECTIVES[task.objective]
    per_token, blocks = compute_token_log_probs(model, batch, seed, chunk_size=chunk_size)
    with jax.named_scope("loss"):
        log_probs = sum_answers(per_token * batch["loss_mask"], batch)
        reference = sum_answers(batch["reference_log_probs"], batch)
        num_tokens = sum_answers(batch["loss_mask"], batch)
        sft_loss = -log_probs.chosen / jnp.maximum(num_tokens.chosen, 1)
        if objective.per_token or task.length_normalized:
            log_probs, reference = (
                Sides(*(side / jnp.maximum(count, 1) for side, count in zip(sides, num_tokens, strict=True)))
                for sides in (log_probs, reference)
            )
        # The reference has no gradient: it is data of the batch.
        gains = Sides(*(now - before for now, before in zip(log_probs, reference, strict=True)))
        lengths = sum_answers(jnp.ones_like(per_token), batch)  # with the prompt
        pairs = Pairs(gains, -sum_answers(per_token, batch).chosen / jnp.maximum(lengths.chosen, 1))
        margin = pairs.margin
        # A row has room for T / 2 pairs and has fewer; a pair of which one answer has no tokens left is none.
        is_pair = ((num_tokens.chosen > 0) & (num_tokens.rejected > 0)).astype(jnp.float32)

        def total(per_pair):
            return jnp.sum(per_pair * is_pair)

        penalty, block_sums = add_block_sums(blocks, jnp.sum(is_pair, 1))
        loss = total(import_object(objective.function)(pairs, task) + task.sft_weight * sft_loss)
        sums: Sums = {
            "loss": loss,
            # Of pairs that are as far apart as at step 0, half are counted: the first step has no right order yet.
            "accuracy": total((margin > 0) + 0.5 * (margin == 0)),
            "margin": total(task.beta * margin),
            "reward_chosen": total(task.beta * gains.chosen),
            "reward_rejected": total(task.beta * gains.rejected),
            **({"sft_loss": total(sft_loss)} if task.sft_weight else {}),
            **block_sums,
        }
        return Loss(loss + penalty, jnp.sum(is_pair), sums)


def sum_answers(x: jax.Array, batch: Batch) -> Sides:
    """Sum [B, T] over the tokens of each side of each pair. The order of the sum is the same on every mesh."""
    numbers = 2 * jnp.arange(x.shape[1] // 2)[:, None]
    segments = batch["segment_ids"][:, None, :]
    # A comparison in place of a scatter, whose order of adding is open on a GPU; it fuses: [B, T / 2, T] never exists.
    return Sides(*(jnp.sum(jnp.where(segments == numbers + side, x[:, None, :], 0), -1) for side in (1, 2)))


def _smoothed(scaled: jax.Array, smoothing: float) -> jax.Array:
    return -(1 - smoothing) * jax.nn.log_sigmoid(scaled) - smoothing * jax.nn.log_sigmoid(-scaled)


def sigmoid_loss(pairs: Pairs, task: Dpo) -> jax.Array:
    return _smoothed(task.beta * pairs.margin, task.label_smoothing)


def robust_loss(pairs: Pairs, task: Dpo) -> jax.Array:
    # Its mean is that of `sigmoid_loss` on the pairs in their right order, where this share of them is turned around.
    scaled, share = task.beta * pairs.margin, task.label_smoothing
    return (share * jax.nn.log_sigmoid(-scaled) - (1 - share) * jax.nn.log_sigmoid(scaled)) / (1 - 2 * share)


def ipo_loss(pairs: Pairs, task: Dpo) -> jax.Array:
    return (pairs.margin - 1 / (2 * task.beta)) ** 2


def simpo_loss(pairs: Pairs, task: Dpo) -> jax.Array:
    return _smoothed(task.beta * pairs.margin - task.simpo_gamma, task.label_smoothing)


def orpo_loss(pairs: Pairs, task: Dpo) -> jax.Array:
    # log(p / (1 - p)) of each side. p is 1 where a row has no pair, and may round to 1 elsewhere: log(1 - p) is kept
    # finite, and so are its gradients.
    chosen, rejected = (log_p - jax.nn.log1mexp(jnp.maximum(-log_p, 1e-6)) for log_p in pairs.gains)
    return pairs.nll - task.beta * jax.nn.log_sigmoid(chosen - rejected)
