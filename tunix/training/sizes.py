"""The numbers that follow from config and mesh: batch, tokens, steps."""

import math
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config, Training
from tunix.config.task import Cycle
from tunix.config.training import BatchShape
from tunix.models.flops import flops_per_token
from tunix.training.state import Architecture


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    batch: BatchShape
    cycle: Cycle  # of reading the data
    total_steps: int | None  # None: only the data will tell
    flops_per_token: float
    num_devices: int

    @property
    def tflop_per_step(self) -> float:
        return self.flops_per_token * self.batch.num_tokens / 1e12


def derive_sizes(cfg: Config, mesh: Mesh, arch: Architecture, num_samples: int | None) -> Sizes:
    """`num_samples`, those to train on, is None in a dry run."""
    training = cfg.training
    batch = training.batch_shape(mesh.shape)
    cycle = cfg.task.cycle(batch.num_sequences)
    return Sizes(
        batch,
        cycle,
        last_step(training, cycle, batch.num_tokens, num_samples),
        flops_per_token(cfg.model, arch.num_parameters, arch.num_trained, training.seq_len),
        mesh.size,
    )


def last_step(
    training: Training,
    cycle: Cycle,
    tokens_per_step: int,
    num_samples: int | None,
    step: int = 0,
    next_sample: int = 0,
) -> int | None:
    """The step at which the first limit is reached, going on from `step` with `cycle`; it ends a cycle.

    None: only the data will tell, and their `num_samples` are not known.
    """
    samples = []
    if training.max_tokens is not None:
        samples.append(training.max_tokens * cycle.samples // (tokens_per_step * cycle.steps))
    if training.num_epochs is not None and num_samples is not None:
        samples.append(math.floor(training.num_epochs * num_samples))
    limits = [max(1, step + (limit - next_sample) // cycle.samples * cycle.steps) for limit in samples]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    return max(step, min(limits)) if limits else None
