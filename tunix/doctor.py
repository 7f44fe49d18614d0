"""Check machine, software and links for a run: `python -m tunix.doctor [group=option] [key=value] [--json]`.

Takes the keys of training. Started by a launcher, as training is, it checks all processes and the links between them.
Exit code 0; 1 if something would make training fail; 2 for an error in the command line.
"""

import difflib
import json
import math
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import psutil
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from packaging.specifiers import SpecifierSet
from rich.console import Console

from tunix.base.buckets import is_address
from tunix.base.config_types import CONF
from tunix.base.errors import PeerLost, UserError, did_you_mean, mask_variables, name_first
from tunix.base.files import find_existing
from tunix.config import command_line, compose
from tunix.config.compose import Job, add_search_path
from tunix.costs.communication import Transfer, predict_seconds
from tunix.costs.devices import BUS_FACTORS, find_kind
from tunix.processes import exits, peers, supervisor
from tunix.processes.identity import FIRST_PORT, NUM_PORTS
from tunix.processes.peers import find_blind
from tunix.run.compiling import list_unfit_settings
from tunix.sharding.table import DIMS, LAYERS, keeping_axes, token_axes
from tunix.training.choices import build_mesh
from tunix.training.train_spec import assemble

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """Result of one check, on one process or between processes."""

    check: str  # its name
    status: Status  # error: training would fail; warning: training may be slow, or fail later
    says: str  # the measured value, and what to do


# Checks before jax starts: versions and known conflicts, environment variables, XLA_FLAGS.

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tunix-trainer")
# A package and its versions, another package and its versions, and what happens if both are installed. Where the other
# is "", the first alone is an error.
CONFLICTS = (
    ("jax", ">=0.11", "flax", "<=0.12.8", "flax 0.12.8 does not import with jax 0.11; take a newer flax"),
    ("jax", "<0.10.2", "", "", "tunix needs jax 0.10.2 or newer"),
    ("google-tunix", "", "", "", "it has a package called tunix too; pip uninstall google-tunix, install tunix again"),
    ("jax-cuda12-plugin", "", "jax-cuda13-plugin", "", "jax finds two CUDA plugins; uninstall one of them"),
)  # fmt: skip
SAME = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")  # must have jaxlib's version
PREFIXES = ("NCCL_", "TUNIX_", "XLA_PYTHON_CLIENT_")  # variables whose names are checked
CLIENT = ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR")  # after XLA_PYTHON_CLIENT_; docs.jax.dev, GPU memory allocation
# Variables whose value makes training slow, and the effect.
COSTLY = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node do not use NVLink",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP in place of InfiniBand",
    ("NCCL_SHM_DISABLE", "1"): "processes of a node talk over the network",
    ("NCCL_DEBUG", "TRACE"): "NCCL writes a line for every call",
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for",
    ("JAX_DEBUG_NANS", "1"): "every operation is waited for and checked",
    ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"): "every array is allocated by the driver",
}
QUERY_XLA = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices()"
Version = Callable[[str], str | None]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_versions(version: Version = installed_version) -> Iterator[Finding]:
    """List what is installed, and find pairs that are known not to work together."""
    entries = ", ".join(f"{name} {number}" for name in SHOWN if (number := version(name)))
    yield Finding("versions", "ok", f"Python {sys.version.split()[0]}, {entries}")
    for package, versions, other, other_versions, reason in CONFLICTS:
        if _matches(version(package), versions) and (not other or _matches(version(other), other_versions)):
            both = f" with {other} {version(other)}" if other else ""
            yield Finding("versions", "error", f"{package} {version(package)}{both}: {reason}")
    library = version("jaxlib")
    for name in ("jax", *SAME):
        number = version(name)
        if number and library and number != library:
            # jax and jaxlib of one minor version may work together; a plugin must have jaxlib's version exactly.
            close = name == "jax" and number.split(".")[:2] == library.split(".")[:2]
            text = f"{name} {number} with jaxlib {library}: install the same version of both"
            yield Finding("versions", "warning" if close else "error", text)


def _matches(number: str | None, specifier: str) -> bool:
    return number is not None and SpecifierSet(specifier).contains(number, prereleases=True)


