"""Checks between processes: clocks, shared files, versions, and the speed of the links between devices."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tunix.base.errors import UserError
from tunix.cli.compose import Job
from tunix.costs.devices import find_kind
from tunix.costs.links import BUS_FACTORS
from tunix.costs.transfers import Transfer, predict_seconds
from tunix.doctor.findings import Finding, Status
from tunix.doctor.machine import find_existing
from tunix.processes import peers
from tunix.processes.shared_disk import find_blind
from tunix.sharding.dims import DIMS, LAYERS, keeping_axes, token_axes

SKEW_S = 1.0  # clocks may differ by so many seconds
SLOW = 1.5  # a process is slow if it takes this many times the median
PAYLOAD_MIB = {"cpu": 4, "gpu": 256}  # size of the whole array that a group of devices gathers or reduces
SECONDS = 2.0  # one measurement is repeated for about so long, but for 3 to 20 calls
COLLECTIVES: dict[str, Callable] = {
    "all-reduce": lambda x, axis: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis: jax.lax.all_gather(x, axis, axis=1, tiled=True),
    "reduce-scatter": lambda x, axis: jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
    "all-to-all": lambda x, axis: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=1, tiled=True),
    "collective-permute": lambda x, axis: jax.lax.ppermute(x, axis, _ring(jax.lax.axis_size(axis))),
}
# The axes over which a step runs a collective; one that is not named here runs over every axis.
AXES = {
    "reduce-scatter": keeping_axes(),  # gradients, and sums of experts' results
    "all-to-all": token_axes(),  # attention exchanges heads and tokens
    "collective-permute": (*DIMS[LAYERS].weight_axes, *token_axes()),  # rows between stages; keys round a ring
}


@dataclass(frozen=True)
class Link:
    """Measured speed of one kind of collective over one mesh axis."""

    axis: str
    group_size: int
    collective: str
    num_bytes: int
    time_s: float  # on the median process
    slowest_process: int
    slowest_s: float
    bus_gb_per_s: float
    predicted_s: float | None  # by the data sheet of the devices; None if their kind is not known


def compare(job: Job, facts: dict[str, Any]) -> Iterator[Finding]:
    """Compare the facts of all processes, their clocks, and the files that they see.

    Every process must call this; every process gets all findings.
    """
    facts_by_rank = [json.loads(text) for text in peers.gather(json.dumps(facts), "facts")]
    for key in facts:
        ranks: dict[str, list[int]] = {}  # by value
        for rank, values in enumerate(facts_by_rank):
            ranks.setdefault(str(values.get(key)), []).append(rank)
        if len(ranks) > 1:
            text = "; ".join(f"{value} on processes {_format_ranks(numbers)}" for value, numbers in ranks.items())
            yield Finding("same everywhere", "error", f"{key} differs: {text}")
    yield _compare_clocks()
    yield _check_files(find_existing(job.run_dir), must=job.config.distributed.shared_filesystem is True)


def _format_ranks(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _compare_clocks() -> Finding:
    peers.barrier("clocks", 60)  # all processes leave a barrier within milliseconds, and read their clocks then
    times = [float(text) for text in peers.gather(repr(time.time()), "clocks")]
    apart = max(times) - min(times)
    if apart <= SKEW_S:
        return Finding("clocks", "ok", f"at most {apart:.3f} s apart")
    # Of many hosts the one with the wrong clock is far from the median.
    wrong = times.index(max(times, key=lambda time_s: abs(time_s - float(np.median(times)))))
    return Finding("clocks", "warning", f"{apart:.1f} s apart, process {wrong} most; logs will mislead: start NTP")


def _check_files(folder: Path, must: bool) -> Finding:
    """Check that all processes see a file that process 0 makes; it is an error if they `must`, else a warning."""
    where = Path(peers.agree(str(folder), "probe folder"))
    try:
        blind = find_blind(where)
    except UserError as error:
        return Finding("files", "error", str(error))
    if blind:
        advice = "put hydra.run.dir on a disk that all processes share, or process 0 keeps the checkpoints of all"
        text = f"{where}: not seen by processes {_format_ranks(blind)}; {advice}"
        return Finding("files", "error" if must else "warning", text)
    return Finding("files", "ok", f"{where} is seen by {jax.process_count()} process(es)")


def find_slow_processes() -> Iterator[Finding]:
    """Time a matrix product on each process alone: in training all processes wait for the slowest one."""
    x = jax.device_put(jnp.ones((1024, 1024), jnp.float32), jax.local_devices()[0])
    product = jax.jit(lambda x: x @ x)
    time_s = _time(lambda: product(x))
    times = [float(text) for text in peers.gather(repr(time_s), "times")]
    middle = float(np.median(times))
    slowest = int(np.argmax(times))
    status: Status = "warning" if times[slowest] > SLOW * middle else "ok"
    text = f"a product takes {1e3 * middle:.2f} ms"
    if len(times) > 1:
        text += f"; process {slowest} is slowest, {1e3 * times[slowest]:.2f} ms"
    yield Finding("arithmetic", status, text)


def measure_links(mesh: Mesh, per_node: int) -> Iterator[Link]:
    """Measure the links along each mesh axis of more than one device; all groups of an axis communicate at once."""
    for axis in reversed(mesh.axis_names):  # the last axis has the fastest links
        for collective in COLLECTIVES:
            if mesh.shape[axis] > 1 and axis in AXES.get(collective, mesh.axis_names):
                yield _measure(mesh, axis, collective, per_node)


def _ring(size: int) -> list[tuple[int, int]]:
    """Return pairs of sender and receiver: each device sends to the next one."""
    return [(place, (place + 1) % size) for place in range(size)]


def _measure(mesh: Mesh, axis: str, collective: str, per_node: int) -> Link:
    # Each device has one row of float32 numbers. A gather makes `PAYLOAD_MIB` of the rows of a group; every other
    # collective begins with so much on each device.
    #     all-gather:  [1, n / size] -> [1, n]      reduce-scatter:  [1, n] -> [1, n / size]      n = payload / 4 bytes
    size, everywhere = mesh.shape[axis], PartitionSpec(mesh.axis_names)
    share = PAYLOAD_MIB.get(jax.default_backend(), 64) * 2**20 // 4 // size
    num_bytes = 4 * share * size
    if collective != "all-gather":
        share *= size
    x = jax.jit(lambda: jnp.ones((mesh.size, share)), out_shardings=NamedSharding(mesh, everywhere))()
    run_collective = jax.jit(
        jax.shard_map(
            lambda x: COLLECTIVES[collective](x, axis),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
    )
    time_s = _time(lambda: run_collective(x))
    times = [float(text) for text in peers.gather(repr(time_s), "times")]
    middle, slowest = float(np.median(times)), int(np.argmax(times))
    kind = find_kind(mesh.devices.flat[0].device_kind)
    predicted = (
        predict_seconds(Transfer(collective, (axis,), num_bytes), dict(mesh.shape), kind, per_node) if kind else None
    )
    bus = num_bytes / middle / 1e9 * BUS_FACTORS[collective](size)
    return Link(axis, size, collective, num_bytes, middle, slowest, times[slowest], bus, predicted)


def _time(work: Callable[[], jax.Array]) -> float:
    """Return the median seconds of a call. Every process makes the same number of calls: a call may be a collective."""
    jax.block_until_ready(work())  # the first call compiles, and opens connections
    began = time.perf_counter()
    jax.block_until_ready(work())
    once = max(1e-6, time.perf_counter() - began)
    calls = int(peers.agree(str(min(20, max(3, math.floor(SECONDS / once)))), "calls"))
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    return float(np.median(times))  # not the mean: one call that the system interrupts may take ten times as long


def judge(links: list[Link]) -> Iterator[Finding]:
    """Yield a finding for each link; a link that is slower than others, or than predicted, gets a warning."""
    for link in links:
        text = (
            f"{link.collective} over {link.axis} ({link.group_size} devices, {link.num_bytes / 2**20:.0f} MiB): "
            f"{link.bus_gb_per_s:.3g} GB/s on the bus"
        )
        status: Status = "ok"
        if link.slowest_s > SLOW * link.time_s:
            status = "warning"
            text += f"; the groups of process {link.slowest_process} take {link.slowest_s / link.time_s:.1f} x as long"
        if link.predicted_s and link.time_s > 2 * link.predicted_s:
            status = "warning"
            text += f"; {link.time_s / link.predicted_s:.1f} x what its links allow"
        yield Finding("bandwidth", status, text)
    if len({link.axis for link in links}) > 1:
        slowest = min(links, key=lambda link: link.bus_gb_per_s)
        yield Finding("bandwidth", "ok", f"the slowest axis is {slowest.axis}")
