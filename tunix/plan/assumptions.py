"""Speeds and loads that predictions assume: shares of a device's data sheet, and what our own kernels compute."""

import math

import numpy as np

from tunix.config import Config
from tunix.config.mlp import ExpertsMlp
from tunix.costs.hlo import Collective
from tunix.costs.schedule import KernelData, Speeds
from tunix.costs.transfers import Transfer, predict_seconds
from tunix.models import grouped_blocks
from tunix.models.chips import find_row_of_chip
from tunix.models.expert_exchanges import choose_expert_exchange, experts_with_room
from tunix.models.flash_blocks import BLOCKS, blocks_for, computed_pairs, computed_pairs_in_ring
from tunix.plan.topology import PLATFORM, Cluster
from tunix.sharding.mesh_shape import token_shards

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

    products = kind.peak_tflops * 1e12 * kind.efficiency
    fp8 = (kind.fp8_tflops or kind.peak_tflops) * 1e12 * kind.efficiency
    memory, host = kind.hbm_gb_per_s * 1e9 * HBM_SHARE, kind.host_gb_per_s * 1e9 * HOST_SHARE
    return Speeds(products, fp8, products * KERNEL_SHARE, memory, host, LAUNCH_S, collective_s)


def derive_kernel_data(cfg: Config, device_kind: str, sizes: dict[str, int]) -> KernelData:
    """Return what our own kernels compute on this kind of device: rows have one document, experts equal loads.

    `sizes` are those of the mesh's axes. Of a ring the pairs are those of the device with the last tokens.
    """
    model, length, num_devices = cfg.model, cfg.training.seq_len, token_shards(sizes)
    pairs, in_ring, flash_blocks = math.nan, dict[str, float](), find_row_of_chip(BLOCKS, device_kind)
    if flash_blocks is not None:
        windows = model.list_windows(length)
        with_kernel = [  # that run the kernel
            (windows[layer], blocks_for(flash_blocks, heads.dim).forward)
            for heads, layers in model.kinds_of_heads.items()
            for layer in layers
            if heads.dim <= max(flash_blocks)
        ]
        if with_kernel:
            own_tokens = length // num_devices
            pairs = sum(computed_pairs(length, [window], block) for window, block in with_kernel) / len(with_kernel)
            steps = [computed_pairs_in_ring(own_tokens, num_devices, window, block) for window, block in with_kernel]
            own, *before = np.mean(steps, 0)
            in_ring = {"_own": own, "_before": sum(before) / max(1, len(before))}
    expert_blocks = find_row_of_chip(grouped_blocks.BLOCKS, device_kind)
    if expert_blocks is None or not isinstance(model.mlp, ExpertsMlp):
        return KernelData(pairs, in_ring)
    exchange = choose_expert_exchange(model, sizes, PLATFORM).name
    num_experts = experts_with_room(model, sizes, exchange)
    return KernelData(pairs, in_ring, num_experts, grouped_blocks.empty_rows(expert_blocks))
