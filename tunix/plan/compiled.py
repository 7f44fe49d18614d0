"""Compile a training step for a mesh of devices that are not there, and read its memory and collectives.

If JAX's CUDA plugin is installed, XLA's whole GPU compiler runs, without a GPU and without a driver. If not, the CPU
backend compiles.

Each compile has a process of its own, `python -m tunix.plan.compiled`, which reads a question as JSON on stdin and
writes an answer as JSON on stdout. There are two reasons: XLA reads its options from the environment of a process, and
when XLA aborts, only that process ends.

    compile_all -> _compile_in_process -> [stdin, stdout] -> main -> compile_for
"""

import json
import math
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
import numpy as np
from jax.experimental import topologies

from tunix.cli import compose
from tunix.config import Config, DeviceKind
from tunix.config.mlp import ExpertsMlp
from tunix.costs.hlo import Collective, read_collectives
from tunix.costs.schedule import KernelData, Speeds, StepTime, walk
from tunix.costs.transfers import Transfer, seconds
from tunix.models import grouped_blocks
from tunix.models.chips import row_of_chip
from tunix.models.expert_exchanges import choose_expert_exchange, experts_with_room
from tunix.models.flash_blocks import BLOCKS, blocks_for, computed_pairs, computed_pairs_in_ring
from tunix.plan.topology import PLATFORM, Cluster
from tunix.sharding.mesh_shape import token_shards
from tunix.training.mesh_choices import build_mesh
from tunix.training.program import abstract_batch, assemble

# Share of the speed of matrix products that our own kernels are assumed to reach: 415 TFLOP/s on an H100, where
# kernels of this kind (FlashAttention-2 in Triton) are reported to reach 350 to 500. Not measured.
KERNEL_SHARE = 0.6
HBM_SHARE = 0.8  # share of the memory's bandwidth that everything but matrix products is assumed to reach
# Share of PCIe's bandwidth that copies from and to pinned memory are assumed to reach: about 25 of 32 GB/s, 52 of 64.
HOST_SHARE = 0.8
# Seconds that a kernel adds beside its own work where kernels follow one another: 3.8 microseconds a kernel of 2.9
# (NVIDIA, "Getting Started with CUDA Graphs").
LAUNCH_S = 0.9e-6
WORKERS = 2  # compiles at one time: each takes about one core, and 2 GB
# XLA's description of a GPU (a GpuTargetConfigProto in text form), filled in from a file of conf/command/device.
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


def find_backend() -> str:
    """Return the compiler that is installed: "gpu" with JAX's CUDA plugin, else "cpu"."""
    has_cuda = any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins"))
    return "gpu" if has_cuda else "cpu"


def compile_all(configs: list[Config], cluster: Cluster) -> Iterator[Compiled | str]:
    """Compile the step of each config for the cluster, and yield the results in order.

    A result is text where a compile failed: the reason.
    """
    with ThreadPoolExecutor(WORKERS) as pool:
        yield from pool.map(partial(_compile_in_process, cluster=cluster), configs)


def _compile_in_process(cfg: Config, cluster: Cluster) -> Compiled | str:
    question = {
        "config": cfg.model_dump(mode="json", by_alias=True),
        "kind": cluster.kind.model_dump(),
        "num_nodes": cluster.num_nodes,
        "per_node": cluster.per_node,
        "backend": find_backend(),
    }
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": path,
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    if question["backend"] == "gpu":
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:  # the CPU backend compiles for devices that exist: it makes as many as the cluster has
        count = f"--xla_force_host_platform_device_count={cluster.num_devices}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {count} --xla_backend_optimization_level=0"
        environment["XLA_FLAGS"] = flags
    result = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(question),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip() and "JAX_TRACEBACK_FILTERING" not in line]
        return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "killed")
    return _read_answer(json.loads(result.stdout.splitlines()[-1]))


def _read_answer(answer: dict[str, Any]) -> Compiled:
    traffic = [AxisTraffic(**each | {"axes": tuple(each["axes"])}) for each in answer["traffic"]]
    step_time = StepTime(**answer["step_time"]) if answer["step_time"] else None
    return Compiled(**answer | {"traffic": traffic, "step_time": step_time})


def format_target(kind: DeviceKind) -> str:
    """Format a kind of device as XLA's GPU compiler reads it."""
    major, minor = kind.compute_capability.split(".")
    return TARGET.format(
        kind=kind,
        major=major,
        minor=minor,
        shared=kind.shared_memory_kib << 10,
        l2=kind.l2_cache_mib << 20,
        optin=(kind.shared_memory_kib - 1) << 10,
        memory=round(kind.memory_gib * 2**30),
        bandwidth=round(kind.hbm_gb_per_s * 1e9),
    )


