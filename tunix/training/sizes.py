"""The numbers that follow from config and mesh: batch, tokens, steps."""

import math
from bisect import bisect_right
from dataclasses import dataclass

from jax.sharding import Mesh

from tunix.config import Config, Training
from tunix.config.batch_stages import BatchSchedule, BatchShape
from tunix.data.course import Course, make_course, schedule_after
from tunix.data.position import BEGINNING, Position
from tunix.models.flops import flops_per_token
from tunix.training.state import Architecture


@dataclass(frozen=True)
class Sizes:
    """The numbers that follow from config and mesh."""

    schedule: BatchSchedule
    course: Course  # through the data
    total_steps: int | None  # None: only the data will tell
    flops_by_length: dict[int, float]  # FLOPs of a token, keyed by the length of its sequence
    num_devices: int

    @property
    def batch(self) -> BatchShape:
        """The batch of the run, which follows all stages."""
        return self.schedule.periods[-1].shape

    @property
    def flops_per_token(self) -> float:
        return self.flops_by_length[self.batch.seq_len]

    @property
    def tflop_per_step(self) -> float:
        return self.flops_per_token * self.batch.num_tokens / 1e12


def derive_sizes(
    cfg: Config, mesh: Mesh, arch: Architecture, num_samples: int | None, start: Position = BEGINNING
) -> Sizes:
    """Derive the sizes of a run that goes on from `start`. `num_samples`, those to train on, is None in a dry run."""
    training = cfg.training
    schedule = schedule_after(start, cfg, mesh.shape)
    course = make_course(cfg, schedule, start)
    lengths = {period.shape.seq_len for period in schedule.periods}
    return Sizes(
        schedule,
        course,
        last_step(training, course, schedule.periods[-1].shape.num_tokens, num_samples),
        {length: flops_per_token(cfg.model, arch.num_active, arch.num_active_trained, length) for length in lengths},
        mesh.size,
    )


def last_step(training: Training, course: Course, tokens_per_step: int, num_samples: int | None) -> int | None:
    """Return the step at which the first limit is reached on a course; it ends a cycle.

    `tokens_per_step` are those behind all stages. None: only the data will tell, and their `num_samples` are not known.
    """
    limits, start, cycle = [], course.start, course.cycle
    if training.max_tokens is not None:
        # A cycle of `cycle.samples` samples gives `cycle.steps` steps their tokens: max_tokens as a number of samples.
        samples = training.max_tokens * cycle.samples // (tokens_per_step * cycle.steps)
        limits.append(course.last_step_within(samples - start.num_samples))
    if training.num_epochs is not None and num_samples is not None:
        # Samples that are left out belong to their epoch: they bring its end nearer.
        end = math.floor(training.num_epochs * num_samples)
        most = course.last_step_within(max(0, end - start.next_sample))
        # `next_sample` grows with the step, so the last step that stays within the end is found by bisection.
        steps = range(start.step, most + 1, cycle.steps)
        limits.append(steps[bisect_right(steps, end, key=course.next_sample) - 1])
    limits = [max(1, limit) for limit in limits]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    return max(start.step, min(limits)) if limits else None
