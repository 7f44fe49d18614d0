"""The train step compiled for this run's devices, with what the log says about it."""

import logging
import time
from typing import Any

import jax
from jax.sharding import Mesh

from tunix.config.batch_stages import Spans
from tunix.costs.hlo import read_collectives, summarise
from tunix.run.compile_cache import count_reads
from tunix.training.program import Program, abstract_batch

log = logging.getLogger(__name__)


def compile_step(program: Program, spans: Spans, mesh: Mesh) -> Any:
    """Compile the step of a run of these steps; its state is donated. Logs its time, memory and collectives."""
    begun, reads = time.perf_counter(), count_reads()
    traced = jax.jit(program.step(spans), donate_argnums=0).lower(program.abstract, abstract_batch(program.cfg, mesh))
    options: Any = program.compiler_options()
    compiled = traced.compile(compiler_options=options)
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


def describe_memory(compiled: Any, peak_gib: float | None) -> str:
    """Return in words the predicted memory of the compiled step, beside the largest that a device has used."""
    memory = compiled.memory_analysis()
    predicted = (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    measured = "not measured here" if peak_gib is None else f"{peak_gib:.3f} GiB, {peak_gib / predicted - 1:+.1%}"
    return f"memory of a device: predicted {predicted:.3f} GiB (compiled step); peak {measured}"
