"""The numbers that follow from config and mesh: batch, tokens, steps."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config, Training
from tunix.data.corpus import Corpus
from tunix.models.flops import flops_per_token
from tunix.sharding.mesh_shape import data_shards
from tunix.training.state import Architecture


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    num_microbatches: int  # A
    micro_batch: int  # B: sequences over all data shards
    tokens_per_step: int
    total_steps: int | None  # None: only the data will tell
    flops_per_token: float
    num_devices: int

    @property
    def batch_size(self) -> int:
        return self.num_microbatches * self.micro_batch

    @property
    def tflop_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step / 1e12


def derive_sizes(cfg: Config, mesh: Mesh, arch: Architecture, corpus: Corpus | None) -> Sizes:
    """`corpus` is None in a dry run."""
    training = cfg.training
    microbatches = training.accumulation(data_shards(mesh.shape))
    micro_batch = training.sequences_per_shard * data_shards(mesh.shape)
    batch = microbatches * micro_batch
    return Sizes(
        microbatches,
        micro_batch,
        batch * training.seq_len,
        last_step(training, batch, corpus.num_sequences if corpus else None),
        flops_per_token(cfg.model, arch.num_parameters, arch.num_trained, training.seq_len),
        mesh.size,
    )


def last_step(
    training: Training, batch_size: int, num_sequences: int | None, step: int = 0, next_sample: int = 0
) -> int | None:
    """The step at which the first limit is reached, going on from `step` with `batch_size` sequences a step.

    None: only the data will tell, and their `num_sequences` are not known.
    """
    samples = []
    if training.max_tokens is not None:
        samples.append(training.max_tokens // training.seq_len)
    if training.num_epochs is not None and num_sequences is not None:
        samples.append(math.floor(training.num_epochs * num_sequences))
    limits = [max(1, step + (limit - next_sample) // batch_size) for limit in samples]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    return max(step, min(limits)) if limits else None
