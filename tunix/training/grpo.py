"""Loss of a policy that learns from rewards for its own answers: GRPO and its relatives.

An answer is one segment of a row of the batch, often the only one. Its sampler has written down log q, the
log-probability of each token at the temperature, before filters: q is the policy as it was. p is the policy in
training, and A the advantage of the token (`ADVANTAGES` of rl/rollouts.py):

    ratio       p / p_old           1 in value where a rollout is used for one step: p_old is then p itself
    importance  p / q               the sampler and the trainer round differently; measured in each step
    loss        - sum over tokens of min(ratio A, clip(ratio) A) x importance, divided once by what `divide_by` says

Sources: GRPO arXiv:2402.03300, DAPO (clip-higher, division by tokens) arXiv:2503.14476, Dr. GRPO (division by a
constant) arXiv:2503.20783, GSPO (the ratio of an answer) arXiv:2507.18071, CISPO (clipped weights) arXiv:2506.13585,
SAPO (a gate in the place of limits) arXiv:2511.20347, truncated importance weights as in https://fengyao.notion.site/off-policy-rl.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tunix.config import Sampling
from tunix.config.task import Grpo
from tunix.data.batches import FIELDS, Batch, Field
from tunix.models.layers import merge_runs
from tunix.models.transformer import Transformer
from tunix.training.logprobs import Loss, Max, Mean, add_block_sums, compute_hidden, score_targets, sum_further_tokens
from tunix.training.teacher import AnyTeacher

POLICY_FIELDS = {
    **FIELDS,
    "advantages": Field("ABT", "float32"),  # of each token of an answer
    "log_probs": Field("ABT", "float32"),  # of each target, under the policy that drew it, at its temperature
    "reference_log_probs": Field("ABT", "float32"),  # of each target under the reference; 0 where there is none
}
# How steep SAPO's gate is for tokens with a positive advantage, and for others.
GATES = 1.0, 1.05
# Added to the divisor of a mean: where nothing is learnt (all answers masked), 0 is divided by this and not by 0.
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
    teacher: AnyTeacher | None = None,
) -> Loss:
    """Compute the clipped policy gradient over the tokens of answers, where `loss_mask` [B, T] is 1; see this file's
    top.

    `sampling` is that of the rollouts: the policy that learns is the one that was drawn from, at its temperature. The
    divergence from a teacher in the loss is added.
    """
    output = None if teacher is None else teacher.read(batch)
    vocab_weights = model.vocab_weights()
    hidden, blocks = compute_hidden(model, vocab_weights, batch, seed)
    scores = score_targets(model, vocab_weights, hidden, batch, chunk_size, sampling.temperature, True, output)
    assert scores.entropy is not None
    share, row_weights = weigh_answers(batch, task, sampling.max_new_tokens)
    further_loss, further_sums = jnp.zeros(()), {}
    if model.cfg.mtp is not None:
        # The layer learns to follow the policy, which learns nothing by it.
        fixed = jax.lax.stop_gradient((vocab_weights, hidden))
        answers = batch | {"loss_mask": batch["loss_mask"] * share}
        further, divisor, more = sum_further_tokens(model, *fixed, answers, chunk_size)
        further_loss, blocks = model.cfg.mtp.loss_weight * further, merge_runs(blocks, more)
        further_sums = {"mtp_loss": Mean(jax.lax.stop_gradient(further), divisor + ALMOST_NOTHING)}
    with jax.named_scope("loss"):
        mask = batch["loss_mask"]
        gains = compute_gains(-scores.nll, batch, task)
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
            "ratio_max": Max(jnp.max(jax.lax.stop_gradient(gains.ratio))),
            "mismatch": mean(gains.gap),
            "mismatch_max": Max(jnp.max(gains.gap)),
            **({} if gains.kl is None else {"kl": mean(gains.kl)}),
            **({} if scores.divergence is None else {"teacher_kl": mean(scores.divergence)}),
            **({"z_loss": z_part} if z_loss else {}),
            **block_sums,
            **further_sums,
        }
        return Loss(learnt + z_part + penalty + further_loss, jnp.sum(row_weights), sums)


def compute_gains(log_probs: jax.Array, batch: Batch, task: Grpo) -> Gains:
    """Return the gain of each token from log p, [B, T], and the fields of the batch."""
    mask, advantages, sampled = batch["loss_mask"], batch["advantages"], batch["log_probs"]
    answers = locate_answers(batch, task.answers_per_row)

    def masked(x):
        return jnp.where(mask > 0, x, 0)

    now = jax.lax.stop_gradient(log_probs)
    # On policy the ratio is 1 in value, and its gradient is that of log p: the answers are of the model that learns.
    log_ratio = masked(log_probs - (now if task.on_policy else sampled))
    if task.ratio == "answer":  # the geometric mean of the ratios of its tokens
        mean = answers.sum(log_ratio) / jnp.maximum(answers.sum(mask), 1)
        log_ratio = masked(answers.spread(mean))
    ratio, max_ratio = jnp.exp(log_ratio), task.max_importance
    clipped = jnp.clip(ratio, 1 - task.clip_low, 1 + task.clip_high)
    if task.clip == "weights":  # every token keeps a gradient; its weight is clipped
        gain = jax.lax.stop_gradient(clipped) * advantages * log_probs
    elif task.clip == "soft":  # at a ratio of 1 the slope is that of the ratio; it falls to 0 on both sides
        steepness = jnp.where(advantages > 0, *GATES)
        gain = jax.nn.sigmoid(steepness * (ratio - 1)) * 4 / steepness * advantages
    else:
        # Where the advantage is negative, min() bounds the ratio from below alone; the largest weight bounds it above.
        bounded = ratio if max_ratio is None else jnp.minimum(ratio, max_ratio)
        gain = jnp.minimum(bounded * advantages, clipped * advantages)
    # The sampler's rounding makes q unlike p. A weight p / q corrects for it, and its bound keeps the variance small.
    if task.on_policy and max_ratio is not None:
        gain = gain * IMPORTANCE[task.importance](masked(now - sampled), max_ratio, answers)
    kl = None
    if task.kl_coefficient:
        # The divergence from the reference in nats (k3 of http://joschu.net/blog/kl-approx.html), which is never
        # negative. With r = p_reference / p_policy, and answers drawn from the policy, the mean of r - 1 is 0. So
        # r - 1 - log r has the mean of -log r, which is the divergence, with less variance; and r - 1 >= log r.
        log_r = masked(batch["reference_log_probs"] - log_probs)
        kl = jnp.exp(log_r) - 1 - log_r
    if kl is not None and task.kl != "advantage":
        # The weight has a gradient too: with k3 alone, that of a token is not the gradient of its divergence.
        gain = gain - task.kl_coefficient * kl * (ratio if task.kl == "weighted" else 1.0)
    # min() takes the clipped branch, which has no gradient, where the ratio has gone further than it may in the
    # direction in which the advantage pulls; in the other direction the gradient brings it back.
    outside = ((ratio > clipped) & (advantages > 0)) | ((ratio < clipped) & (advantages < 0))
    outside = outside & (task.clip != "soft")
    return Gains(masked(gain), masked(ratio), masked(outside.astype(jnp.float32)), jnp.abs(masked(now - sampled)), kl)


class Answers(NamedTuple):
    """Which answer of its row each token belongs to."""

    members: jax.Array  # [B, N, T]: 1 where a token is of answer n, else 0; N = task.answers_per_row

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sums [B, N] of numbers of tokens [B, T] over each answer."""
        return jnp.sum(self.members * x[:, None, :], axis=2)

    def spread(self, x: jax.Array) -> jax.Array:
        """Return a number of each answer, [B, N], at each of its tokens, [B, T]; 0 at padding."""
        return jnp.sum(self.members * x[:, :, None], axis=1)


