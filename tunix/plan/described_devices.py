"""Devices that are described and need not exist: XLA compiles for them, and nothing runs on them."""

from importlib.metadata import entry_points
from typing import Any

from jax.experimental import topologies

from tunix.config import DeviceKind
from tunix.plan.topology import Cluster

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
