"""A step compiled for a mesh of devices that are not there.

Where JAX's CUDA plugin is installed, XLA's whole GPU pipeline runs, without a GPU and without a driver; elsewhere the
CPU backend compiles. `python -m tunix.plan.compiled` is one such compile, from a question on stdin to an answer on
stdout: what XLA must be told stands in the environment of a process, and an XLA that gives up ends that process only.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from tunix.cli import compose
from tunix.config import Config, DeviceKind
from tunix.costs.hlo import Collective, collectives
from tunix.costs.schedule import Speeds, Timeline, walk
from tunix.costs.transfers import Transfer, seconds
from tunix.plan.topology import Cluster
from tunix.training.program import abstract_batch, assemble, build_mesh

HBM_SHARE = 0.8  # of the memory's bandwidth: what everything but matrix products is assumed to reach
WORKERS = 2  # compiles at a time: each takes about one core, and 2 GB
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin}
  threads_per_core_limit: {kind.threads_per_multiprocessor} core_count: {kind.multiprocessors}
  fpus_per_core: {kind.cores_per_multiprocessor}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2} clock_rate_ghz: {kind.clock_ghz} device_memory_size: {memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {kind.name}"
"""


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind over the same mesh axes, in one step."""

    kind: str
    axes: tuple[str, ...]
    dtype: str
    count: int  # executions
    num_bytes: int  # of the whole arrays, over all executions


@dataclass(frozen=True)
class Compiled:
    """What was read from the program of a step, for one device."""

    backend: str  # "gpu" or "cpu"
    argument_bytes: int  # state and batch
    temporary_bytes: int
    moved: list[Moved]
    timeline: Timeline | None  # predicted; None from the CPU backend, whose schedule is another
    compile_s: float

    @property
    def memory(self) -> int:
        return self.argument_bytes + self.temporary_bytes


def backend() -> str:
    """Which compiler there is: "gpu" with JAX's CUDA plugin, else "cpu"."""
    return "gpu" if any(found.name.startswith("xla_cuda") for found in entry_points(group="jax_plugins")) else "cpu"


def compile_all(configs: list[Config], cluster: Cluster) -> Iterator[Compiled | str]:
    """The step of each config, whose mesh is one of the cluster's, in order; or the reason why there is none."""
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(partial(_in_process, cluster=cluster), configs)


def _in_process(cfg: Config, cluster: Cluster) -> Compiled | str:
    question = {
        "config": cfg.model_dump(mode="json", by_alias=True), "kind": cluster.kind.model_dump(),
        "num_nodes": cluster.num_nodes, "per_node": cluster.per_node, "backend": backend(),
    }  # fmt: skip
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": path,
    }  # fmt: skip
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    if question["backend"] == "gpu":
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:
        count = f"--xla_force_host_platform_device_count={cluster.num_devices}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {count} --xla_backend_optimization_level=0"
        environment["XLA_FLAGS"] = flags
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(question), env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and "JAX_TRACEBACK_FILTERING" not in line]
        return next((line for line in reversed(said) if "rror" in line), said[-1] if said else "killed")
    return _read(json.loads(done.stdout.splitlines()[-1]))


def _read(answer: dict[str, Any]) -> Compiled:
    moved = [Moved(**each | {"axes": tuple(each["axes"])}) for each in answer["moved"]]
    timeline = Timeline(**answer["timeline"]) if answer["timeline"] else None
    return Compiled(**answer | {"moved": moved, "timeline": timeline})


def target(kind: DeviceKind) -> str:
    """The kind as XLA's GPU compiler is told of it."""
    major, minor = kind.compute_capability.split(".")
    return TARGET.format(
        kind=kind, major=major, minor=minor, shared=kind.shared_memory_kib << 10, l2=kind.l2_cache_mib << 20,
        optin=(kind.shared_memory_kib - 1) << 10, memory=round(kind.memory_gib * 2**30),
        bandwidth=round(kind.hbm_gb_per_s * 1e9),
    )  # fmt: skip


def devices_of(cluster: Cluster) -> list[Any]:
    """The cluster's devices, which can be compiled for and nothing else. Needs the CUDA plugin."""
    topology = f"1x{cluster.num_nodes}x{cluster.per_node}"
    return topologies.get_topology_desc(platform="cuda", target_config=target(cluster.kind), topology=topology).devices


def compile_for(cfg: Config, cluster: Cluster, devices: list[Any], timed: bool = True) -> tuple[Compiled, str]:
    """The step of `cfg` on a mesh of these devices, in this process, and its program as HLO text."""
    begun = time.perf_counter()
    mesh = build_mesh(cfg, devices)
    with jax.set_mesh(mesh):
        program, batch = assemble(cfg, mesh), abstract_batch(cfg, mesh)
        step = program.step(1000, cfg.training.batch_shape(mesh.shape).num_tokens)
        lowered = jax.jit(step, donate_argnums=0).lower(program.abstract, batch)
        options: Any = cfg.training.compiler_options
        executable = lowered.compile(compiler_options=options)
    memory: Any = executable.memory_analysis()
    hlo = executable.as_text() or ""
    found, sizes = collectives(hlo), dict(mesh.shape)
    return Compiled(
        devices[0].platform,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        by_axes(found, sizes),
        walk(hlo, found, _speeds(cluster, sizes)) if timed else None,
        time.perf_counter() - begun,
    ), hlo


def by_axes(found: list[Collective], sizes: dict[str, int]) -> list[Moved]:
    """The collectives of a step added up by kind, dtype and mesh axes; those of one device alone do not count."""
    total: dict[tuple[str, tuple[str, ...], str], Moved] = {}
    for each in found:
        if axes := each.axes(sizes):
            key = (each.kind, axes, each.dtype)
            before = total.get(key, Moved(*key, 0, 0))
            total[key] = Moved(*key, before.count + each.times, before.num_bytes + each.times * each.num_bytes)
    return sorted(total.values(), key=lambda moved: -moved.num_bytes)


def _speeds(cluster: Cluster, sizes: dict[str, int]) -> Speeds:
    kind = cluster.kind

    def collective_s(each: Collective) -> float:
        axes = each.axes(sizes)
        return seconds(Transfer(each.kind, axes, each.num_bytes), sizes, kind, cluster.per_node) if axes else 0.0

    return Speeds(kind.peak_tflops * 1e12 * kind.efficiency, kind.hbm_gb_per_s * 1e9 * HBM_SHARE, collective_s)


def main() -> None:
    """One compile."""
    asked = json.load(sys.stdin)
    cluster = Cluster(DeviceKind.model_validate(asked["kind"]), asked["num_nodes"], asked["per_node"])
    on_gpu = asked["backend"] == "gpu"
    devices = devices_of(cluster) if on_gpu else jax.devices()
    compiled, _ = compile_for(compose.build(asked["config"]), cluster, devices, timed=on_gpu)
    print(json.dumps(asdict(compiled)))


if __name__ == "__main__":
    main()
