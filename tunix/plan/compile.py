"""Steps compiled for devices that are only described, each in a process of its own: memory, collectives and time.

If JAX's CUDA plugin is installed, XLA's whole GPU compiler runs, without a GPU and without a driver. If not, the CPU
backend compiles.
"""

import json
import math
import os
import signal
import subprocess
import sys
import threading
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
from pydantic import TypeAdapter

from tunix.config import Config, DeviceKind, compose
from tunix.config.layers import ExpertsMlp
from tunix.costs.communication import Transfer, find_group, predict_seconds
from tunix.costs.compiled_time import KernelData, Speeds, StepTime, predict_time
from tunix.costs.devices import HBM_SHARE, HOST_SHARE, KERNEL_SHARE, LAUNCH_S, PLATFORM, Cluster
from tunix.costs.hlo import Collective, read_collectives
from tunix.models import kernels
from tunix.models.expert_parallel import experts_with_capacity, select_expert_exchange
from tunix.processes.exits import end_with
from tunix.sharding.mesh import count_devices, token_shards
from tunix.sharding.table import DIMS, EXPERTS
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

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


def find_backend() -> str:
    """Return the compiler that is installed: "gpu" with JAX's CUDA plugin, else "cpu"."""
    has_cuda = any(plugin.name.startswith("xla_cuda") for plugin in entry_points(group="jax_plugins"))
    return "gpu" if has_cuda else "cpu"


MAX_CPU_DEVICES = 2048  # XLA's CPU backend takes further ones for those of another process
GET_COMPILER = f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
XLA_SHARE = 0.8  # of the memory of a described device, for which XLA compiles; in a run it is what JAX may use


def describe_devices(cluster: Cluster, memory_share: float = XLA_SHARE) -> list[Any]:
    """Return descriptions of the cluster's devices: XLA can compile for them, and nothing can run on them.

    Programs are those of a run that may use `memory_share` of a device's memory. Needs JAX's CUDA plugin.
    """
    kind, topology = cluster.kind, f"1x{cluster.num_nodes}x{cluster.per_node}"
    major, minor = kind.compute_capability.split(".")
    target = TARGET.format(
        kind=kind,
        major=major,
        minor=minor,
        shared=kind.shared_memory_kib << 10,
        l2=kind.l2_cache_mib << 20,
        optin=(kind.shared_memory_kib - 1) << 10,
        memory=round(kind.memory_gib * 2**30 * memory_share / XLA_SHARE),
        bandwidth=round(kind.hbm_gb_per_s * 1e9),
    )
    return topologies.get_topology_desc(platform="cuda", target_config=target, topology=topology).devices


def assume_speeds(cluster: Cluster, sizes: dict[str, int]) -> Speeds:
    """Return the speeds of a cluster's devices and links, for collectives on a mesh of these sizes."""
    kind = cluster.kind

    def collective_s(collective: Collective) -> float:
        axes = collective.find_axes(sizes)
        if not axes:
            return 0.0
        return predict_seconds(Transfer(collective.kind, axes, collective.num_bytes), sizes, kind, cluster.per_node)

    def link_of(collective: Collective) -> str:
        group = find_group(collective.find_axes(sizes), sizes, cluster.per_node)
        return "network" if group.num_nodes > 1 else "node"

    matmul_flops_per_s = kind.peak_tflops * 1e12 * kind.efficiency
    fp8 = (kind.fp8_tflops or kind.peak_tflops) * 1e12 * kind.efficiency  # MXFP8 is as fast where a chip has it
    memory, host = kind.hbm_gb_per_s * 1e9 * HBM_SHARE, kind.host_gb_per_s * 1e9 * HOST_SHARE
    kernel_flops_per_s = matmul_flops_per_s * KERNEL_SHARE
    return Speeds(matmul_flops_per_s, fp8, kernel_flops_per_s, memory, host, LAUNCH_S, collective_s, link_of)


