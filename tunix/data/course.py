"""Course of a run through its data: which samples each step takes, and which are left out.

training.skip_steps=[4:5], 10 samples a step

step         1       2       3       4       5
samples    0-9   10-19   20-29   50-59   60-69        30-49, which steps 4 and 5 would have taken, are left out
"""

import math
from collections.abc import Mapping, Sequence

from tunix.config import Config
from tunix.config.batch_stages import BatchSchedule
from tunix.config.step_ranges import read_steps
from tunix.config.task import Cycle
from tunix.data.position import Position


class Course:
    """Samples of the steps after a position.

    Samples are read in cycles: one reading may serve several steps. In pretraining each step has a reading of its own.
    A rollout of GRPO that is learnt from in two steps, with 8 prompts:

        step         1       2       3       4
        samples    0-7     0-7    8-15    8-15        Cycle(samples=8, steps=2)
    """

    def __init__(
        self, start: Position, cycle: Cycle, skip_steps: Sequence[str], stages: Sequence[tuple[int, Cycle]] = ()
    ):
        """`stages` are those that end after `start`, each with its last step and its cycle; `cycle` follows them."""
        self.start, self.cycle = start, cycle
        # Every stage has an end, so that the loops below need no case for the last one.
        self.stages: list[tuple[float, Cycle]] = [*stages, (math.inf, cycle)]
        # The steps to leave out. What was left out before `start` is in its position already.
        self.gaps = [steps for steps in map(read_steps, skip_steps) if steps[0] > start.step]

    def taken(self, step: int) -> int:
        """Return how many samples the steps from `start` to `step` read; a reading that has begun counts in full."""
        return self._count(range(self.start.step + 1, step + 1))

    def next_sample(self, step: int) -> int:
        """Return the first sample behind those of the reading that serves `step`."""
        begun = self._first_step(step)
        skipped = sum(self._count(steps) for steps in self.gaps if steps[0] <= begun)
        return self.start.next_sample + self.taken(step) + skipped

    def samples(self, step: int) -> range:
        """Return the samples of the reading that serves `step`."""
        end = self.next_sample(step)
        return range(end - self._stage(step)[1].samples, end)

    def left_out(self, step: int) -> list[list[int]]:
        """Return the samples [first, end) that the run has left out, from its beginning to `step`."""
        ranges = list(self.start.left_out)
        for steps in self.gaps:
            if steps[0] <= self._first_step(step):
                # The samples of a gap lie just before those that its first step takes in their place.
                end = self.samples(steps[0]).start
                ranges.append([end - self._count(steps), end])
        return ranges

    def last_step_within(self, num_samples: int) -> int:
        """Return the last step until which at most so many samples are read after `start`; it ends a reading."""
        step, rest, cycle = self._locate(num_samples)
        return step + rest // cycle.samples * cycle.steps

    def steps_of(self, num_samples: int) -> float:
        """Return the steps, with a fraction, that read so many samples after `start`."""
        step, rest, cycle = self._locate(num_samples)
        return step - self.start.step + rest / cycle.samples * cycle.steps

    def _locate(self, num_samples: int) -> tuple[int, int, Cycle]:
        """Return the last step before the stage in which so many samples end, the samples in that stage, its cycle."""
        step = self.start.step
        for end, cycle in self.stages[:-1]:
            of_stage = self._count(range(step + 1, int(end) + 1))
            if num_samples < of_stage:
                return step, num_samples, cycle
            step, num_samples = int(end), num_samples - of_stage
        return step, num_samples, self.cycle

    def _count(self, steps: range) -> int:
        """Return how many samples the readings of these steps have; a reading begins with the first of the steps."""
        count, first = 0, steps.start
        for end, cycle in self.stages:
            last = min(steps.stop - 1, end)
            if last >= first:
                count += math.ceil((last - first + 1) / cycle.steps) * cycle.samples
                first = int(last) + 1
        return count

    def _first_step(self, step: int) -> int:
        """Return the first step of the reading that serves `step`."""
        before, cycle = self._stage(step)
        return before + (step - before - 1) // cycle.steps * cycle.steps + 1

    def _stage(self, step: int) -> tuple[int, Cycle]:
        """Return the last step before the stage of `step`, and its cycle."""
        before = self.start.step
        for end, cycle in self.stages[:-1]:
            if step <= end:
                return before, cycle
            before = int(end)
        return before, self.cycle


def make_course(cfg: Config, schedule: BatchSchedule, start: Position) -> Course:
    """Return the course of a run that goes on from `start`, with the batches of `schedule_after` it."""
    *before, rest = schedule.periods
    stages = []
    for period in before:
        assert period.last_step is not None
        stages.append((period.last_step, cfg.task.cycle(period.num_samples)))
    return Course(start, cfg.task.cycle(rest.num_samples), cfg.training.skip_steps, stages)


def schedule_after(start: Position, cfg: Config, mesh_sizes: Mapping[str, int]) -> BatchSchedule:
    """Return the batch of each step of a run that goes on from `start`."""
    return cfg.training.batch_schedule(mesh_sizes, start.step, start.num_samples * cfg.training.seq_len)
