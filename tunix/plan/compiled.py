"""A training step compiled for a mesh of devices that are not there: its memory, collectives and predicted time.

If JAX's CUDA plugin is installed, XLA's whole GPU compiler runs, without a GPU and without a driver. If not, the CPU
backend compiles.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax

from tunix.config import Config
from tunix.costs.hlo import Collective, read_collectives
from tunix.costs.schedule import StepTime, predict_time
from tunix.plan.assumptions import assume_speeds, derive_kernel_data
from tunix.plan.topology import Cluster
from tunix.training.mesh_choices import build_mesh
from tunix.training.program import abstract_batch, assemble


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of all collectives of one kind over the same mesh axes, in one step."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int  # executions
    num_bytes: int  # size of the whole arrays, summed over all executions


@dataclass(frozen=True)
class Compiled:
    """Memory, collectives and predicted time of a compiled step, for one device."""

    backend: str  # "gpu" or "cpu"
    argument_bytes: int  # state and batch
    temporary_bytes: int
    traffic: list[AxisTraffic]  # most bytes first
    step_time: StepTime | None  # None from the CPU backend: its schedule is not that of a GPU
    compile_s: float

    @property
    def memory(self) -> int:
        return self.argument_bytes + self.temporary_bytes


def compile_for(cfg: Config, cluster: Cluster, devices: list[Any], timed: bool = True) -> tuple[Compiled, str]:
    """Compile the step of `cfg` for a mesh of these devices, in this process; return also its program as HLO text.

    Without `timed` no time is predicted.
    """
    begun = time.perf_counter()
    mesh = build_mesh(cfg, devices)
    with jax.set_mesh(mesh):
        program, batch = assemble(cfg, mesh), abstract_batch(cfg, mesh)
        step = program.step([(1000, cfg.training.batch_shape(mesh.shape).num_tokens)])
        lowered = jax.jit(step, donate_argnums=0).lower(program.abstract, batch)
        options: Any = program.compiler_options()
        executable = lowered.compile(compiler_options=options)
    memory: Any = executable.memory_analysis()
    hlo = executable.as_text() or ""
    collectives, sizes = read_collectives(hlo), dict(mesh.shape)
    data = derive_kernel_data(cfg, cluster.kind.name, sizes)
    # The new state is written over the old one, which is an argument: those outputs take no memory of their own.
    temporary_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        backend=devices[0].platform,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=temporary_bytes,
        traffic=sum_by_axes(collectives, sizes),
        step_time=predict_time(hlo, collectives, assume_speeds(cluster, sizes), data) if timed else None,
        compile_s=time.perf_counter() - begun,
    ), hlo


def sum_by_axes(collectives: list[Collective], sizes: dict[str, int]) -> list[AxisTraffic]:
    """Add up the collectives of a step by kind, mesh axes and dtype. A group of one device does not count."""
    sums: dict[tuple[str, tuple[str, ...], str], AxisTraffic] = {}
    for collective in collectives:
        if axes := collective.find_axes(sizes):
            key = (collective.kind, axes, collective.dtype)
            before = sums.get(key, AxisTraffic(*key, 0, 0))
            num_bytes = before.num_bytes + collective.times * collective.num_bytes
            sums[key] = AxisTraffic(*key, before.count + collective.times, num_bytes)
    return sorted(sums.values(), key=lambda traffic: -traffic.num_bytes)