def locate_answers(batch: Batch, answers_per_row: int) -> Answers:
    """Return the answers of rows: segments 1 to `answers_per_row`."""
    # Compared, and not scattered: the order of the sums is the same on every mesh, and XLA fuses them.
    numbers = 1 + jnp.arange(answers_per_row)[:, None]
    return Answers((batch["segment_ids"][:, None, :] == numbers).astype(jnp.float32))


def _truncate(log_weights: jax.Array, max_weight: float, answers: Answers) -> jax.Array:
    """Return the weights [B, T] of tokens, capped; `log_weights` is 0 where there is no token of an answer."""
    return jnp.minimum(jnp.exp(log_weights), max_weight)


def _mask(log_weights: jax.Array, max_weight: float, answers: Answers) -> jax.Array:
    """Return the weights [B, T] of tokens, 0 where one is larger."""
    weights = jnp.exp(log_weights)
    return jnp.where(weights > max_weight, 0.0, weights)


def _weigh_sequences(log_weights: jax.Array, max_weight: float, answers: Answers) -> jax.Array:
    """Return the weight of each whole answer at all of its tokens, [B, T], capped."""
    return answers.spread(jnp.minimum(jnp.exp(answers.sum(log_weights)), max_weight))


def _mask_sequences(log_weights: jax.Array, max_weight: float, answers: Answers) -> jax.Array:
    """Return the weight of each whole answer at all of its tokens, [B, T], 0 where it is larger."""
    return answers.spread(_mask(answers.sum(log_weights), max_weight, answers))


# Weights p / q of tokens, by the value of task.importance: (log p - log q [B, T], largest weight, answers) -> [B, T].
IMPORTANCE = {
    "truncate": _truncate,
    "mask": _mask,
    "sequence": _weigh_sequences,
    "sequence_mask": _mask_sequences,
}


def weigh_answers(batch: Batch, task: Grpo, max_new_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return the share [B, T] with which each token counts, and the weight [B] of the answers of each row.

    The sum of the weights is the divisor of the step. For answers of 2 and 4 tokens:

        divide_by    share of a token    weights of the answers    each token counts
        tokens       1, 1                2, 4                      1 / 6
        answers      1/2, 1/4            1, 1                      1 / 4, 1 / 8
        constant c   1, 1                c, c                      1 / 2c
    """
    mask = batch["loss_mask"]
    answers = locate_answers(batch, task.answers_per_row)
    num_tokens = answers.sum(mask)  # [B, N]
    num_answers = jnp.sum(num_tokens > 0, axis=1, dtype=jnp.float32)
    if task.divide_by == "answers":
        return answers.spread(1 / jnp.maximum(num_tokens, 1)), num_answers
    if task.divide_by == "constant":
        return jnp.ones_like(mask), num_answers * max_new_tokens
    return jnp.ones_like(mask), jnp.sum(num_tokens, axis=1)
