"""Time of one collective, from first principles: bytes over the slowest link, a latency for each hop, and a start.

A ring of n devices passes on n - 1 parts of each array, so every hop waits once for a latency. A tree, for all-reduce
alone, has few hops, and each link carries the whole array twice:

    ring    0 -> 1 -> 2 -> 3 -> 0      n - 1 hops (all-reduce: twice), (n - 1) / n of the bytes over each link
    tree    3 -> 1 -> 0, 2 -> 0        log2(nodes) hops up and down,   all of the bytes over each link

NCCL sends by one of three protocols: with a flag beside each 4 bytes (a quarter of the bandwidth, few microseconds a
hop), with one in 128 bytes, or in large chunks (all of the bandwidth, many microseconds a hop). It takes what it
predicts to be fastest for the size of the message, and so does this file, with NCCL's own constants
(src/graph/tuning.cc, 2.1x to 2.2x).

An example: all-gathers over the 8 H100 of a node. Each device sends 7/8 of the array at 371 GB/s, in 7 hops.

    array      quarter of the bandwidth   120/128 of it     all of it          fastest
    64 KiB        10.8 +   0.6 us          27.3 +  0.2 us    32.2 +  0.2 us      11 us
    8 MiB         10.8 +  79.2 us          27.3 + 21.1 us    32.2 + 19.8 us      48 us
    512 MiB       10.8 + 5,068 us          27.3 + 1,351 us   32.2 + 1,267 us    1.3 ms

The first number of a pair is latency, the second is the time of the bytes.
"""

import math
from dataclasses import dataclass

from tunix.config import DeviceKind

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
