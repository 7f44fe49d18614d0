"""Course of a run through its data: which samples each step takes, and which are left out.

training.skip_steps=[4:5], 10 samples a step

step         1       2       3       4       5
samples    0-9   10-19   20-29   50-59   60-69        30-49, which steps 4 and 5 would have taken, are left out
"""

import math
from collections.abc import Sequence

from tunix.config.task import Cycle
from tunix.config.training import read_steps
from tunix.data.position import Position


class Course:
    """Samples of the steps after a position. They are read in cycles; a reading may serve several steps (rollouts)."""

    def __init__(self, start: Position, cycle: Cycle, skip_steps: Sequence[str]):
        self.start, self.cycle = start, cycle
        # (first step, readings to leave out before it). What was left out before `start` is in its position already.
        ranges = [read_steps(text) for text in skip_steps]
        self.gaps = [(steps[0], math.ceil(len(steps) / cycle.steps)) for steps in ranges if steps[0] > start.step]

    def next_sample(self, step: int) -> int:
        """Return the first sample behind those of `step`; within a reading, behind all of it."""
        readings = math.ceil((step - self.start.step) / self.cycle.steps)
        skipped = sum(count for first, count in self.gaps if first <= self._first_step(readings))
        return self.start.next_sample + (readings + skipped) * self.cycle.samples

    def samples(self, step: int) -> range:
        """Return the samples of the reading that serves `step`."""
        end = self.next_sample(step)
        return range(end - self.cycle.samples, end)

    def left_out(self, step: int) -> list[list[int]]:
        """Return the samples [first, end) that the run has left out, from its beginning to `step`."""
        readings = math.ceil((step - self.start.step) / self.cycle.steps)
        found = list(self.start.left_out)
        for first, count in self.gaps:
            if first <= self._first_step(readings):
                end = self.samples(first).start
                found.append([end - count * self.cycle.samples, end])
        return found

    def _first_step(self, readings: int) -> int:
        """Return the first step that the newest of so many readings serves."""
        return self.start.step + (readings - 1) * self.cycle.steps + 1
