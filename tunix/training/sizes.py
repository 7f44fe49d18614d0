"""The numbers that follow from config and mesh: batch, tokens, steps."""

import math
from bisect import bisect_right
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config, Training
from tunix.config.task import Cycle
from tunix.config.training import BatchShape
from tunix.data.course import Course
from tunix.data.position import Position
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
        last_step(training, cycle, batch.num_tokens, num_samples, Position(0, 0, "", "")),
        flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, training.seq_len),
        mesh.size,
    )


def last_step(
    training: Training,
    cycle: Cycle,
    tokens_per_step: int,
    num_samples: int | None,
    start: Position,
) -> int | None:
    """The step at which the first limit is reached, going on from `start` with `cycle`; it ends a cycle.

    None: only the data will tell, and their `num_samples` are not known.
    """
    limits = []
    if training.max_tokens is not None:
        samples = training.max_tokens * cycle.samples // (tokens_per_step * cycle.steps)
        limits.append(start.step + (samples - start.num_samples) // cycle.samples * cycle.steps)
    if training.num_epochs is not None and num_samples is not None:
        # Samples that are left out belong to their epoch: they bring its end nearer.
        end, course = math.floor(training.num_epochs * num_samples), Course(start, cycle, training.skip_steps)
        most = max(0, (end - start.next_sample) // cycle.samples)
        steps = range(start.step, start.step + most * cycle.steps + 1, cycle.steps)
        limits.append(steps[bisect_right(steps, end, key=course.next_sample) - 1])
    limits = [max(1, limit) for limit in limits]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    return max(start.step, min(limits)) if limits else None