def check_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find variables that nothing reads, which are often typos, and values that make training slow."""
    # The names TUNIX_... are those in tunix's own source and config files.
    sources = [*Path(__file__).parent.rglob("*.py"), *CONF.rglob("*.yaml")]
    names = (name for path in sources for name in re.findall(r"\bTUNIX_[A-Z_]+[A-Z]\b", path.read_text()))
    nccl = yaml.safe_load((CONF / "command" / "nccl.yaml").read_text())["names"]
    known = {*(f"NCCL_{name}" for name in nccl), *(f"XLA_PYTHON_CLIENT_{name}" for name in CLIENT), *names}
    variables = sorted(name for name in environment if name.startswith(PREFIXES))
    masked = mask_variables(environment)  # findings are printed, and sent to other processes
    for name in variables:
        if name not in known:
            meant = did_you_mean(name, list(known))
            if "TIMEOUT" in name:
                meant = "; distributed.init_timeout_s and distributed.heartbeat_timeout_s say how long to wait"
            yield Finding("variables", "warning", f"{name}={masked[name]}: nothing reads this name{meant}")
    for (name, value), effect in COSTLY.items():
        if environment.get(name) == value:
            yield Finding("variables", "warning", f"{name}={value}: {effect}")
    for text in list_unfit_settings():
        yield Finding("variables", "error", text)
    values = [f"{name}={masked[name]}" for name in variables if name in known]
    yield Finding("variables", "ok", ", ".join(values) or f"none of {', '.join(f'{prefix}*' for prefix in PREFIXES)}")


def check_xla_flags(environment: MutableMapping[str, str]) -> Iterator[Finding]:
    """Find flags of XLA_FLAGS that XLA refuses.

    XLA aborts the process that starts it with an unknown flag. So a child process starts XLA, and its last words name
    the flag. That flag is removed from `environment`, so that the doctor itself can go on, and the child starts again.
    """
    flags = environment.get("XLA_FLAGS", "")
    if not flags:
        return
    mistakes: list[str] = []
    # XLA names the unknown flags all at once, and of bad values the first. Each round removes what was named.
    while (last_messages := _query_xla(environment)) is not None:
        # Not by `shlex`: XLA takes quotes that do not end, and the flags that stay keep theirs.
        command = environment["XLA_FLAGS"].split()
        named = last_messages.partition("in XLA_FLAGS:")[2].partition("\n")[0].split()
        unknown = {word.partition("=")[0] for word in named}
        refused = [word for word in command if word.partition("=")[0] in unknown]
        if bad_value := re.search(r"Couldn't interpret value .* for flag (\w+)", last_messages):
            refused = [word for word in command if word.lstrip("-").partition("=")[0] == bad_value[1]]
        if not refused:
            del environment["XLA_FLAGS"]
            first = last_messages.strip().splitlines()[0]
            yield Finding("XLA_FLAGS", "error", f"XLA does not start with them: {first}")
            break
        environment["XLA_FLAGS"] = " ".join(word for word in command if word not in refused)
        for word in refused:
            matches = difflib.get_close_matches(word.lstrip("-").partition("=")[0], _read_flag_names(), n=1)
            hint = f" (did you mean --{matches[0]}?)" if matches and not bad_value else ""
            mistakes.append(f"XLA {'cannot read the value of' if bad_value else 'does not know'} {word}{hint}")
    for mistake in mistakes:
        yield Finding("XLA_FLAGS", "error", f"{mistake}; it would abort every process")
    if environment.get("XLA_FLAGS") == flags:
        yield Finding("XLA_FLAGS", "ok", flags)


def _read_flag_names() -> set[str]:
    """Return the words in jaxlib's library that look like names of flags; no function of XLA's lists them.

    In the library's table of strings each one stands between two zero bytes.
    """
    names: set[bytes] = set()
    for library in Path(jaxlib.__file__).parent.glob("libjax_common*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as binary:
            names |= set(re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", binary))
    return {name.decode() for name in names}


def _query_xla(environment: Mapping[str, str]) -> str | None:
    """Start XLA in a child process; return what it prints before it aborts, or None if it starts."""
    command = [sys.executable, "-c", QUERY_XLA]
    settings: Any = {"env": dict(environment), "capture_output": True, "text": True, "check": False, "timeout": 60}
    try:
        result = subprocess.run(command, **settings)
    except subprocess.TimeoutExpired:
        return "it does not answer within 60 s"
    # The line that names the flags first, without the time and the place in the source: F0101 ... flags.cc:1] ...
    lines = [
        line.partition("] ")[2] or line
        for line in result.stderr.splitlines()
        if "in XLA_FLAGS" in line or "Couldn't interpret value" in line
    ]
    return None if result.returncode == 0 else "\n".join([*lines, result.stderr])


# Checks of one process's machine: devices, driver, limits, memory, disk, host name and ports.

GIB = 2**30
DRIVERS = {"12": 525, "13": 580}  # oldest driver for a CUDA version; docs.nvidia.com/deploy/cuda-compatibility
FILES = 4096  # open files that a run may need: sockets to its peers, data workers, checkpoints
SHM_GIB = 1  # shared memory for the buffers of NCCL and of data workers


def examine_machine(job: Job) -> Iterator[Finding]:
    """Run all checks of this process. jax must have started."""
    for findings in (_check_devices(), _check_limits(), _check_ports(), _check_space(job)):
        yield from findings


def _check_devices() -> Iterator[Finding]:
    local = jax.local_devices()
    kind, driver = local[0].device_kind, _read_driver_version()
    devices = f"{len(local)} x {kind}, backend {jax.default_backend()}"
    talks = jax.config.jax_cpu_collectives_implementation if jax.default_backend() == "cpu" else "NCCL"  # type: ignore[attr-defined]
    yield Finding("devices", "ok", f"{devices}, collectives by {talks}{f', driver {driver}' if driver else ''}")
    if driver and jax.default_backend() == "cpu":
        yield Finding("devices", "error", f"driver {driver} is here, but jax has no GPU: install jax[cuda13]")
    if jax.default_backend() == "gpu":
        cuda = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version.lower())
        oldest = DRIVERS.get(cuda[1][:2]) if cuda else None
        if driver and oldest and driver[0].isdigit() and int(driver.split(".")[0]) < oldest:
            yield Finding("devices", "error", f"driver {driver} is older than {oldest}, which CUDA {cuda[1]} needs")  # type: ignore[index]
        if find_kind(kind) is None:
            yield Finding("devices", "warning", f"{kind} is not in conf/command/device: MFU will be null")


def _read_driver_version() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return "unknown (nvidia-smi does not answer within 20 s)"
    return result.stdout.split("\n")[0].strip() if result.returncode == 0 else None


def _check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= FILES + 2 * jax.process_count()
    more = "" if enough else f"; ulimit -n {FILES + 2 * jax.process_count()} (hard limit {hard})"
    yield Finding("open files", "ok" if enough else "warning", f"{soft} allowed{more}")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        small = free < SHM_GIB
        more = f"; NCCL and data workers need about {SHM_GIB} GiB (docker: --shm-size)" if small else ""
        yield Finding("shared memory", "warning" if small else "ok", f"{free:.2f} GiB free in /dev/shm{more}")


def _check_ports() -> Iterator[Finding]:
    """Check that this host can be reached by its own name, and that Linux does not use the ports of Slurm runs.

    One process alone trains without a name.
    """
    host = socket.gethostname()
    unreachable: Status = "error" if jax.process_count() > 1 else "warning"
    try:
        family, *_, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError:
        yield Finding("ports", unreachable, f"host name {host} is unknown here; add it to /etc/hosts")
        return
    with socket.socket(family) as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        try:
            socket.create_connection((str(address), port), timeout=5).close()
        except OSError as error:
            yield Finding("ports", unreachable, f"{host} ({address}) port {port}: {error}; is a firewall in the way?")
            return
    yield Finding("ports", "ok", f"{host} is {address} and can be reached")
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    last = int(handed_out.read_text().split()[1]) if handed_out.exists() else 0
    if last >= FIRST_PORT:
        slurm = f"Slurm runs listen on {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}: one may be taken"
        yield Finding("ports", "warning", f"Linux hands out ports up to {last}, {slurm}")


def _check_space(job: Job) -> Iterator[Finding]:
    """Compare free memory and disk with the size of the run's state: a checkpoint passes through host memory."""
    cfg, neighbours = job.config, peers.num_on_host()
    try:
        mesh = build_mesh(cfg)
    except UserError as error:
        yield Finding("mesh", "error", str(error))
        return
    with jax.set_mesh(mesh):
        state = jax.tree.leaves(assemble(cfg, mesh).abstract)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in state) / GIB
    here = size * neighbours / jax.process_count()  # each process copies its own part of the state to this host
    memory = psutil.virtual_memory().available / GIB
    text = f"{memory:.1f} GiB available; a checkpoint takes {here:.2f} GiB of this host's while it is saved"
    yield Finding("host memory", "ok" if memory > here else "error", text)
    if cfg.checkpoint.folder is not None and is_address(cfg.checkpoint.folder):
        return  # a bucket
    folder = find_existing(job.run_dir if cfg.checkpoint.folder is None else Path(cfg.checkpoint.folder))
    free = shutil.disk_usage(folder).free / GIB
    kept = cfg.checkpoint  # those of keep_every_steps are left out: their number grows with the run
    count = kept.max_to_keep + kept.keep_best + kept.save_first + len(kept.save_at_steps)
    count += 1  # the oldest is removed when the newest is complete
    status: Status = "ok" if free > count * size else "warning" if free > 2 * size else "error"
    needed = f"at most {count} checkpoints (checkpoint.max_to_keep={kept.max_to_keep}) need {count * size:.2f} GiB"
    yield Finding("disk", status, f"{free:.1f} GiB free in {folder}; {needed}")


