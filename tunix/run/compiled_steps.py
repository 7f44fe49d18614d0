"""The compiled step of each shape of the batch of a run."""

import logging
from typing import Any

from tunix.config.batch_stages import BatchSchedule, BatchShape, Spans
from tunix.run.compiler import Compiler
from tunix.training.program import Program

log = logging.getLogger(__name__)


class CompiledSteps:
    """The compiled step of each shape of the batch, made when a run comes to the first step that needs it."""

    def __init__(self, programs: dict[BatchShape, Program], schedule: BatchSchedule, spans: Spans, compiler: Compiler):
        """`schedule` is that of the steps from the run's start on, `spans` are those of the whole run."""
        self.programs, self.schedule, self.spans, self.compiler = programs, schedule, spans, compiler
        # The first steps of all periods but the one in which the run starts.
        self.changes = {period.first_step for period in schedule.periods[1:]}

    def at(self, step: int) -> Any:
        """Return the compiled step that takes the batch of `step`."""
        return self.compiler.step(self.programs[self.schedule.at(step).shape], self.spans)

    def change_to(self, step: int) -> Any:
        """Return the compiled step of a period that begins with `step`; steps take another time from now on."""
        shape, compiled = self.schedule.at(step).shape, self.at(step)
        log.info(
            "from step %d on: %s sequences of %s tokens a step, %s tokens",
            step, f"{shape.num_sequences:,}", f"{shape.seq_len:,}", f"{shape.num_tokens:,}",
        )  # fmt: skip
        self.compiler.watchdog.start_over()
        return compiled
