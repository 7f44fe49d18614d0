"""The train step compiled for this run's devices, once for each shape of its batch."""

import logging
import time
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.config.batch_stages import BatchSchedule, BatchShape, Spans
from tunix.costs.hlo import read_collectives, summarise
from tunix.processes.watchdog import Watchdog
from tunix.run.compile_cache import count_reads
from tunix.training.program import Program, abstract_batch
from tunix.training.state import State

log = logging.getLogger(__name__)


class CompiledSteps:
    """The compiled step of each shape of the batch, made when a run comes to the first step that needs it."""

    def __init__(
        self,
        programs: dict[BatchShape, Program],
        schedule: BatchSchedule,
        mesh: Mesh,
        spans: Spans,
        watchdog: Watchdog,
    ):
        """`schedule` is that of the steps from the run's start on, `spans` are those of the whole run."""
        self.programs, self.schedule, self.mesh, self.spans, self.watchdog = programs, schedule, mesh, spans, watchdog
        self.compiled: dict[BatchShape, Any] = {}
        # The first steps of all periods but the one in which the run starts.
        self.changes = {period.first_step for period in schedule.periods[1:]}

    def at(self, step: int, state: State) -> Any:
        """Return the compiled step that takes the batch of `step`; `state` gives shapes."""
        shape = self.schedule.at(step).shape
        if shape not in self.compiled:
            program = self.programs[shape]
            with self.watchdog.phase("compiling the step"):
                batch, options = abstract_batch(program.cfg, self.mesh), program.compiler_options(self.mesh)
                self.compiled[shape] = compile_step(program.step(self.spans), state, batch, options)
        return self.compiled[shape]

    def change_to(self, step: int, state: State) -> Any:
        """Return the compiled step of a period that begins with `step`; steps take another time from now on."""
        shape, compiled = self.schedule.at(step).shape, self.at(step, state)
        log.info(
            "from step %d on: %s sequences of %s tokens a step, %s tokens",
            step, f"{shape.num_sequences:,}", f"{shape.seq_len:,}", f"{shape.num_tokens:,}",
        )  # fmt: skip
        self.watchdog.start_over()
        return compiled


def compile_step(step_fn, state: State, batch: dict[str, jax.ShapeDtypeStruct], options: dict[str, Any]) -> Any:
    """Compile the step for these devices; its state is donated. `batch` gives shapes. Logs memory and collectives."""
    begun, reads = time.perf_counter(), count_reads()
    compiled = jax.jit(step_fn, donate_argnums=0).lower(state, batch).compile(compiler_options=options)
    memory: Any = compiled.memory_analysis()
    log.info(
        "step %s in %.1f s: %.3f GiB state and batch + %.3f GiB temporary per device",
        "read from the compile cache" if count_reads() > reads else "compiled",
        time.perf_counter() - begun,
        memory.argument_size_in_bytes / 2**30,
        memory.temp_size_in_bytes / 2**30,
    )
    log.info("collectives of a step: %s", summarise(read_collectives(compiled.as_text() or "")))
    return compiled


def memory_report(compiled: Any, peak_gib: float | None) -> str:
    """Return in words the predicted memory of the compiled step, beside the largest that a device has used."""
    memory = compiled.memory_analysis()
    predicted = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    measured = "not measured here" if peak_gib is None else f"{peak_gib:.3f} GiB, {peak_gib / predicted - 1:+.1%}"
    return f"memory of a device: predicted {predicted:.3f} GiB (compiled step); peak {measured}"
