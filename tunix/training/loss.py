"""Losses: what is minimised, what it is divided by, and sums to report; and the loss of a held-out set.

A loss returns sums, not means: microbatches are added up.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.base.dotted_path import blame_user, import_object, is_dotted, suggest_colon
from tunix.base.errors import UserError, did_you_mean
from tunix.config import Config
from tunix.config.task import Distilled, Grpo
from tunix.data.batches import FIELDS, Batch, Field, add_fields, image_fields, read_held_out
from tunix.data.dataset import Corpus
from tunix.data.teacher_logits import logits_fields
from tunix.data.tokenizer import bytes_by_token
from tunix.models.layers import merge_runs
from tunix.models.transformer import Transformer
from tunix.sharding.arrays import local_rows, to_global
from tunix.training.dpo import PAIR_FIELDS, preference_loss
from tunix.training.embeddings import embed_fields, embedding_loss, make_gradients
from tunix.training.grpo import POLICY_FIELDS, policy_loss
from tunix.training.kto import LABELLED_FIELDS, labelled_loss, make_kl_estimate
from tunix.training.logprobs import (
    HEAD_SCORES,
    ROUTING,
    Loss,
    LossFn,
    Mean,
    Scores,
    Sums,
    add_block_sums,
    add_up,
    compute_hidden,
    compute_means,
    compute_token_log_probs,
    sum_further_tokens,
    sum_over_hidden,
)
from tunix.training.scores import EXAMPLE_FIELDS, classification_loss, reward_loss
from tunix.training.state import Architecture
from tunix.training.teacher import AnyTeacher

__all__ = [
    "LOSSES", "HeldOut", "Loss", "LossFn", "LossKind", "Mean", "add_block_sums", "compute_token_log_probs",
    "find_loss_kind", "make_loss", "make_totals", "next_token_loss",
]  # fmt: skip


class LossKind(NamedTuple):
    """A row of the table of losses."""

    # Takes from the config what this loss needs; a loss that may have a teacher takes a `Teacher` too.
    make: Callable[..., LossFn]
    evaluate: Callable[[Sums, jax.Array, int], dict[str, float]]  # (sums, weight, bytes of the text) of a held-out set
    fields: Mapping[str, Field] = FIELDS  # of the batches that it takes
    # (config, model of parameters) -> function of (parameters, batch [A, B, T]) that fills fields which depend on
    # the model in training and on all rows of a step; None where there are none.
    complete: Callable[[Config, Callable[[Any], Transformer]], Callable[[Any, Batch], Batch]] | None = None
    measures_text: bool = True  # False: it needs no token of a text as a target
    sized_fields: Callable[[Config], Mapping[str, Field]] | None = None  # beside `fields`: those of the config's sizes
    logits_again: bool = False  # in the backward pass, because the loss of a token depends on others (`score_targets`)


def next_token_loss(
    model: Transformer,
    batch: Batch,
    seed: jax.Array | None = None,
    *,
    chunk_size: int | str,
    z_loss: float,
    teacher: AnyTeacher | None = None,
    teacher_weight: float = 0.0,
    weighted: bool = False,
) -> Loss:
    """Compute the next-token cross entropy in nats over tokens [B, T] where `loss_mask` is not 0.

    Minimised is nll + z_loss * log(Z)^2 (PaLM, arXiv:2204.02311); `loss` is the nll alone. With a teacher, the nll
    counts with 1 - teacher_weight, and the divergence from the teacher (`teacher_kl`) with teacher_weight. `weighted`
    minimises each nll times the token's probability, without a gradient of this weight (DFT, arXiv:2508.05629).
    """
    output = None if teacher is None else teacher.read(batch)

    def token_loss(scores: Scores, fields: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        mask = fields["loss_mask"]
        nll, squares = scores.nll * mask, z_loss * (scores.log_z**2 * mask)
        sums = {"loss": nll, "z_loss": squares}
        if scores.divergence is None:
            weights = jax.lax.stop_gradient(jnp.exp(-scores.nll)) if weighted else 1.0
            return weights * nll + squares, sums
        divergence = scores.divergence * mask
        learnt = (1 - teacher_weight) * nll + teacher_weight * divergence
        return learnt + squares, sums | {"teacher_kl": divergence}

    vocab_weights = model.vocab_weights()
    hidden, blocks = compute_hidden(model, vocab_weights, batch, seed)
    objective, numbers = sum_over_hidden(
        model, vocab_weights, hidden, batch, token_loss, chunk_size=chunk_size, teacher=output
    )
    sums: Sums = dict(numbers)
    if model.cfg.mtp is not None:
        further, divisor, more = sum_further_tokens(model, vocab_weights, hidden, batch, chunk_size)
        objective, blocks = objective + model.cfg.mtp.loss_weight * further, merge_runs(blocks, more)
        sums["mtp_loss"] = Mean(jax.lax.stop_gradient(further), divisor)
    # The blocks' penalties are means over tokens of a sequence, and count by the tokens that it has in the loss.
    added, reported = add_block_sums(blocks, jnp.sum(batch["loss_mask"], 1))
    return Loss(objective + added, jnp.sum(batch["loss_mask"]), sums | reported)


def _compute_text_metrics(sums: Sums, weight: jax.Array, num_bytes: int) -> dict[str, float]:
    """Return the mean loss (nats per token), perplexity and bits per byte of a text. Bits per byte do not depend on the
    tokenizer."""
    nll, num_tokens = float(sums["loss"]), float(weight)
    loss = nll / num_tokens
    further: Sums = {name: sums[name] for name in ("teacher_kl", "mtp_loss") if name in sums}
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / num_bytes,
        **compute_means("eval_tokens", further, weight, num_bytes),
    }


def _make_next_token(cfg: Config, teacher: AnyTeacher | None = None, weighted: bool = False) -> LossFn:
    keys = cfg.training.loss_chunk_size, cfg.training.z_loss
    loss = partial(next_token_loss, chunk_size=keys[0], z_loss=keys[1], weighted=weighted)
    if teacher is None:
        return loss
    assert isinstance(cfg.task, Distilled)
    return partial(loss, teacher=teacher, teacher_weight=cfg.task.teacher_weight)


def _make_policy(cfg: Config, teacher: AnyTeacher | None = None) -> LossFn:
    assert isinstance(cfg.task, Grpo)
    return partial(
        policy_loss,
        task=cfg.task,
        sampling=cfg.sampling,
        chunk_size=cfg.training.loss_chunk_size,
        z_loss=cfg.training.z_loss,
        teacher=teacher,
    )


def _with_task(loss: Callable[..., Loss]) -> Callable[[Config], LossFn]:
    return lambda cfg: partial(loss, task=cfg.task)


def _in_chunks(loss: Callable[..., Loss]) -> Callable[[Config], LossFn]:
    return lambda cfg: partial(loss, task=cfg.task, chunk_size=cfg.training.loss_chunk_size)


_pair_metrics = partial(compute_means, "eval_pairs")
_document_metrics = partial(compute_means, "eval_documents")
_answer_metrics = partial(compute_means, "eval_answers")

LOSSES = {
    "next_token": LossKind(_make_next_token, _compute_text_metrics),  # of sft too: its loss_mask keeps only the answers
    "dft": LossKind(partial(_make_next_token, weighted=True), _compute_text_metrics),
    "dpo": LossKind(_in_chunks(preference_loss), _pair_metrics, PAIR_FIELDS, logits_again=True),
    "kto": LossKind(_in_chunks(labelled_loss), _answer_metrics, LABELLED_FIELDS, make_kl_estimate, logits_again=True),
    "grpo": LossKind(_make_policy, _compute_text_metrics, POLICY_FIELDS, logits_again=True),
    "reward": LossKind(_with_task(reward_loss), _pair_metrics, measures_text=False),
    "classify": LossKind(_with_task(classification_loss), _document_metrics, EXAMPLE_FIELDS, measures_text=False),
    "embed": LossKind(
        _with_task(embedding_loss),
        _document_metrics,
        EXAMPLE_FIELDS,
        make_gradients,
        measures_text=False,
        sized_fields=embed_fields,
    ),
}


def find_loss_kind(cfg: Config) -> LossKind:
    """Return the row of the table that `task.loss` or else the task names, or the task's with the user's own loss.

    Its fields are those of the loss and of the run's images.
    """
    name = cfg.task.loss or cfg.task.default_loss  # a task has a loss of its own, which task.loss replaces
    if is_dotted(name):
        kind = LOSSES[cfg.task.default_loss]._replace(make=lambda cfg: import_object(name))
    elif name in LOSSES:
        kind = LOSSES[name]
    else:
        hint = suggest_colon(name) or did_you_mean(name, list(LOSSES))
        raise UserError(f"task.loss={name}: expected one of {', '.join(LOSSES)}, or package.module:name{hint}")
    sized = {} if kind.sized_fields is None else kind.sized_fields(cfg)
    of_teacher = {} if cfg.task.offline_top_k is None else logits_fields(cfg.task.offline_top_k)
    return kind._replace(fields={**kind.fields, **sized, **image_fields(cfg), **of_teacher})


def make_completion(cfg: Config, arch: Architecture) -> Callable[[Any, Batch], Batch] | None:
    """Return the function of (parameters, batch [A, B, T]) that fills fields of the loss which depend on the model."""
    complete = find_loss_kind(cfg).complete
    return None if complete is None else complete(cfg, arch.module)


def make_loss(cfg: Config, teacher: AnyTeacher | None) -> LossFn:
    """Return the loss of a config; a teacher is given where the loss takes its distributions."""
    kind = find_loss_kind(cfg)
    return kind.make(cfg) if teacher is None or not teacher.in_loss else kind.make(cfg, teacher)


# Numbers of a line of metrics.jsonl that are no sums of a loss.
RESERVED = {
    "step", "split", "tokens", "learning_rate", "grad_norm", "layer_norms", "skipped", "spikes", "spikes_total",
    "loss_deviations", "grad_norm_deviations", "data_wait_s", "tokens_per_s", "tokens_per_s_per_device", "step_time_s",
    "slowest_process", "slowest_host_s", "slowest_data_wait_s", "tflops_per_device", "mfu", "peak_memory_gib",
}  # fmt: skip


def try_out_loss(cfg: Config, loss_fn: LossFn, model: Callable[[Any], Transformer], params: Any, batch: Batch) -> None:
    """Trace a user's own loss on shapes: a microbatch [B, T] and parameters, of which `model` makes the model.

    Raises:
        UserError: the loss fails, or does not return a `Loss` of float scalars with `loss` among its sums.
    """
    if cfg.task.loss is None or not is_dotted(cfg.task.loss):
        return
    seed = jax.ShapeDtypeStruct((), "int32")

    def compute(params: Any, batch: Batch, seed: jax.Array) -> Loss:
        made = model(params)
        made.reports_scores = cfg.optimizer.score_limit is not None
        return loss_fn(made, batch, seed)

    with blame_user("task.loss", cfg.task.loss):
        loss = jax.eval_shape(compute, params, batch, seed)
        if not isinstance(loss, Loss) or "loss" not in loss.sums:
            raise TypeError("it must return tunix.training.loss.Loss(objective, weight, sums) with sums['loss']")
        if cfg.optimizer.score_limit is not None and HEAD_SCORES not in loss.sums:
            raise TypeError(
                "optimizer.qk_clip needs the scores of attention: add what add_block_sums reports to its sums"
            )
        if taken := sorted(RESERVED & loss.sums.keys()):
            raise ValueError(f"its sums have {taken[0]}, which each line of metrics.jsonl has already; rename it")
        local_sums = {name: value for name, value in loss.sums.items() if name not in (ROUTING, HEAD_SCORES)}
        for name, value in {"objective": loss.objective, "weight": loss.weight, **local_sums}.items():
            for leaf in jax.tree.leaves(value):
                if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.floating):
                    raise TypeError(f"its {name} is {leaf.dtype}{list(leaf.shape)}, not a float scalar")


# (parameters, fields [N, B, T] of a held-out set, what all of its batches share) -> sums over the set, and its weight
Totals = Callable[[Any, Batch, dict[str, Any]], tuple[Sums, Any]]


def make_totals(cfg: Config, arch: Architecture, teacher: AnyTeacher | None = None) -> Totals:
    """Return the program that adds up the loss over a held-out set; sets of one size share what is compiled."""
    loss_fn, complete = make_loss(cfg, teacher), make_completion(cfg, arch)

    @jax.jit
    def totals(params, batches, shared):
        if complete is not None:
            batches = complete(params, batches)

        def report(_, batch):
            loss = loss_fn(arch.module(params), batch | shared, None)
            return None, (loss.sums, loss.weight)

        # Sums over all batches, divided once at the end: a mean of means is wrong where masks differ.
        return add_up(jax.lax.scan(report, None, batches)[1])

    return totals


class HeldOut:
    """A held-out set on the devices, of the corpus or one of its `sets` by name, and the loss over it.

    The loss is the same number on every mesh.
    """

    def __init__(
        self,
        cfg: Config,
        corpus: Corpus,
        totals: Totals,
        mesh: Mesh,
        num_rows: int,
        name: str | None = None,
        shared: dict[str, Any] | None = None,
    ):
        """`num_rows` are the sequences of a microbatch; `name` is that of a set of evaluation.sets.

        `shared` is what all batches share: the parameters of a teacher.
        """
        sequences = corpus.held_out if name is None else corpus.sets[name]
        arguments = sequences, cfg.evaluation.num_sequences, num_rows
        # Each process reads the whole set once, so that all of them know the same number of bytes.
        everything = read_held_out(*arguments, list(range(num_rows)))
        # Bits per byte count the bytes of the predicted text alone, as the loss does: masked targets have none.
        num_bytes = bytes_by_token(corpus.tokenizer)[everything["targets"]]
        self.num_bytes = int((num_bytes * everything["loss_mask"]).sum())
        self.num_tokens = float(everything["loss_mask"].sum())
        self.kind = find_loss_kind(cfg)
        self.is_own = is_dotted(cfg.task.loss or "")
        if self.num_bytes == 0 and self.kind.measures_text:
            which = "the held-out sequences" if name is None else f"the sequences of evaluation.sets.{name}"
            raise UserError(
                f"{which} have no text to be predicted: their answers are empty, or none begins within "
                f"training.seq_len={cfg.training.seq_len} tokens; raise it, hold out more, or set "
                "data.held_out_fraction=0"
            )
        # The whole set rests on the devices: an evaluation is one program, which waits for no data.
        rows = local_rows(mesh, num_rows)
        # Images are decoded once where one process has all rows.
        local = everything if len(rows) == num_rows else read_held_out(*arguments, rows)
        self.batches = to_global(add_fields(local, self.kind.fields), mesh)
        self.totals, self.shared = totals, shared or {}

    def evaluate(self, params: dict) -> dict[str, float]:
        """Return the numbers of the held-out set by their names in metrics.jsonl, `loss` among them."""
        sums, weight = self.totals(params, self.batches, self.shared)
        if self.is_own and self.kind.measures_text and not math.isclose(weight, self.num_tokens, rel_tol=0.01):
            # A mean over sequences, for example: its sum is no number of nats of the text, and has no bits per byte.
            return {"loss": float(sums["loss"] / weight)}
        return self.kind.evaluate(sums, weight, self.num_bytes)

    def cost(self, record: dict[str, float]) -> float:
        """Return the number that is lowest for the best model."""
        return record["loss"]

    def describe(self, record: dict[str, float]) -> str:
        """Return an evaluation in a few words for the log."""
        words = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}
        scores = (f", {record[name]:.4f} {text}" for name, text in words.items() if name in record)
        return f"loss {record['loss']:.4f}{''.join(scores)}"
