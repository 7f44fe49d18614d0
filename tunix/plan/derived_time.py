"""Time of a step that is not compiled, derived from its FLOPs, its bytes and its transfers.

Arithmetic is matrix products, kernels of attention and of experts, and passes through memory (costs/passes.py).
Transfers that overlap it cost nothing, until they take longer than the layers of their pass, forward or backward, on
NVLink or on the network. For the others arithmetic waits. A pass with 100 ms of arithmetic, 120 ms of transfers that
overlap it and 20 ms of others takes 140 ms; 40 ms are exposed:

    arithmetic    |==================== 100 ms ====================|
    overlapping   |========================= 120 ms =========================|
    others                                                                   |= 20 ms =|
    exposed                                                        |===== 40 ms =======|
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from tunix.base.dotted_path import import_object
from tunix.config import Config
from tunix.config.layers import HeadSizes
from tunix.costs.communication import LocalHeads, Transfer, find_group, measure_heads, predict_seconds, swap_heads
from tunix.costs.compiled_time import ATTENTION_KERNELS, StepTime
from tunix.costs.devices import HBM_SHARE, KERNEL_SHARE, PLATFORM, Cluster, compute_peak_tflops
from tunix.costs.step import Costs
from tunix.models import kernels
from tunix.models.attention import select_query_block
from tunix.models.context_parallel import chunk_size, is_in_blocks, select_exchange
from tunix.models.table import CP_EXCHANGES, RING_KERNELS
from tunix.sharding.table import axis_names, token_axes
from tunix.training.choices import Choices, select

# Time of attention where devices share sequences: what `model.cp_exchange=auto` compares.
#
#     ulysses   everything waits for heads and tokens to be swapped; then all devices compute alike, with any kernel
#     ring      keys and values travel while blocks are computed; all devices wait for the one with the last tokens
#
#     ring of 3      step 0     step 1     step 2
#     device 0       own keys   waits      waits
#     device 1       own keys   keys of 0  waits
#     device 2       own keys   keys of 1  keys of 0     a step takes as long as its block, or as its transfers
#
# The last device of a ring computes almost twice the mean; with Ulysses all devices are alike. So a ring is faster
# where its few key/value heads travel in less time than all heads, and attention is a small part of the step: windows,
# short sequences on many devices, a slow network.


class PairTimes(NamedTuple):
    """Seconds for one pair of a query and a key of one head."""

    forward: float
    backward: float


def resolve_exchange(cfg: Config, sizes: dict[str, int], cluster: Cluster) -> tuple[Config, str]:
    """Return the config with the faster exchange in the place of `model.cp_exchange=auto`, and the reason.

    The config is returned as it is, and the text is empty, where the sizes of the model or the kernel leave no choice
    (`select_exchange`).
    """
    model = cfg.model
    is_open = model.cp_exchange == "auto" and model.attention in RING_KERNELS and not model.future_keys
    if not is_open or select_exchange(model, sizes, "auto").name != "ulysses":
        return cfg, ""
    # Ulysses is what the sizes allow; whether a ring is faster depends on the speeds of devices and links.
    # Compared are the seconds of all attention of one step on the slowest device, with what it waits for.
    cases, times = list(_list_cases(cfg, sizes, cluster)), {}
    for name, each in CP_EXCHANGES.items():
        if each.time is not None:
            time_of_layer = import_object(each.time)
            times[name] = sum(
                case.microbatches * num_layers * time_of_layer(case, window)
                for case in cases
                for window, num_layers in case.windows.items()
            )
    name = min(times, key=lambda name: times[name])
    others = [f"by {other} {seconds:.3g} s" for other, seconds in times.items() if other != name]
    reason = (
        f"model.cp_exchange={name}: attention is predicted to take {times[name]:.3g} s of a step on {cluster}, "
        f"and {', '.join(others)}"
    )
    return cfg.model_copy(update={"model": model.model_copy(update={"cp_exchange": name})}), reason


class AttentionWork(NamedTuple):
    """Attention's scores and results in one step, on the device that computes longest."""

    counted_flops: float  # that `Costs.flops` has for it
    seconds: float  # that its kernels take


