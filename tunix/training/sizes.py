"""The numbers that follow from config and mesh: batch, tokens, steps."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config, Training
from tunix.config.training import BatchShape
from tunix.data.corpus import Corpus
from tunix.models.flops import flops_per_token
from tunix.training.state import Architecture


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    batch: BatchShape
    total_steps: int | None  # None: only the data will tell
    flops_per_token: float
    num_devices: int

    @property
    def tflop_per_step(self) -> float:
        return self.flops_per_token * self.batch.num_tokens / 1e12


def derive_sizes(cfg: Config, mesh: Mesh, arch: Architecture, corpus: Corpus | None) -> Sizes:
    """`corpus` is None in a dry run."""
    training = cfg.training
    batch = training.batch_shape(mesh.shape)
    return Sizes(
        batch,
        last_step(training, batch.num_sequences, corpus.num_sequences if corpus else None),
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