def describe_devices(cluster: Cluster) -> list[Any]:
    """Return descriptions of the cluster's devices: XLA can compile for them, and nothing can run on them.

    Needs JAX's CUDA plugin.
    """
    topology, target = f"1x{cluster.num_nodes}x{cluster.per_node}", format_target(cluster.kind)
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices


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
    data = kernel_data(cfg, cluster.kind.name, sizes)
    # The new state is written over the old one, which is an argument: those outputs take no memory of their own.
    temporary_bytes = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        backend=devices[0].platform,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=temporary_bytes,
        traffic=sum_by_axes(collectives, sizes),
        step_time=walk(hlo, collectives, _speeds(cluster, sizes), data) if timed else None,
        compile_s=time.perf_counter() - begun,
    ), hlo


def sum_by_axes(collectives: list[Collective], sizes: dict[str, int]) -> list[AxisTraffic]:
    """Add up the collectives of a step by kind, mesh axes and dtype. A group of one device does not count."""
    sums: dict[tuple[str, tuple[str, ...], str], AxisTraffic] = {}
    for collective in collectives:
        if axes := collective.axes(sizes):
            key = (collective.kind, axes, collective.dtype)
            before = sums.get(key, AxisTraffic(*key, 0, 0))
            num_bytes = before.num_bytes + collective.times * collective.num_bytes
            sums[key] = AxisTraffic(*key, before.count + collective.times, num_bytes)
    return sorted(sums.values(), key=lambda traffic: -traffic.num_bytes)


def _speeds(cluster: Cluster, sizes: dict[str, int]) -> Speeds:
    kind = cluster.kind

    def collective_s(collective: Collective) -> float:
        axes = collective.axes(sizes)
        if not axes:
            return 0.0
        return seconds(Transfer(collective.kind, axes, collective.num_bytes), sizes, kind, cluster.per_node)

    products = kind.peak_tflops * 1e12 * kind.efficiency
    fp8 = (kind.fp8_tflops or kind.peak_tflops) * 1e12 * kind.efficiency
    memory, host = kind.hbm_gb_per_s * 1e9 * HBM_SHARE, kind.host_gb_per_s * 1e9 * HOST_SHARE
    return Speeds(products, fp8, products * KERNEL_SHARE, memory, host, LAUNCH_S, collective_s)


def kernel_data(cfg: Config, device_kind: str, sizes: dict[str, int]) -> KernelData:
    """Return what our own kernels compute on this kind of device: rows have one document, experts equal loads.

    `sizes` are those of the mesh's axes. Of a ring the pairs are those of the device with the last tokens.
    """
    model, length, num_devices = cfg.model, cfg.training.seq_len, token_shards(sizes)
    pairs, in_ring, of_flash = math.nan, dict[str, float](), row_of_chip(BLOCKS, device_kind)
    if of_flash is not None:
        windows = model.windows(length)
        of_layers = [  # that run the kernel
            (windows[layer], blocks_for(of_flash, heads.dim).forward)
            for heads, layers in model.kinds_of_heads.items()
            for layer in layers
            if heads.dim <= max(of_flash)
        ]
        if of_layers:
            own_tokens = length // num_devices
            pairs = sum(computed_pairs(length, [window], block) for window, block in of_layers) / len(of_layers)
            steps = [computed_pairs_in_ring(own_tokens, num_devices, window, block) for window, block in of_layers]
            own, *before = np.mean(steps, 0)
            in_ring = {"_own": own, "_before": sum(before) / max(1, len(before))}
    of_experts = row_of_chip(grouped_blocks.BLOCKS, device_kind)
    if of_experts is None or not isinstance(model.mlp, ExpertsMlp):
        return KernelData(pairs, in_ring)
    exchange = choose_expert_exchange(model, sizes, PLATFORM).name
    num_experts = experts_with_room(model, sizes, exchange)
    return KernelData(pairs, in_ring, num_experts, grouped_blocks.empty_rows(of_experts))


def main() -> None:
    """Answer one question of `_compile_in_process`."""
    question = json.load(sys.stdin)
    cluster = Cluster(DeviceKind.model_validate(question["kind"]), question["num_nodes"], question["per_node"])
    for_gpu = question["backend"] == "gpu"
    devices = describe_devices(cluster) if for_gpu else jax.devices()
    compiled, _ = compile_for(compose.build(question["config"]), cluster, devices, timed=for_gpu)
    print(json.dumps(asdict(compiled)))


if __name__ == "__main__":
    main()