def derive_attention(cfg: Config, sizes: dict[str, int], cluster: Cluster) -> AttentionWork:
    """Return the work of attention: of a ring that of the device with the last tokens, for which all others wait."""
    counted_flops, seconds, length = 0.0, 0.0, cfg.training.seq_len
    in_blocks = is_in_blocks(select_exchange(cfg.model, sizes, cfg.model.cp_exchange).name)
    for case in _list_cases(cfg, sizes, cluster):
        times, passes = _predict_pair_times(case), 3 + case.recompute_products
        for window, num_layers in case.windows.items():
            mean = float(np.sum(np.minimum(np.arange(1, length + 1), window))) / case.heads.num_devices
            pairs = float(np.sum(_count_pairs(case, window))) if in_blocks else _count_pairs_of_rows(case, window)
            layers = case.microbatches * case.heads.rows * case.heads.queries * num_layers
            counted_flops += layers * mean * passes * _count_pair_flops(case.kind)[0]
            seconds += layers * pairs * ((1 + case.recompute) * times.forward + times.backward)
    return AttentionWork(counted_flops, seconds)


class AttentionCase(NamedTuple):
    """A mesh of a cluster, with what attention with heads of one kind does there for one microbatch."""

    cfg: Config
    sizes: dict[str, int]
    cluster: Cluster
    kind: HeadSizes
    heads: LocalHeads
    choices: Choices
    recompute: float  # times that the forward pass runs once more
    recompute_products: float  # the same of products of weights
    microbatches: float  # of a step, with those of the bubble of a pipeline
    windows: Counter[int]  # layers by the tokens that they attend to

    @property
    def kernel(self) -> str:
        return self.choices.layout.kernel_of(self.kind.dim_names[0])

    @property
    def flash_blocks(self) -> dict[int, kernels.FlashBlocks] | None:
        """Blocks of the kernel `flash` on this kind of device; None where another kernel runs."""
        blocks = kernels.find_row_of_chip(kernels.FLASH_BLOCKS, self.cluster.kind.name)
        return blocks if self.kernel == "flash" else None


