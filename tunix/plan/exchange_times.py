"""Time of attention where devices share sequences: what `model.cp_exchange=auto` compares.

    ulysses   everything waits for heads and tokens to be swapped; then all devices compute alike, with any kernel
    ring      keys and values travel while blocks are computed; all devices wait for the one with the last tokens

    ring of 3      step 0     step 1     step 2
    device 0       own keys   waits      waits
    device 1       own keys   keys of 0  waits
    device 2       own keys   keys of 1  keys of 0     a step takes as long as its block, or as its transfers

The last device of a ring computes almost twice the mean; with Ulysses all devices are alike. So a ring is faster where
its few key/value heads travel in less time than all heads, and attention is a small part of the step: windows, short
sequences on many devices, a slow network.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tunix.base.dotted import import_object
from tunix.config import Config
from tunix.config.exchange_tables import CP_EXCHANGES
from tunix.config.kernel_tables import RING_KERNELS
from tunix.config.mixers import HeadSizes
from tunix.costs.transfers import LocalHeads, Transfer, measure_heads, predict_seconds, swap_heads
from tunix.models.attention import choose_query_block
from tunix.models.chips import find_row_of_chip
from tunix.models.exchanges import choose_exchange, is_in_blocks
from tunix.models.flash_blocks import BLOCKS, blocks_for, computed_pairs, computed_pairs_in_ring
from tunix.models.kernels import choose_kernel
from tunix.models.ring_plain import chunk_size
from tunix.plan.assumptions import HBM_SHARE, KERNEL_SHARE
from tunix.plan.topology import PLATFORM, Cluster
from tunix.sharding.dims import axis_names, token_axes
from tunix.training.mesh_choices import build_layout, read_remat, settle_remat


class PairTimes(NamedTuple):
    """Seconds for one pair of a query and a key of one head."""

    forward: float
    backward: float


def settle_exchange(cfg: Config, sizes: dict[str, int], cluster: Cluster) -> tuple[Config, str]:
    """Return the config with the faster exchange in the place of `model.cp_exchange=auto`, and the reason.

    The config is returned as it is, and the text is empty, where the sizes of the model or the kernel leave no choice
    (`choose_exchange`).
    """
    model = cfg.model
    is_open = model.cp_exchange == "auto" and model.attention in RING_KERNELS
    if not is_open or choose_exchange(model, sizes).name != "ulysses":
        return cfg, ""
    # Ulysses is what the sizes allow; whether a ring is faster depends on the speeds of devices and links.
    compared = [name for name, each in CP_EXCHANGES.items() if each.time is not None]
    times = {name: predict_attention_s(cfg, name, sizes, cluster) for name in compared}
    name = min(times, key=lambda name: times[name])
    others = [f"by {other} {times[other]:.3g} s" for other in compared if other != name]
    reason = (
        f"model.cp_exchange={name}: attention is predicted to take {times[name]:.3g} s of a step on {cluster}, "
        f"and {', '.join(others)}"
    )
    return cfg.model_copy(update={"model": model.model_copy(update={"cp_exchange": name})}), reason


def predict_attention_s(cfg: Config, exchange: str, sizes: dict[str, int], cluster: Cluster) -> float:
    """Return the seconds that all attention of one step takes on the slowest device, with what it waits for.

    `exchange` is a key of `CP_EXCHANGES` with a `time`.
    """
    time_of_layer = import_object(CP_EXCHANGES[exchange].time or "")
    return sum(
        place.microbatches * num_layers * time_of_layer(place, window)
        for place in _list_places(cfg, sizes, cluster)
        for window, num_layers in place.windows.items()
    )


def predict_beyond_mean_s(cfg: Config, sizes: dict[str, int], cluster: Cluster, flops_per_s: float) -> float:
    """Return the seconds by which the last device of a ring computes longer than the mean device at `flops_per_s`.

    0 where keys do not come in blocks. The mean is what `Costs.flops` counts.
    """
    if not is_in_blocks(choose_exchange(cfg.model, sizes).name):
        return 0.0
    return sum(_predict_beyond_mean_s(place, flops_per_s) for place in _list_places(cfg, sizes, cluster))


def _predict_beyond_mean_s(place: "Place", flops_per_s: float) -> float:
    """Return `predict_beyond_mean_s` of the layers of one place."""
    length, heads, times = place.cfg.training.seq_len, place.heads, _predict_pair_times(place, place.kernel)
    (flops, _), total = _count_pair_flops(place.kind), 0.0
    for window, num_layers in place.windows.items():
        slowest = float(np.sum(_count_pairs(place, window)))
        mean = float(np.sum(np.minimum(np.arange(1, length + 1), window))) / heads.num_devices
        # What the ring's slowest device computes, less what `Costs.flops` has counted for the mean device already.
        seconds_of_pair = (1 + place.again) * times.forward + times.backward
        total += num_layers * (slowest * seconds_of_pair - mean * (3 + place.again) * flops / flops_per_s)
    return place.microbatches * heads.rows * heads.queries * total


class Place(NamedTuple):
    """A mesh of a cluster, with what attention with heads of one kind does there for one microbatch."""

    cfg: Config
    sizes: dict[str, int]
    cluster: Cluster
    kind: HeadSizes
    heads: LocalHeads
    kernel: str  # of `choose_kernel`
    again: float  # times that the forward pass runs once more
    microbatches: float  # of a step, with those of the bubble of a pipeline
    windows: Counter[int]  # layers by the tokens that they attend to


def _list_places(cfg: Config, sizes: dict[str, int], cluster: Cluster) -> Iterator[Place]:
    """Yield the place of each kind of heads that the model has."""
    cfg = settle_remat(cfg, PLATFORM)
    model, names = cfg.model, axis_names()
    axis_types, device = (AxisType.Explicit,) * len(names), AbstractDevice(cluster.kind.name, None, PLATFORM)
    lengths = tuple(sizes[axis] for axis in names)
    # A mesh with a described device: kernels are those that the plan's devices would run.
    mesh = AbstractMesh(lengths, names, axis_types=axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        layout = build_layout(cfg, mesh)
        heads = {kind: measure_heads(cfg, kind, layout, mesh) for kind in model.kinds_of_heads}
        kernels = {
            kind: choose_kernel(model.attention, kind.dim, layout.compute, model.attention_options).name
            for kind in model.kinds_of_heads
        }
    pipeline = cfg.training.pipeline(sizes)
    again = read_remat(cfg.training).computes_again("attention") + pipeline.runs_again
    microbatches = pipeline.num_microbatches * pipeline.ticks_per_part
    windows = model.list_windows(cfg.training.seq_len)
    for kind, layers in model.kinds_of_heads.items():
        num_layers = Counter(windows[layer] for layer in layers)
        yield Place(cfg, sizes, cluster, kind, heads[kind], kernels[kind], again, microbatches, num_layers)


def time_of_ulysses(place: Place, window: int) -> float:
    """Return the seconds of one layer for one microbatch: heads are swapped, and a share of them is computed."""
    cfg, heads, kind = place.cfg, place.heads, place.cluster.kind
    length, blocks = cfg.training.seq_len, find_row_of_chip(BLOCKS, kind.name)
    swap = swap_heads(cfg, heads, cfg.training.pipeline(place.sizes).runs_again)
    if place.kernel == "flash" and blocks is not None:
        pairs = computed_pairs(length, [window], blocks_for(blocks, place.kind.dim).forward)
    else:  # the triangle of blocks of `plain`, whose windows skip nothing on GPUs
        pairs = (length + min(length, choose_query_block(length))) * length / 2
    times, count = _predict_pair_times(place, place.kernel), pairs * heads.rows * heads.queries / heads.num_devices
    computing_s = count * ((1 + place.again) * times.forward + times.backward)
    return computing_s + predict_seconds(swap, place.sizes, kind, place.cluster.per_node)


def time_of_ring(place: Place, window: int) -> float:
    """Return the seconds of one layer for one microbatch, step by step on the device with the last tokens."""
    heads, times = place.heads, _predict_pair_times(place, place.kernel)
    pairs = _count_pairs(place, window) * heads.rows * heads.queries

    def hop(itemsize: int) -> float:
        """Return the seconds in which keys and values, or their gradients, come to the next device."""
        transfer = Transfer("collective-permute", token_axes(), 2 * heads.numbers * heads.keys * itemsize, count=2)
        return predict_seconds(transfer, place.sizes, place.cluster.kind, place.cluster.per_node)

    keys, gradients = hop(heads.itemsize), hop(4)
    # In step j the keys of step j + 1 travel, and backward the gradients of step j - 1. The last ones go home alone.
    travels = np.full(len(pairs), keys)
    travels[-1] = 0.0
    forward = float(np.sum(np.maximum(pairs * times.forward, travels)))
    travels[1:] += gradients
    backward = float(np.sum(np.maximum(pairs * times.backward, travels))) + gradients
    return (1 + place.again) * forward + backward


def _count_pairs(place: Place, window: int) -> np.ndarray:
    """Return what `count_pairs_in_ring` does, for the kernel of this place."""
    length, num_devices = place.cfg.training.seq_len, place.heads.num_devices
    blocks = find_row_of_chip(BLOCKS, place.cluster.kind.name)
    if place.kernel != "flash" or blocks is None:
        return count_pairs_in_ring(length, window, num_devices)
    block = blocks_for(blocks, place.kind.dim).forward
    return computed_pairs_in_ring(length // num_devices, num_devices, window, block)


def count_pairs_in_ring(length: int, window: int, num_devices: int) -> np.ndarray:
    """Return the pairs of a query and a key that the device with the last tokens computes in each step, [devices].

    The products are XLA's own operations: queries skip a block of keys together, a chunk at a time (`ring_plain.py`).
    """
    own = length // num_devices
    size = chunk_size(own)
    begins = np.arange(length - own, length, size)
    first_block = np.maximum(begins - window + 1, 0) // own  # that a chunk of queries sees
    blocks = np.arange(num_devices)[::-1]  # in the order of the steps
    return size * own * np.sum(first_block <= blocks[:, None], axis=1).astype(float)


def _count_pair_flops(kind: HeadSizes) -> tuple[int, int]:
    """Return the FLOPs of a pair of one head, forward and backward.

    Forward there are two products, of which one has the width of keys and one that of values; backward there are three
    and two.
    """
    return 2 * (kind.dim + kind.value_dim), 6 * kind.dim + 4 * kind.value_dim


def _predict_pair_times(place: Place, kernel: str) -> PairTimes:
    """Return the times of a kernel on a kind of device.

    Scores of the kernel `xla` pass through memory. Forward they are written, read for their maximum and read for the
    exponentials, float32; these are written and read by a product in the dtype of products. Backward two arrays are
    written and read once, float32; of the two arrays made of them, one is read by one product and one by two.
    """
    kind, item, flops = place.cluster.kind, place.heads.itemsize, _count_pair_flops(place.kind)
    products = kind.peak_tflops * 1e12 * kind.efficiency
    if kernel != "xla":
        return PairTimes(*(each / (products * KERNEL_SHARE) for each in flops))
    num_bytes = 3 * 4 + 2 * item, 4 * 4 + 5 * item
    memory = kind.hbm_gb_per_s * 1e9 * HBM_SHARE
    return PairTimes(*(max(a / products, b / memory) for a, b in zip(flops, num_bytes, strict=True)))