# Checks between processes: clocks, shared files, versions, and the speed of the links between devices.

SKEW_S = 1.0  # clocks may differ by so many seconds
SLOW = 1.5  # a process is slow if it takes this many times the median
PAYLOAD_MIB = {"cpu": 4, "gpu": 256}  # size of the whole array that a group of devices gathers or reduces
SECONDS = 2.0  # one measurement is repeated for about so long, but for 3 to 20 calls
COLLECTIVES: dict[str, Callable] = {
    "all-reduce": lambda x, axis: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis: jax.lax.all_gather(x, axis, axis=1, tiled=True),
    "reduce-scatter": lambda x, axis: jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
    "all-to-all": lambda x, axis: jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=1, tiled=True),
    # Each device sends to the next one.
    "collective-permute": lambda x, axis: jax.lax.pshuffle(x, axis, np.roll(np.arange(jax.lax.axis_size(axis)), 1)),
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


def compare(job: Job, info: dict[str, Any]) -> Iterator[Finding]:
    """Compare the facts of all processes, their clocks, and the files that they see.

    Every process must call this; every process gets all findings.
    """
    info_by_rank = peers.gather(info, "facts")
    for key in info:
        ranks: dict[str, list[int]] = {}  # by value
        for rank, values in enumerate(info_by_rank):
            ranks.setdefault(str(values.get(key)), []).append(rank)
        if len(ranks) > 1:
            text = "; ".join(f"{value} on processes {name_first(numbers)}" for value, numbers in ranks.items())
            yield Finding("same everywhere", "error", f"{key} differs: {text}")
    yield _compare_clocks()
    yield _check_files(find_existing(job.run_dir), must=job.config.distributed.shared_filesystem is True)