def _list_cases(cfg: Config, sizes: dict[str, int], cluster: Cluster) -> Iterator[AttentionCase]:
    """Yield a case for each kind of heads that the model has."""
    model, names = cfg.model, axis_names()
    axis_types, device = (AxisType.Explicit,) * len(names), AbstractDevice(cluster.kind.name, None, PLATFORM)
    lengths = tuple(sizes[axis] for axis in names)
    # A mesh with a described device: kernels are those that the plan's devices would run.
    mesh = AbstractMesh(lengths, names, axis_types=axis_types, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        choices = select(cfg, mesh)
        heads = {kind: measure_heads(model, kind, choices, mesh) for kind in model.head_kinds}
    pipeline = choices.pipeline
    runs = pipeline.recompute_runs
    recompute, of_products = (choices.remat.recompute_fraction(name) + runs for name in ("attention", "product"))
    microbatches = pipeline.num_microbatches * pipeline.iterations_per_microbatch
    windows = model.list_windows(cfg.training.seq_len)
    for kind, layers in model.head_kinds.items():
        num_layers = Counter(windows[layer] for layer in layers)
        again = recompute, of_products
        yield AttentionCase(cfg, sizes, cluster, kind, heads[kind], choices, *again, microbatches, num_layers)


def time_of_ulysses(case: AttentionCase, window: int) -> float:
    """Return the seconds of one layer for one microbatch: heads are swapped, and a share of them is computed."""
    heads, times = case.heads, _predict_pair_times(case)
    swap = swap_heads(case.choices.remat, heads, case.choices.pipeline.recompute_runs)
    count = _count_pairs_of_rows(case, window) * heads.rows * heads.queries
    computing_s = count * ((1 + case.recompute) * times.forward + times.backward)
    return computing_s + predict_seconds(swap, case.sizes, case.cluster.kind, case.cluster.per_node)


def _count_pairs_of_rows(case: AttentionCase, window: int) -> float:
    """Return the pairs that the kernel computes in a row, for each device that shares it: whole rows of some heads."""
    length, blocks = case.cfg.training.seq_len, case.flash_blocks
    if blocks is not None:
        pairs = kernels.computed_pairs(length, [window], kernels.blocks_for(blocks, case.kind.dim).forward)
    else:  # the triangle of blocks of the kernel `xla`, whose windows skip nothing on GPUs
        pairs = (length + min(length, select_query_block(length))) * length / 2
    return pairs / case.heads.num_devices


def time_of_ring(case: AttentionCase, window: int) -> float:
    """Return the seconds of one layer for one microbatch, step by step on the device with the last tokens."""
    heads, times = case.heads, _predict_pair_times(case)
    pairs = _count_pairs(case, window) * heads.rows * heads.queries

    def hop(itemsize: int) -> float:
        """Return the seconds in which keys and values, or their gradients, come to the next device."""
        transfer = Transfer("collective-permute", token_axes(), 2 * heads.numbers * heads.keys * itemsize, count=2)
        return predict_seconds(transfer, case.sizes, case.cluster.kind, case.cluster.per_node)

    keys, gradients = hop(heads.itemsize), hop(4)
    # In step j the keys of step j + 1 travel, and backward the gradients of step j - 1. The last ones go home alone.
    travels = np.full(len(pairs), keys)
    travels[-1] = 0.0
    forward = float(np.sum(np.maximum(pairs * times.forward, travels)))
    travels[1:] += gradients
    backward = float(np.sum(np.maximum(pairs * times.backward, travels))) + gradients
    return (1 + case.recompute) * forward + backward


def _count_pairs(case: AttentionCase, window: int) -> np.ndarray:
    """Return what `count_pairs_in_ring` does, for the kernel of this case."""
    length, num_devices, blocks = case.cfg.training.seq_len, case.heads.num_devices, case.flash_blocks
    if blocks is None:
        return count_pairs_in_ring(length, window, num_devices)
    block = kernels.blocks_for(blocks, case.kind.dim).forward
    return kernels.computed_pairs_in_ring(length // num_devices, num_devices, window, block)


def count_pairs_in_ring(length: int, window: int, num_devices: int) -> np.ndarray:
    """Return the pairs of a query and a key that the device with the last tokens computes in each step, [devices].

    The products are XLA's own operations: queries skip a block of keys together, a chunk at a time
    (`models/ring.py`).
    """
    local = length // num_devices
    size = chunk_size(local)
    starts = np.arange(length - local, length, size)
    first_block = np.maximum(starts - window + 1, 0) // local  # that a chunk of queries sees
    blocks = np.arange(num_devices)[::-1]  # in the order of the steps
    return size * local * np.sum(first_block <= blocks[:, None], axis=1).astype(float)


def _count_pair_flops(kind: HeadSizes) -> tuple[int, int]:
    """Return the FLOPs of a pair of one head, forward and backward.

    Forward there are two products, of which one has the width of keys and one that of values; backward there are four
    and three, because two kernels compute the scores and their gradients.
    """
    return 2 * (kind.dim + kind.value_dim), 8 * kind.dim + 6 * kind.value_dim


def _predict_pair_times(case: AttentionCase) -> PairTimes:
    """Return the times of the kernel on the kind of device.

    Scores of the kernel `xla` pass through memory. Forward they are written, read for their maximum and read for the
    exponentials, float32; these are written and read by a product in the dtype of products. Backward two arrays are
    written and read once, float32; of the two arrays made of them, one is read by one product and one by two.
    """
    kind, item, flops = case.cluster.kind, case.heads.itemsize, _count_pair_flops(case.kind)
    matmul_flops_per_s = kind.peak_tflops * 1e12 * kind.efficiency
    if case.flash_blocks is not None:
        dim = kernels.padded_dim(case.flash_blocks, case.kind.dim)
        forward, *backward = (
            2 * dim * kernel.num_matmul / (kernel.shares[dim] * matmul_flops_per_s)
            for kernel in ATTENTION_KERNELS.values()
        )
        return PairTimes(forward, sum(backward))
    if case.kernel != "xla":
        return PairTimes(*(each / (matmul_flops_per_s * KERNEL_SHARE) for each in flops))
    num_bytes = 3 * 4 + 2 * item, 4 * 4 + 5 * item
    memory = kind.hbm_gb_per_s * 1e9 * HBM_SHARE
    return PairTimes(*(max(a / matmul_flops_per_s, b / memory) for a, b in zip(flops, num_bytes, strict=True)))


def derive_time(cfg: Config, sizes: dict[str, int], costs: Costs, cluster: Cluster) -> StepTime:
    """Return the predicted time of a step with these costs on a mesh of these sizes."""
    compute_s, outside_s = _derive_compute_s(cfg, sizes, costs, cluster)
    forward, waited_s = costs.model_flops / costs.flops / 3, 0.0
    shares = np.array([forward, 1 - forward])  # of arithmetic: backward has twice as much, and what is computed again
    links = [Link(), Link()]  # in a node, and between nodes
    for transfer in costs.transfers:
        if seconds := predict_seconds(transfer, sizes, cluster.kind, cluster.per_node):
            link = links[find_group(transfer.axes, sizes, cluster.per_node).num_nodes > 1]
            link.put(transfer, seconds)
            waited_s += (1 - transfer.overlaps) * seconds
    behind_s = sum(link.wait_behind_others(compute_s) for link in links)
    slowest_s = np.max([link.in_passes for link in links], 0)
    exposed_s = waited_s + behind_s + float(np.sum(np.maximum(0.0, slowest_s - shares * (compute_s - outside_s))))
    communication_s = waited_s + sum(float(link.in_passes.sum()) for link in links)
    # Arithmetic waits at most as long as links are busy.
    return StepTime(compute_s, min(exposed_s, communication_s), communication_s, flops=costs.flops)


class Link:
    """Transfers of one kind of link in a step: those that overlap arithmetic, and those for which it waits."""

    def __init__(self) -> None:
        self.in_passes = np.zeros(2)  # seconds of transfers that overlap, forward and backward
        self.squares = 0.0  # sum of the squares of the seconds of each of them
        self.waited: dict[tuple, float] = {}  # executions of the others; XLA joins small ones of a kind in a layer

    def put(self, transfer: Transfer, seconds: float) -> None:
        """Add a transfer that takes so many seconds in all."""
        forward = 0.5 if transfer.kind == "all-gather" else 0.0  # sums are those of gradients
        self.in_passes += transfer.overlaps * seconds * np.array([forward, 1 - forward])
        self.squares += transfer.overlaps * seconds**2 / transfer.count
        key = transfer.kind, transfer.axes
        self.waited[key] = max(self.waited.get(key, 0.0), (1 - transfer.overlaps) * transfer.count)

    def wait_behind_others(self, compute_s: float) -> float:
        """Return the seconds in which transfers that arithmetic waits for wait for one before them on the link.

        It is under way as often as the link is busy, and half of it is left; long ones are met more often.
        """
        if not (overlapping_s := float(self.in_passes.sum())):
            return 0.0
        left_s = self.squares / overlapping_s / 2
        return sum(self.waited.values()) * min(1.0, overlapping_s / compute_s) * left_s


def _derive_compute_s(cfg: Config, sizes: dict[str, int], costs: Costs, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of arithmetic, and those of them outside of layers: the update and the products of logits."""
    kind, num_bytes, fused = cluster.kind, costs.num_bytes, costs.fused
    attention = derive_attention(cfg, sizes, cluster)
    bytes_per_s, bf16 = kind.hbm_gb_per_s * 1e9 * HBM_SHARE, kind.peak_tflops * 1e12 * kind.efficiency
    # The update reads and writes all of the state once, and reads gradients twice: their norm comes first.
    update_s = 2 * (num_bytes["weights"] + num_bytes["optimizer"] + costs.gradient_bytes) / bytes_per_s
    flops = costs.flops - fused.counted_flops - attention.counted_flops
    share = min(1.0, costs.matmul_share * costs.flops / flops)  # attention has none of products of 8 bits
    peak = compute_peak_tflops(kind, cfg.training.matmul_dtype, share)
    matmul_s = flops / (peak * 1e12 * kind.efficiency) + fused.flops / (bf16 * KERNEL_SHARE)
    logits_s = 6.0 * cfg.num_outputs * cfg.model.embed_dim * costs.tokens_per_step / cluster.num_devices / bf16
    passes_s = (costs.pass_bytes + fused.num_bytes) / bytes_per_s
    return matmul_s + attention.seconds + passes_s + update_s, update_s + logits_s
