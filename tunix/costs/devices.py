"""Kinds of devices, networks and clusters: speed, memory and links; and the time of one collective on them."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tunix.base.config_types import CONF
from tunix.base.errors import UserError, did_you_mean
from tunix.base.files import expand_home, read_yaml
from tunix.config import DeviceKind, Network
from tunix.config.mistakes import validate
from tunix.models.table import MATMUL_DTYPES

PLATFORM = "gpu"  # of all kinds of conf/command/device, whichever compiler is installed

# Share of the speed of matrix products that our kernels of experts reach: on one H200, with the experts of Qwen 3
# 30B-A3B, 419 TFLOP/s (benchmarks/results.md), where products are taken to reach 693.
KERNEL_SHARE = 0.6
HBM_SHARE = 0.8  # share of the memory's bandwidth that everything but matrix products is assumed to reach
# Share of PCIe's bandwidth that copies from and to pinned memory are assumed to reach: about 25 of 32 GB/s, 52 of 64.
HOST_SHARE = 0.8
# Seconds that a kernel adds beside its own work where kernels follow one another: 3.8 microseconds a kernel of 2.9
# (NVIDIA, "Getting Started with CUDA Graphs").
LAUNCH_S = 0.9e-6


@cache
def read_device_kinds() -> dict[str, DeviceKind]:
    """Return the kinds of devices in conf/command/device, keyed by file name."""
    return {name: read_kind(values) for name, values in _read_files("device").items()}


@cache
def read_networks() -> dict[str, Network]:
    """Return the kinds of networks in conf/command/network, keyed by file name."""
    return {name: Network.model_validate(values) for name, values in _read_files("network").items()}


def _read_files(folder: str) -> dict[str, Any]:
    """Return the values of each file of a folder in conf/command, keyed by file name."""
    files = sorted((CONF / "command" / folder).glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text()) for file in files}


def read_kind(values: Any) -> DeviceKind:
    """Return the kind of a device file's values, in which `network` is a name.

    Raises:
        UserError: a value is missing or wrong.
    """
    if isinstance(values, dict) and isinstance(name := values.get("network"), str):
        values = values | {"network": find_network(name, "network")}
    return validate(DeviceKind, values)


def find_network(name: str, key: str) -> Network:
    """Return the network of this name; raises `UserError`, which names `key`, for one that is not known."""
    known = read_networks()
    if name not in known:
        raise UserError(
            f"{key}={name}: there is no such network; choose from {', '.join(known)}{did_you_mean(name, list(known))}"
        )
    return known[name]


def replace_network(kind: DeviceKind, name: str) -> DeviceKind:
    """Return the kind of device with another network; raises `UserError` for one that is not known."""
    network = find_network(name, "plan.network")
    return kind.model_copy(update={"network": network, "nics_per_node": network.nics_per_node or kind.nics_per_node})


def find_kind(device_kind: str) -> DeviceKind | None:
    """Return the kind of a device by the name that its driver gives it; None if that name is not known."""
    matches = [kind for kind in read_device_kinds().values() if kind.name in device_kind]
    # "H100 PCIe" contains "H100" too: the longest name is the most specific one.
    return max(matches, key=lambda kind: len(kind.name)) if matches else None


def find_matmul_tflops(kind: DeviceKind, matmul_dtype: str) -> float | None:
    """Return the dense peak of a device for products of `training.matmul_dtype`; None where it has none."""
    return getattr(kind, MATMUL_DTYPES[matmul_dtype].speed)


def compute_peak_tflops(kind: DeviceKind, matmul_dtype: str | None, share: float) -> float:
    """Return the dense peak of a device in TFLOP/s where `matmul_dtype` has this share of the FLOPs, bf16 the rest."""
    if matmul_dtype is None:
        return kind.peak_tflops
    return 1 / (share / (find_matmul_tflops(kind, matmul_dtype) or kind.peak_tflops) + (1 - share) / kind.peak_tflops)


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


MAX_DEVICES = 1_000_000  # of a cluster


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
    if nodes * per_node > MAX_DEVICES:
        raise UserError(f"plan.topology={text}: expected at most {MAX_DEVICES:,} devices")
    kind = _load_kind(name)
    return Cluster(replace_network(kind, network) if network else kind, nodes, per_node)


def _load_kind(name: str) -> DeviceKind:
    known, path = read_device_kinds(), expand_home(name)
    if name in known:
        return known[name]
    if path.suffix != ".yaml":
        hint = did_you_mean(name, list(known))
        raise UserError(f"plan.topology: there is no kind {name}; kinds are {', '.join(known)}, or FILE.yaml{hint}")
    try:
        values = read_yaml(path.read_text())
    except OSError as error:
        raise UserError(f"plan.topology: {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UserError(f"plan.topology: {path} is not YAML") from None
    try:
        return read_kind(values)
    except UserError as error:  # a line for each value that is wrong
        raise UserError(f"plan.topology: {path}: {'; '.join(str(error).splitlines())}") from None


# Time of one collective, from first principles: bytes over the slowest link, a latency for each hop, and a start.
#
# A ring of n devices passes on n - 1 parts of each array, so every hop waits once for a latency. A tree, for all-reduce
# alone, has few hops, and each link carries the whole array twice:
#
#     ring    0 -> 1 -> 2 -> 3 -> 0      n - 1 hops (all-reduce: twice), (n - 1) / n of the bytes over each link
#     tree    3 -> 1 -> 0, 2 -> 0        log2(nodes) hops up and down,   all of the bytes over each link
#
# NCCL sends by one of three protocols: with a flag beside each 4 bytes (a quarter of the bandwidth, few microseconds a
# hop), with one in 128 bytes, or in large chunks (all of the bandwidth, many microseconds a hop). It takes what it
# predicts to be fastest for the size of the message, and so does this file, with NCCL's own constants
# (src/graph/tuning.cc, 2.1x to 2.2x).
#
# An example: all-gathers over the 8 H100 of a node. Each device sends 7/8 of the array at 371 GB/s, in 7 hops.
#
#     array      quarter of the bandwidth   120/128 of it     all of it          fastest
#     64 KiB        10.8 +   0.6 us          27.3 +  0.2 us    32.2 +  0.2 us      11 us
#     8 MiB         10.8 +  79.2 us          27.3 + 21.1 us    32.2 + 19.8 us      48 us
#     512 MiB       10.8 + 5,068 us          27.3 + 1,351 us   32.2 + 1,267 us    1.3 ms
#
# The first number of a pair is latency, the second is the time of the bytes.

MICRO = 1e-6
# Share of the data sheet's bandwidth that NCCL counts on: 20.6 of 25 GB/s of an NVLink of Hopper (src/graph/topo.h).
LINK_SHARE = 20.6 / 25
TREE_SHARE = 0.9  # a tree's share of the bandwidth of a ring
# Bytes that each of n devices in a group sends for one byte of the array, with a ring algorithm (Patarasuk and Yuan
# 2009). The array is the whole one that a group gathers, reduces or scatters; of an all-to-all and of a permute it is
# the array of one device. Of a ragged all-to-all these are the rows that a device sends where loads are equal.
BUS_FACTORS = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


@dataclass(frozen=True)
class Protocol:
    """A way of NCCL's to send: its share of a link's bandwidth, and its latencies in microseconds."""

    bandwidth: float
    ring_start: float
    ring_hop: float  # in a node
    ring_network_hop: float
    tree_start: float
    tree_hop: float
    tree_network_hop: float


PROTOCOLS = (
    Protocol(0.25, 6.6, 0.6, 2.7, 6.8, 0.6, 5.0),  # LL
    Protocol(120 / 128, 14.0, 1.9, 4.0, 14.0, 1.25, 8.5),  # LL128
    Protocol(1.0, 8.4, 3.4, 14.0, 8.4, 4.0, 14.0),  # Simple
)


@dataclass(frozen=True)
class Group:
    """Devices that take part in one collective."""

    size: int
    per_node: int  # of them, in each node

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.per_node)


def find_bandwidth(group: Group, kind: DeviceKind, node_size: int) -> float:
    """Return the bytes per second of the slowest link of a ring through the group.

    Devices of a node share its network cards: a group with several devices there has their shares together.
    """
    in_node = kind.link_gb_per_s * LINK_SHARE
    if group.num_nodes == 1:
        return in_node * 1e9
    share = kind.nics_per_node * kind.network.nic_gb_per_s * kind.network.share / node_size
    return min(in_node, group.per_node * share) * 1e9


def predict_collective_s(name: str, num_bytes: float, group: Group, kind: DeviceKind, node_size: int) -> float:
    """Return the seconds of one collective on an array of `num_bytes`, if nothing else is sent.

    `name` is one of `BUS_FACTORS`, which says what the array is; `node_size` are the devices of a node.
    """
    if group.size == 1:
        return 0.0
    speed = find_bandwidth(group, kind, node_size)
    hops, network_hops = count_hops(name, group)
    sent = BUS_FACTORS[name](group.size) * num_bytes
    best = math.inf
    for each in PROTOCOLS:
        network_hop = each.ring_network_hop + kind.network.hop_us
        wait_us = each.ring_start + hops * each.ring_hop + network_hops * network_hop
        best = min(best, wait_us * MICRO + sent / (each.bandwidth * speed))
        if name == "all-reduce":
            levels = math.ceil(math.log2(group.num_nodes))
            network_hop = each.tree_network_hop + kind.network.hop_us
            wait_us = each.tree_start + 2 * ((group.per_node - 1) * each.tree_hop + levels * network_hop)
            best = min(best, wait_us * MICRO + 2 * num_bytes / (each.bandwidth * TREE_SHARE * speed))
    return best


def count_hops(name: str, group: Group) -> tuple[int, int]:
    """Return the hops of a collective in nodes and between them: of a ring, or from each device to each other.

    A ring through 16 devices of 2 nodes has 15 hops: 14 in nodes and 1 between them. An all-reduce goes round twice.
    """
    crosses = group.num_nodes > 1
    if name in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return int(not crosses), int(crosses)
    rounds = 2 if name == "all-reduce" else 1
    return rounds * (group.size - group.num_nodes), rounds * (group.num_nodes - 1)