def derive_kernel_data(cfg: Config, device_kind: str, sizes: dict[str, int]) -> KernelData:
    """Return what our own kernels compute on this kind of device: rows have one document, experts equal loads.

    `sizes` are those of the mesh's axes. Of a ring the pairs are those of the device with the last tokens.
    """
    model, length, num_devices = cfg.model, cfg.training.seq_len, token_shards(sizes)
    pairs, in_ring = math.nan, dict[str, float]()
    flash_blocks = kernels.find_row_of_chip(kernels.FLASH_BLOCKS, device_kind)
    if flash_blocks is not None:
        windows = model.list_windows(length)
        with_kernel = [  # that run the kernel
            (windows[layer], kernels.blocks_for(flash_blocks, heads.dim).forward)
            for heads, layers in model.head_kinds.items()
            for layer in layers
            if heads.dim <= max(flash_blocks)
        ]
        if with_kernel:
            local_tokens = length // num_devices
            in_all = [kernels.computed_pairs(length, [window], block) for window, block in with_kernel]
            steps = [kernels.computed_pairs_in_ring(local_tokens, num_devices, *each) for each in with_kernel]
            pairs = sum(in_all) / len(with_kernel)
            local, *before = np.mean(steps, 0)
            in_ring = {"_own": local, "_before": sum(before) / max(1, len(before))}
    expert_blocks = kernels.find_row_of_chip(kernels.GROUPED_BLOCKS, device_kind)
    if expert_blocks is None or not isinstance(model.mlp, ExpertsMlp):
        return KernelData(pairs, in_ring)
    exchange = select_expert_exchange(model, sizes, PLATFORM).name
    num_experts = experts_with_capacity(model, sizes, exchange)
    fused_blocks = kernels.find_row_of_chip(kernels.EXPERT_BLOCKS, device_kind)
    assert fused_blocks is not None, "tables of kernels have the same chips"
    at_most = num_experts * count_devices(sizes, DIMS[EXPERTS].weight_axes) / model.mlp.num_experts
    capacity_factor = min(kernels.CAPACITY_FACTOR, at_most)
    empty_rows = kernels.empty_rows(expert_blocks) | kernels.fused_empty_rows(fused_blocks)
    return KernelData(pairs, in_ring, num_experts, capacity_factor, empty_rows)


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
    start_time = time.perf_counter()
    mesh = build_mesh(cfg, devices)
    with jax.set_mesh(mesh):
        train_spec = assemble(cfg, mesh)
        step = train_spec.step([(1000, train_spec.batch.num_tokens)])
        lowered = jax.jit(step, donate_argnums=0).lower(train_spec.abstract, train_spec.abstract_batch)
        options: Any = train_spec.compiler_options()
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
        compile_s=time.perf_counter() - start_time,
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


# Each compile has a process of its own, `python -m tunix.plan.compile`, which reads a question as JSON on stdin, and
# writes its answer on stdout. XLA reads its options from the environment of a process, and when XLA aborts, only that
# process ends.
#
#     compile_all -> _compile_in_process -> [stdin, stdout] -> main -> compile_for

WORKERS = 2  # compiles at one time: each takes about one core, and 2 GB


def compile_all(configs: list[Config], cluster: Cluster) -> Iterator[Compiled | str]:
    """Compile the step of each config for the cluster, and yield the results in order.

    A result is text where a compile failed: the reason.
    """
    running = RunningCompiles()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            yield from pool.map(partial(_compile_in_process, cluster=cluster, running=running), configs)
        except BaseException:  # Ctrl-C too: the end of the pool waits for its threads, and these for their processes
            pool.shutdown(wait=False, cancel_futures=True)
            running.kill()
            raise


class RunningCompiles:
    """The processes of `compile_all`, which threads start and another one kills: after that none starts any more."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen] = []
        self._lock, self._killed = threading.Lock(), False

    def start(self, environment: dict[str, str]) -> subprocess.Popen:
        with self._lock:
            if self._killed:
                raise RuntimeError("compiles have been killed")
            process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                text=True,
            )
            self._processes.append(process)
        return process

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            for process in self._processes:
                process.kill()


def _compile_in_process(cfg: Config, cluster: Cluster, running: RunningCompiles) -> Compiled | str:
    """Return what `compile_for` returns in a process of its own, which is one of `running`."""
    question = {
        # A plan compiles for meshes of other sizes than the launcher would start.
        "config": cfg.model_dump(mode="json", by_alias=True) | {"launcher": {"name": "local"}},
        "kind": cluster.kind.model_dump(),
        "num_nodes": cluster.num_nodes,
        "per_node": cluster.per_node,
        "backend": find_backend(),
        "parent": os.getpid(),  # not by `preexec_fn`: it would fork, and JAX warns of every fork
    }
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": path}
    environment = os.environ | variables
    # Variables of the caller that would give the new process other devices than the plan asks for.
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    if question["backend"] == "gpu":
        environment["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    else:  # the CPU backend compiles for devices that exist: it makes as many as the cluster has
        count = f"--xla_force_host_platform_device_count={cluster.num_devices}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count} --xla_backend_optimization_level=0"
    process = running.start(environment)
    stdout, stderr = process.communicate(json.dumps(question))
    if process.returncode:
        # XLA may abort with pages of text: the last line that names an error says most.
        lines = [line for line in stderr.splitlines() if line.strip() and "JAX_TRACEBACK_FILTERING" not in line]
        return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "killed")
    return TypeAdapter(Compiled).validate_json(stdout.splitlines()[-1])


def main() -> None:
    """Answer one question of `_compile_in_process`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python would react to Ctrl-C when XLA is done
    question = json.load(sys.stdin)
    end_with(question["parent"])
    cluster = Cluster(DeviceKind.model_validate(question["kind"]), question["num_nodes"], question["per_node"])
    cfg, for_gpu = compose.build(question["config"]), question["backend"] == "gpu"
    devices = describe_devices(cluster, cfg.plan.memory_share) if for_gpu else jax.devices()
    compiled, _ = compile_for(cfg, cluster, devices, timed=for_gpu)
    print(json.dumps(asdict(compiled)))


if __name__ == "__main__":
    main()
