"""Clusters that need not exist: their nodes and devices, and the speeds and loads that predictions assume."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from tunix.base.errors import UserError, did_you_mean
from tunix.base.files import read_yaml
from tunix.config import Config, DeviceKind
from tunix.config.layers import ExpertsMlp
from tunix.costs.communication import Transfer, predict_seconds
from tunix.costs.compiled_time import KernelData, Speeds
from tunix.costs.devices import read_device_kinds, read_kind, replace_network
from tunix.costs.hlo import Collective
from tunix.models.expert_parallel import experts_with_capacity, select_expert_exchange
from tunix.models.kernels import (
    FLASH_BLOCKS,
    GROUPED_BLOCKS,
    blocks_for,
    computed_pairs,
    computed_pairs_in_ring,
    empty_rows,
    find_row_of_chip,
)
from tunix.sharding.mesh_shape import token_shards

# Description of a cluster, which need not exist: a number of nodes with equal devices.

PLATFORM = "gpu"  # of all kinds of conf/command/device, whichever compiler is installed


@dataclass(frozen=True)
class Cluster:
    """A number of nodes with equal devices."""

    kind: DeviceKind
    num_nodes: int
    per_node: int  # devices of a node

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.num_nodes} x {self.per_node} {self.kind.name}"


def read_topology(text: str, network: str | None = None) -> Cluster:
    """Read `h200:8` (devices) or `h200:32x8` (nodes x devices); the kind may be the path of a YAML file.

    `network` names a file of conf/command/network; None is the network of the kind.

    Raises:
        UserError: the text has another form, or the kind is not known.
    """
    name, _, product = text.rpartition(":")
    numbers = product.split("x")
    if not name or len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise UserError(f"plan.topology={text}: expected KIND:GPUS or KIND:NODESxGPUS like h200:8 or h200:32x8")
    nodes, per_node = map(int, numbers if len(numbers) == 2 else ("1", *numbers))
    kind = _read_kind(name)
    return Cluster(replace_network(kind, network) if network else kind, nodes, per_node)


def _read_kind(name: str) -> DeviceKind:
    known, path = read_device_kinds(), Path(name).expanduser()
    if name in known:
        return known[name]
    if path.suffix != ".yaml":
        hint = did_you_mean(name, list(known))
        raise UserError(f"plan.topology: there is no kind {name}; kinds are {', '.join(known)}, or FILE.yaml{hint}")
    try:
        return read_kind(read_yaml(path.read_text()))
    except OSError as error:
        raise UserError(f"plan.topology: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"plan.topology: {path} is not YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "its content"
        raise UserError(f"plan.topology: {path}: {key}: {first['msg'].lower()}") from None


# Speeds and loads that predictions assume: shares of a device's data sheet, and what our own kernels compute.

# Share of the speed of matrix products that our own kernels are assumed to reach: 415 TFLOP/s on an H100, where
# kernels of this kind (FlashAttention-2 in Triton) are reported to reach 350 to 500. Not measured.
KERNEL_SHARE = 0.6
HBM_SHARE = 0.8  # share of the memory's bandwidth that everything but matrix products is assumed to reach
# Share of PCIe's bandwidth that copies from and to pinned memory are assumed to reach: about 25 of 32 GB/s, 52 of 64.
HOST_SHARE = 0.8
# Seconds that a kernel adds beside its own work where kernels follow one another: 3.8 microseconds a kernel of 2.9
# (NVIDIA, "Getting Started with CUDA Graphs").
LAUNCH_S = 0.9e-6


def assume_speeds(cluster: Cluster, sizes: dict[str, int]) -> Speeds:
    """Return the speeds of a cluster's devices and links, for collectives on a mesh of these sizes."""
    kind = cluster.kind

    def collective_s(collective: Collective) -> float:
        axes = collective.find_axes(sizes)
        if not axes:
            return 0.0
        return predict_seconds(Transfer(collective.kind, axes, collective.num_bytes), sizes, kind, cluster.per_node)

    matmul_flops_per_s = kind.peak_tflops * 1e12 * kind.efficiency
    fp8 = (kind.fp8_tflops or kind.peak_tflops) * 1e12 * kind.efficiency
    memory, host = kind.hbm_gb_per_s * 1e9 * HBM_SHARE, kind.host_gb_per_s * 1e9 * HOST_SHARE
    return Speeds(matmul_flops_per_s, fp8, matmul_flops_per_s * KERNEL_SHARE, memory, host, LAUNCH_S, collective_s)


def derive_kernel_data(cfg: Config, device_kind: str, sizes: dict[str, int]) -> KernelData:
    """Return what our own kernels compute on this kind of device: rows have one document, experts equal loads.

    `sizes` are those of the mesh's axes. Of a ring the pairs are those of the device with the last tokens.
    """
    model, length, num_devices = cfg.model, cfg.training.seq_len, token_shards(sizes)
    pairs, in_ring, flash_blocks = math.nan, dict[str, float](), find_row_of_chip(FLASH_BLOCKS, device_kind)
    if flash_blocks is not None:
        windows = model.list_windows(length)
        with_kernel = [  # that run the kernel
            (windows[layer], blocks_for(flash_blocks, heads.dim).forward)
            for heads, layers in model.head_kinds.items()
            for layer in layers
            if heads.dim <= max(flash_blocks)
        ]
        if with_kernel:
            local_tokens = length // num_devices
            pairs = sum(computed_pairs(length, [window], block) for window, block in with_kernel) / len(with_kernel)
            steps = [computed_pairs_in_ring(local_tokens, num_devices, window, block) for window, block in with_kernel]
            local, *before = np.mean(steps, 0)
            in_ring = {"_own": local, "_before": sum(before) / max(1, len(before))}
    expert_blocks = find_row_of_chip(GROUPED_BLOCKS, device_kind)
    if expert_blocks is None or not isinstance(model.mlp, ExpertsMlp):
        return KernelData(pairs, in_ring)
    exchange = select_expert_exchange(model, sizes, PLATFORM).name
    num_experts = experts_with_capacity(model, sizes, exchange)
    return KernelData(pairs, in_ring, num_experts, empty_rows(expert_blocks))
