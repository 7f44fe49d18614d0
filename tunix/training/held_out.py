"""Held-out loss on a fixed set of sequences: the same number on every mesh."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tunix.base.errors import UserError
from tunix.config import Config
from tunix.data.batches import held_out_batches
from tunix.data.corpus import Corpus
from tunix.sharding.arrays import local_rows, to_global
from tunix.sharding.mesh_shape import data_shards
from tunix.tokenizer.vocabulary import bytes_by_token
from tunix.training.state import Architecture
from tunix.training.step import LossFn


class HeldOut:
    """The held-out set on the devices, and what the model makes of it."""

    def __init__(self, cfg: Config, corpus: Corpus, arch: Architecture, loss_fn: LossFn, mesh: Mesh):
        batch_size = cfg.training.sequences_per_shard * data_shards(mesh.shape)
        arguments = corpus.held_out, cfg.evaluation.num_sequences, batch_size
        everything = held_out_batches(*arguments, list(range(batch_size)))
        num_bytes = bytes_by_token(corpus.tokenizer)[everything["targets"]]
        self.num_bytes = int((num_bytes * everything["loss_mask"]).sum())
        if self.num_bytes == 0:
            raise UserError(
                "the held-out sequences have no text to be predicted: their answers are empty, or none begins within "
                f"training.seq_len={cfg.training.seq_len} tokens; raise it, hold out more, or set "
                "data.held_out_fraction=0"
            )
        self.batches = to_global(held_out_batches(*arguments, local_rows(mesh, batch_size)), mesh)

        @jax.jit
        def sums(params, batches):
            def add(total, batch):
                return jax.tree.map(jnp.add, total, loss_fn(arch.module(params), batch)[1]), None

            shapes = jax.eval_shape(lambda: loss_fn(arch.module(params), jax.tree.map(lambda x: x[0], batches))[1])
            zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
            return jax.lax.scan(add, zeros, batches)[0]

        self.sums = sums

    def evaluate(self, params: dict) -> dict[str, float]:
        """`loss` (nats per token), `perplexity`, `bits_per_byte` and `eval_tokens` of the held-out set."""
        sums = {name: float(value) for name, value in self.sums(params, self.batches).items()}
        loss = sums["nll"] / sums["tokens"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": sums["nll"] / math.log(2) / self.num_bytes,
            "eval_tokens": int(sums["tokens"]),
        }
