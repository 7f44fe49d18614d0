"""Loss of a policy that learns from rewards for its own answers: GRPO and its relatives.

An answer is one row of the batch. Its sampler has written down log q, the log-probability of each token in the
distribution that the token was drawn from. p is the policy in training, and A the advantage of the token:

    ratio       p / p_old           1 in value where a rollout is used for one step: p_old is then p itself
    importance  p / q               the sampler and the trainer round differently; measured in each step
    loss        - sum over tokens of min(ratio A, clip(ratio) A) x importance, divided once by what `divide_by` says

Sources: GRPO arXiv:2402.03300, DAPO (clip-higher, division by tokens) arXiv:2503.14476, Dr. GRPO (division by a
constant) arXiv:2503.20783, GSPO (the ratio of an answer) arXiv:2507.18071, CISPO (clipped weights) arXiv:2506.13585,
truncated importance weights as in https://fengyao.notion.site/off-policy-rl.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Sampling
from tunix.config.task import Grpo
from tunix.data.batches import FIELDS, Batch, Field
from tunix.models.transformer import Transformer
from tunix.training.logprobs import Largest, Loss, Mean, add_block_sums, score_targets
from tunix.training.teacher import Teacher

POLICY_FIELDS = {
    **FIELDS,
    "advantages": Field("ABT", "float32"),  # of each token of an answer
    "log_probs": Field("ABT", "float32"),  # of each target, in the distribution that it was drawn from
    "reference_log_probs": Field("ABT", "float32"),  # of each target under the reference; 0 where there is none
}
# Added to the divisor of a step: where nothing is learnt (all answers masked), 0 is divided by this and not by 0.
# Beside a count of at least 1 it vanishes in float32.
ALMOST_NOTHING = 1e-9


class Gains(NamedTuple):
    """Terms of the loss for each token of an answer, [B, T]; 0 where `loss_mask` is 0."""

    gain: jax.Array  # its gradient is that of the expected reward
    ratio: jax.Array  # p / p_old
    is_clipped: jax.Array  # 1 where the limits take the gradient away, else 0
    gap: jax.Array  # |log p - log q|, nats
    kl: jax.Array | None  # estimate of the divergence from the reference, nats; None without a reference


def policy_loss(
    model: Transformer,
    batch: Batch,
    seed: jax.Array | None = None,
    *,
    task: Grpo,
    sampling: Sampling,
    chunk_size: int | str,
    z_loss: float,
    teacher: Teacher | None = None,
) -> Loss:
    """Compute the clipped policy gradient over the tokens of answers, where `loss_mask` [B, T] is 1; see this file's
    top.

    `sampling` is that of the rollouts: the policy that learns is the one that was drawn from, at its temperature. The
    divergence from a teacher in the loss is added.
    """
    output = None if teacher is None else teacher.read(batch)
    scores, blocks = score_targets(model, batch, seed, chunk_size, sampling.temperature, True, output)
    assert scores.entropy is not None
    with jax.named_scope("loss"):
        mask = batch["loss_mask"]
        gains = compute_gains(-scores.nll, batch, task)
        share, row_weights = weigh_answers(mask, task, sampling.max_new_tokens)
        penalty, block_sums = add_block_sums(blocks, row_weights)
        loss = -jnp.sum(gains.gain * mask * share)
        z_part = z_loss * jnp.sum(scores.log_z**2 * mask * share)
        learnt = loss
        if scores.divergence is not None:
            learnt = loss + task.teacher_weight * jnp.sum(scores.divergence * mask * share)

        def mean(x):
            return Mean(jnp.sum(jax.lax.stop_gradient(x) * mask), jnp.sum(mask) + ALMOST_NOTHING)

        sums = {
            "loss": loss,
            "entropy": mean(scores.entropy),
            "clipped": mean(gains.is_clipped),
            "ratio_max": Largest(jnp.max(jax.lax.stop_gradient(gains.ratio))),
            "mismatch": mean(gains.gap),
            "mismatch_max": Largest(jnp.max(gains.gap)),
            **({} if gains.kl is None else {"kl": mean(gains.kl)}),
            **({} if scores.divergence is None else {"teacher_kl": mean(scores.divergence)}),
            **({"z_loss": z_part} if z_loss else {}),
            **block_sums,
        }
        return Loss(learnt + z_part + penalty, jnp.sum(row_weights) + ALMOST_NOTHING, sums)


def compute_gains(log_probs: jax.Array, batch: Batch, task: Grpo) -> Gains:
    """Return the gain of each token from log p, [B, T], and the fields of the batch."""
    mask, advantages, sampled = batch["loss_mask"], batch["advantages"], batch["log_probs"]

    def masked(x):
        return jnp.where(mask > 0, x, 0)

    now = jax.lax.stop_gradient(log_probs)
    # On policy the ratio is 1 in value, and its gradient is that of log p: the answers are of the model that learns.
    log_ratio = masked(log_probs - (now if task.on_policy else sampled))
    if task.ratio == "answer":  # the geometric mean of the ratios of its tokens
        num_tokens = jnp.sum(mask, axis=1, keepdims=True)
        mean = jnp.sum(log_ratio, axis=1, keepdims=True) / jnp.maximum(num_tokens, 1)
        log_ratio = masked(jnp.broadcast_to(mean, mask.shape, out_sharding=jax.typeof(mask).sharding))
    ratio, max_ratio = jnp.exp(log_ratio), task.max_importance
    clipped = jnp.clip(ratio, 1 - task.clip_low, 1 + task.clip_high)
    if task.clip == "weights":  # every token keeps a gradient; its weight is clipped
        gain = jax.lax.stop_gradient(clipped) * advantages * log_probs
    else:
        # Where the advantage is negative, min() bounds the ratio from below alone; the largest weight bounds it above.
        bounded = ratio if max_ratio is None else jnp.minimum(ratio, max_ratio)
        gain = jnp.minimum(bounded * advantages, clipped * advantages)
    # The sampler's rounding makes q unlike p. A weight p / q corrects for it, and its bound keeps the variance small.
    if task.on_policy and max_ratio is not None:
        gain = gain * IMPORTANCE[task.importance](masked(now - sampled), max_ratio)
    kl = _estimate_kl(masked(batch["reference_log_probs"] - log_probs)) if task.kl_coefficient else None
    if kl is not None and task.kl == "loss":
        gain = gain - task.kl_coefficient * kl
    # min() takes the clipped branch, which has no gradient, where the ratio has gone further than it may in the
    # direction in which the advantage pulls; in the other direction the gradient brings it back.
    outside = ((ratio > clipped) & (advantages > 0)) | ((ratio < clipped) & (advantages < 0))
    gap = jnp.abs(masked(now - sampled))
    return Gains(masked(gain), masked(ratio), masked(outside.astype(jnp.float32)), gap, kl)


def _truncate(log_weights: jax.Array, largest: float) -> jax.Array:
    """Return the weights [B, T] of tokens, capped; `log_weights` is 0 where there is no token of an answer."""
    return jnp.minimum(jnp.exp(log_weights), largest)


def _mask(log_weights: jax.Array, largest: float) -> jax.Array:
    """Return the weights [B, T] of tokens, 0 where one is larger."""
    weights = jnp.exp(log_weights)
    return jnp.where(weights > largest, 0.0, weights)


def _weigh_sequences(log_weights: jax.Array, largest: float) -> jax.Array:
    """Return the weight of each whole answer for all of its tokens, [B, 1], capped."""
    return jnp.minimum(jnp.exp(jnp.sum(log_weights, axis=1, keepdims=True)), largest)


# Weights p / q of tokens, by the value of task.importance: (log p - log q [B, T], largest weight) -> [B, T] or [B, 1].
IMPORTANCE = {"truncate": _truncate, "mask": _mask, "sequence": _weigh_sequences}


def weigh_answers(mask: jax.Array, task: Grpo, max_new_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the share [B, 1] with which the tokens of each answer count, and the weight [B] of each answer.

    The sum of the weights is the divisor of the step. For answers of 2 and 4 tokens:

        divide_by    share of a token    weights of the answers    each token counts
        tokens       1, 1                2, 4                      1 / 6
        answers      1/2, 1/4            1, 1                      1 / 4, 1 / 8
        constant c   1, 1                c, c                      1 / 2c
    """
    num_tokens = jnp.sum(mask, axis=1)  # of each answer
    is_answer = (num_tokens > 0).astype(jnp.float32)
    if task.divide_by == "answers":
        return 1 / jnp.maximum(num_tokens, 1)[:, None], is_answer
    full_share = jnp.ones_like(num_tokens)[:, None]
    if task.divide_by == "constant":
        return full_share, is_answer * max_new_tokens
    return full_share, num_tokens


def _estimate_kl(difference: jax.Array) -> jax.Array:
    """Estimate the divergence from the reference in nats: k3 of http://joschu.net/blog/kl-approx.html.

    `difference` is log-probability of the reference less that of the policy. The estimate is never negative.
    """
    # With r = p_reference / p_policy, and answers drawn from the policy, the mean of r - 1 is 0. So r - 1 - log r has
    # the mean of -log r, which is the divergence, with less variance; and r - 1 >= log r.
    return jnp.exp(difference) - 1 - difference