def _compare_clocks() -> Finding:
    peers.barrier("clocks", 60)  # all processes leave a barrier within milliseconds, and read their clocks then
    times = peers.gather(time.time(), "clocks")
    apart = max(times) - min(times)
    if apart <= SKEW_S:
        return Finding("clocks", "ok", f"at most {apart:.3f} s apart")
    # Of many hosts the one with the wrong clock is far from the median.
    wrong = times.index(max(times, key=lambda time_s: abs(time_s - float(np.median(times)))))
    return Finding("clocks", "warning", f"{apart:.1f} s apart, process {wrong} most; logs will mislead: start NTP")


def _check_files(folder: Path, must: bool) -> Finding:
    """Check that all processes see a file that process 0 makes; it is an error if they `must`, else a warning."""
    path = Path(peers.agree(str(folder), "probe folder"))
    try:
        blind = find_blind(path)
    except UserError as error:
        return Finding("files", "error", str(error))
    if blind:
        advice = "put hydra.run.dir on a disk that all processes share, or process 0 keeps the checkpoints of all"
        text = f"{path}: not seen by processes {name_first(blind)}; {advice}"
        return Finding("files", "error" if must else "warning", text)
    return Finding("files", "ok", f"{path} is seen by {jax.process_count()} process(es)")


def find_slow_processes() -> Iterator[Finding]:
    """Time a matrix product on each process alone: in training all processes wait for the slowest one."""
    x = jax.device_put(jnp.ones((1024, 1024), jnp.float32), jax.local_devices()[0])
    product = jax.jit(lambda x: x @ x)
    times = _time(lambda: product(x))
    middle, slowest = float(np.median(times)), int(np.argmax(times))
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


