"""Losses: what is minimised, what it is divided by, and sums to report. Sums, not means: microbatches are added up."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.base.dotted import blame_user, import_object, is_dotted
from tunix.base.errors import UserError, did_you_mean
from tunix.config import Config
from tunix.data.batch import FIELDS, Batch, Field
from tunix.models.transformer import Transformer

Sums = dict[str, jax.Array]


class Loss(NamedTuple):
    """Result of a loss for one microbatch: float32 scalars, each a sum over tokens or sequences.

    The step adds the microbatches up and divides once, because a mean of means is wrong where masks differ.
    """

    objective: jax.Array  # what is minimised: gradients are those of objective / weight
    weight: jax.Array  # what objective and sums are divided by: a count of tokens, of sequences, ...
    sums: Sums  # reported as sum / weight under these names in metrics.jsonl; `loss` is one of them


# (model, batch with fields [B, T], seed) -> Loss. The seed is an int32 scalar that dropout draws from; None outside of
# training.
LossFn = Callable[[Transformer, Batch, jax.Array | None], Loss]


class LossKind(NamedTuple):
    """A row of the table of losses."""

    make: Callable[[Config], LossFn]  # takes from the config what this loss needs
    evaluate: Callable[[Sums, jax.Array, int], dict[str, float]]  # (sums, weight, bytes of the text) of a held-out set
    fields: Mapping[str, Field] = FIELDS  # of the batches that it takes


def token_log_probs(
    model: Transformer, batch: Batch, seed: jax.Array | None, *, chunk_size: int
) -> tuple[jax.Array, Sums]:
    """Log-probability in nats, [B, T] float32, of each target of a batch under the model, and the sums of its blocks.

    A loss adds the sums of the blocks (a router's loss is one) to its objective, and reports them.
    """
    nll, _, block_sums = _score_chunks(model, batch, seed, chunk_size)
    return _joined(-nll), block_sums


def _score_chunks(
    model: Transformer, batch: Batch, seed: jax.Array | None, chunk_size: int
) -> tuple[jax.Array, jax.Array, Sums]:
    """Negative log-probabilities of the targets and log(Z)^2, each [T / chunk_size, B, chunk_size] float32.

    Z is the sum of exp(logits). The sign is that of the loss: turned here and back there, the GPU's program of Gemma 3
    1B needs 0.1 GiB more.

    The sums of the model's blocks come with them. Logits exist for `chunk_size` positions of each sequence at one time
    and are computed again in the backward pass: [B, T, V] never exists.
    """
    tables = model.tables()
    hidden, block_sums = model.hidden(tables, batch["tokens"], batch["positions"], batch["segment_ids"], seed)

    @jax.checkpoint
    def one_chunk(_, chunk):
        hidden, targets = chunk
        logits = model.logits(tables, hidden)
        log_z = jax.nn.logsumexp(logits, -1)
        ids = reshard(jnp.arange(logits.shape[-1]), model.layout.activation("V"))
        # A comparison in place of a lookup: it fuses, and needs no communication where the vocabulary is split.
        target_logits = jnp.sum(jnp.where(ids == targets[..., None], logits, 0), -1)
        return None, (log_z - target_logits, log_z**2)

    with jax.named_scope("loss"):
        xs = (_chunks(hidden, chunk_size), _chunks(batch["targets"], chunk_size))
        nll, log_z_squares = jax.lax.scan(one_chunk, None, xs)[1]
        return nll, log_z_squares, block_sums


def next_token_loss(
    model: Transformer, batch: Batch, seed: jax.Array | None = None, *, chunk_size: int, z_loss: float
) -> Loss:
    """Next-token cross entropy in nats over tokens where `loss_mask` is not 0.

    Minimised is nll + z_loss * log(Z)^2 (PaLM, arXiv:2204.02311); `loss` is the nll alone.
    """
    token_nll, log_z_squares, block_sums = _score_chunks(model, batch, seed, chunk_size)
    with jax.named_scope("loss"):
        mask = _chunks(batch["loss_mask"], chunk_size)
        nll, squares = jnp.sum(token_nll * mask), jnp.sum(log_z_squares * mask)
        objective = nll + z_loss * squares + sum(block_sums.values())
        return Loss(objective, jnp.sum(mask), {"loss": nll, "z_loss": z_loss * squares, **block_sums})


def _chunks(x: jax.Array, chunk_size: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk_size, B, chunk_size, ...]"""
    length = x.shape[1]
    num_chunks = max(1, length // chunk_size)
    if num_chunks == 1:  # where B is 1 too, a reshape would not know which of the dimensions the mesh splits
        return x[None]
    return x.reshape(x.shape[0], num_chunks, length // num_chunks, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """[T / chunk_size, B, chunk_size] -> [B, T], the inverse of `_chunks`."""
    if len(x) == 1:
        return x[0]
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def _text_quality(sums: Sums, weight: jax.Array, num_bytes: int) -> dict[str, float]:
    """Mean loss (nats per token), perplexity, and bits per byte of text, which do not depend on the tokenizer."""
    nll, num_tokens = float(sums["loss"]), float(weight)
    loss = nll / num_tokens
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / num_bytes,
        "eval_tokens": int(num_tokens),
    }


def _make_next_token(cfg: Config) -> LossFn:
    return partial(next_token_loss, chunk_size=cfg.training.loss_chunk_size, z_loss=cfg.training.z_loss)


LOSSES = {
    "next_token": LossKind(_make_next_token, _text_quality),  # of sft too: its loss_mask keeps only the answers
}


def loss_kind(cfg: Config) -> LossKind:
    """Return the row of the table that `task.loss` or else the task names, or a row made of the user's own loss."""
    name = cfg.task.loss or cfg.task.default_loss
    if is_dotted(name):
        return LossKind(lambda cfg: import_object(name), _text_quality)
    if name not in LOSSES:
        hint = did_you_mean(name, list(LOSSES))
        raise UserError(f"task.loss={name}: expected one of {', '.join(LOSSES)}, or package.module:name{hint}")
    return LOSSES[name]


def try_out_loss(cfg: Config, loss_fn: LossFn, model: Callable[[Any], Transformer], params: Any, batch: Batch) -> None:
    """Trace a user's own loss on shapes: a microbatch [B, T] and parameters, of which `model` makes the model.

    Raises:
        UserError: the loss fails, or does not return a `Loss` of float scalars with `loss` among its sums.
    """
    if cfg.task.loss is None or not is_dotted(cfg.task.loss):
        return
    seed = jax.ShapeDtypeStruct((), "int32")
    with blame_user("task.loss", cfg.task.loss):
        loss = jax.eval_shape(lambda params, batch, seed: loss_fn(model(params), batch, seed), params, batch, seed)
        if not isinstance(loss, Loss) or "loss" not in loss.sums:
            raise TypeError("it must return tunix.training.losses.Loss(objective, weight, sums) with sums['loss']")
        for name, value in {"objective": loss.objective, "weight": loss.weight, **loss.sums}.items():
            if value.shape or not jnp.issubdtype(value.dtype, jnp.floating):
                raise TypeError(f"its {name} is {value.dtype}{list(value.shape)}, not a float scalar")
