"""Losses: sums over tokens and counts of them, never means, so that parts of a batch can be added up."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import reshard

from tunix.config import Config
from tunix.models.transformer import Transformer

Sums = dict[str, jax.Array]


def lm_loss(
    model: Transformer, batch: dict[str, jax.Array], *, chunk_size: int, z_loss: float
) -> tuple[jax.Array, Sums]:
    """Next-token cross entropy (nats) over tokens where `loss_mask` is not 0; batch leaves are [B, T].

    Returns the sum to be minimised, nll + z_loss * log(Z)^2 (PaLM, arXiv:2204.02311), and `nll`, `z_loss`, `tokens`
    as float32 sums. Logits exist for `chunk_size` positions of each sequence at one time and are computed again
    in the backward pass: [B, T, V] never does.
    """
    tables = model.tables()
    hidden, block_sums = model.hidden(
        tables, batch["tokens"], batch["positions"], batch["segment_ids"], batch.get("noise")
    )
    length = hidden.shape[1]
    num_chunks = max(1, length // chunk_size)

    def chunks(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [T / chunk, B, chunk, ...]
        if num_chunks == 1:  # where B is 1 too, a reshape would not know which of them the mesh splits
            return x[None]
        return x.reshape(x.shape[0], num_chunks, length // num_chunks, *x.shape[2:]).swapaxes(0, 1)

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
        xs = (chunks(hidden), chunks(batch["targets"]))
        _, per_token = jax.lax.scan(one_chunk, None, xs)  # [T / chunk, B, chunk]
        mask = chunks(batch["loss_mask"])
        nll, squares = (jnp.sum(values * mask) for values in per_token)
    minimised = nll + z_loss * squares + sum(block_sums.values())
    return minimised, {"nll": nll, "z_loss": z_loss * squares, "tokens": jnp.sum(mask), **block_sums}


LOSSES = {"pretrain": lm_loss, "sft": lm_loss}  # for sft, loss_mask keeps only the answers


def make_loss(cfg: Config) -> Callable[..., tuple[jax.Array, Sums]]:
    """(model, batch) -> sum to be minimised, sums: the loss of the config's task."""
    return partial(LOSSES[cfg.task.name], chunk_size=cfg.training.loss_chunk_size, z_loss=cfg.training.z_loss)