def _measure(mesh: Mesh, axis: str, collective: str, per_node: int) -> Link:
    # Each device has one row of float32 numbers. A gather makes `PAYLOAD_MIB` of the rows of a group; every other
    # collective begins with so much on each device.
    #     all-gather:  [1, n / size] -> [1, n]      reduce-scatter:  [1, n] -> [1, n / size]      n = payload / 4 bytes
    size, spec = mesh.shape[axis], PartitionSpec(mesh.axis_names)
    share = PAYLOAD_MIB.get(jax.default_backend(), 64) * 2**20 // 4 // size
    num_bytes = 4 * share * size
    if collective != "all-gather":
        share *= size
    x = jax.jit(lambda: jnp.ones((mesh.size, share)), out_shardings=NamedSharding(mesh, spec))()
    on_device = partial(COLLECTIVES[collective], axis=axis)
    run_collective = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    times = _time(lambda: run_collective(x))
    middle, slowest = float(np.median(times)), int(np.argmax(times))
    kind, transfer = find_kind(mesh.devices.flat[0].device_kind), Transfer(collective, (axis,), num_bytes)
    predicted = predict_seconds(transfer, dict(mesh.shape), kind, per_node) if kind else None
    bus = num_bytes / middle / 1e9 * BUS_FACTORS[collective](size)
    return Link(axis, size, collective, num_bytes, middle, slowest, times[slowest], bus, predicted)


def _time(work: Callable[[], jax.Array]) -> list[float]:
    """Return the median seconds of a call on each process.

    Every process makes the same number of calls: a call may be a collective.
    """
    jax.block_until_ready(work())  # the first call compiles, and opens connections
    began = time.perf_counter()
    jax.block_until_ready(work())
    once = max(1e-6, time.perf_counter() - began)
    calls = peers.agree(min(20, max(3, math.floor(SECONDS / once))), "calls")
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - began)
    # Not the mean: one call that the system interrupts may take ten times as long.
    return peers.gather(float(np.median(times)), "times")


def judge(links: list[Link]) -> Iterator[Finding]:
    """Yield a finding for each link; a link that is slower than others, or than predicted, gets a warning."""
    for link in links:
        status: Status = "ok"
        size = f"{link.group_size} devices, {link.num_bytes / 2**20:.0f} MiB"
        text = f"{link.collective} over {link.axis} ({size}): {link.bus_gb_per_s:.3g} GB/s on the bus"
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


# Seconds until all processes must have come, and for all checks between processes. A run waits longer; whoever asks the
# doctor waits for the answer, and a process that is missing is an answer.
START_S, TOGETHER_S = 30, 90
MARKS = {"ok": "[green]ok     [/]", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}


@dataclass
class Diagnosis:
    """All findings of all processes."""

    hosts: list[str]  # host of each process
    by_process: list[list[Finding]]
    between: list[Finding] = field(default_factory=list)  # findings that compare processes
    links: list[Link] = field(default_factory=list)
    joined: bool = True  # False: the other processes could not be joined, and these are the findings of one

    @property
    def is_fit(self) -> bool:
        return all(finding.status != "error" for group in [self.between, *self.by_process] for finding in group)

    def merge(self) -> dict[Finding, list[int]]:
        """Return each finding once, with the ranks of the processes that have it."""
        ranks: dict[Finding, list[int]] = defaultdict(list)
        for rank, findings in enumerate(self.by_process):
            for finding in findings:
                ranks[finding].append(rank)
        return ranks


def examine(job: compose.Job) -> Diagnosis:
    """Check this process, join the others, and exchange findings with them."""
    # The software first: flags of XLA, which may abort this process, must be checked before jax starts.
    findings = [*check_versions(), *check_variables(os.environ), *check_xla_flags(os.environ)]
    distributed = job.config.distributed.model_copy(update={"init_timeout_s": START_S})
    try:
        peers.join(distributed, {})  # no facts to compare here: `compare` reports every difference
    except (UserError, PeerLost) as error:
        error_finding = Finding("processes", "error", str(error))
        return Diagnosis([socket.gethostname()], [[*findings, error_finding]], joined=False)
    findings += examine_machine(job)
    with peers.deadline(TOGETHER_S, "the processes did not all answer (a collective hangs, or a process has died)"):
        return _examine_together(job, findings)


def _examine_together(job: compose.Job, findings: list[Finding]) -> Diagnosis:
    """Exchange findings with the other processes, and compare what they have in common."""
    hosts = peers.hosts()
    answers = peers.gather([*map(asdict, findings)], "findings")
    diagnosis = Diagnosis(hosts, [[Finding(**values) for values in answer] for answer in answers])
    # The names of all processes, so that a variable that one process lacks is compared too.
    names = [name for name in os.environ if name.startswith("NCCL_")]
    nccl = {name for each in peers.gather(names, "variables") for name in each}
    info = {
        **{name: installed_version(name) for name in SHOWN},
        "Python": platform.python_version(),
        "kind of device": jax.local_devices()[0].device_kind,
        "number of devices": str(jax.local_device_count()),
        **{name: os.environ.get(name) for name in sorted({"XLA_FLAGS", *nccl})},
    }
    diagnosis.between = [*compare(job, info), *find_slow_processes()]
    try:
        mesh = build_mesh(job.config)
    except UserError:
        return diagnosis  # `examine_machine` has reported the error on each process
    diagnosis.links = list(measure_links(mesh, max(Counter(hosts).values()) * jax.local_device_count()))
    diagnosis.between += judge(diagnosis.links)
    return diagnosis


def show(diagnosis: Diagnosis) -> None:
    """Print a line for each finding, the bad ones last."""
    console, num_processes = Console(highlight=False, soft_wrap=True), len(diagnosis.by_process)
    lines = [(finding, "") for finding in diagnosis.between]
    for finding, ranks in diagnosis.merge().items():
        names = name_first([f"{rank} ({diagnosis.hosts[rank]})" for rank in ranks])
        lines.append((finding, "" if len(ranks) == num_processes else f"process {names}: "))
    for finding, processes in sorted(lines, key=lambda line: list(MARKS).index(line[0].status)):
        console.print(MARKS[finding.status], f"{finding.check:16}", end=" ")
        console.print(f"{processes}{finding.says}", markup=False)
    errors = sum(finding.status == "error" for finding, _ in lines)
    verdict = "fit to train" if diagnosis.is_fit else f"not fit to train, {errors} error{'s' * (errors > 1)}"
    console.print(f"{num_processes} process(es): {verdict}")


def format_json(diagnosis: Diagnosis) -> str:
    """Format the diagnosis as --json shows it."""
    findings: list[dict] = [{**asdict(finding), "processes": ranks} for finding, ranks in diagnosis.merge().items()]
    findings += [{**asdict(finding), "processes": None} for finding in diagnosis.between]
    links = [asdict(link) for link in diagnosis.links]
    content = {"fit": diagnosis.is_fit, "hosts": diagnosis.hosts, "findings": findings, "links": links}
    return json.dumps(content, indent=1)


@contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send to stderr what is written to stdout: Gloo prints there, and --json must stay readable."""
    # Gloo, which does the collectives of CPUs, is C++ and writes to file descriptor 1, whatever `sys.stdout` is.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = command_line.command_parser("doctor", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_intermixed_args()

    def work() -> int:
        job = compose.compose(add_search_path(args.overrides, args.config_dir))
        compose.reject_missing_inputs(job)
        with _stdout_as_stderr():
            diagnosis = examine(job)
            if repeated := compose.remark_on_repeated(args.overrides):
                peers.print_progress(repeated)
        if not diagnosis.joined or peers.is_main():
            print(format_json(diagnosis)) if args.json else show(diagnosis)
        return int(not diagnosis.is_fit)

    return exits.report_errors(work, supervisor.tell_refusal)


if __name__ == "__main__":
    sys.exit(main())
