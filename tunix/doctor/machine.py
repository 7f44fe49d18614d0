"""What one process has: devices, driver, limits, memory, disk, names and ports."""

import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jax
import psutil

from tunix.base.errors import UserError
from tunix.cli.compose import Job
from tunix.costs.devices import kind_named
from tunix.doctor.findings import Finding, Status
from tunix.processes import peers
from tunix.processes.identity import FIRST_PORT, NUM_PORTS
from tunix.training.program import assemble, build_mesh

GIB = 2**30
DRIVERS = {"12": 525, "13": 580}  # oldest driver for a CUDA version; docs.nvidia.com/deploy/cuda-compatibility
FILES, SHM_GIB = 4096, 1  # sockets to all peers, data workers and checkpoints; NCCL's and the workers' buffers


def examine(job: Job) -> Iterator[Finding]:
    """Everything of this process; jax has started."""
    yield from _devices()
    yield from _limits()
    yield from _names()
    yield from _room(job)


def _devices() -> Iterator[Finding]:
    local = jax.local_devices()
    kind, driver = local[0].device_kind, _driver()
    platform = f"{len(local)} x {kind}, backend {jax.default_backend()}"
    talks = jax.config.jax_cpu_collectives_implementation if jax.default_backend() == "cpu" else "NCCL"  # type: ignore[attr-defined]
    yield Finding("devices", "ok", f"{platform}, collectives by {talks}{f', driver {driver}' if driver else ''}")
    if driver and jax.default_backend() == "cpu":
        yield Finding("devices", "error", f"driver {driver} is here, but jax has no GPU: install jax[cuda13]")
    if jax.default_backend() == "gpu":
        found = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version.lower())
        oldest = DRIVERS.get(found[1][:2]) if found else None
        if driver and oldest and int(driver.split(".")[0]) < oldest:
            yield Finding("devices", "error", f"driver {driver} is older than {oldest}, which CUDA {found[1]} needs")  # type: ignore[index]
        if kind_named(kind) is None:
            yield Finding("devices", "warning", f"{kind} is not in conf/command/device: MFU will be null")


def _driver() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else None


def _limits() -> Iterator[Finding]:
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


def _names() -> Iterator[Finding]:
    """Whether this host's name leads to it, and whether the ports that runs take are its own."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        yield Finding("ports", "error", f"host name {host} is unknown here; add it to /etc/hosts")
        return
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as error:
            yield Finding("ports", "error", f"{host} ({address}) port {port}: {error}; is a firewall in the way?")
            return
    yield Finding("ports", "ok", f"{host} is {address} and can be reached")
    handed_out = Path("/proc/sys/net/ipv4/ip_local_port_range")
    last = int(handed_out.read_text().split()[1]) if handed_out.exists() else 0
    if last >= FIRST_PORT:
        yield Finding(
            "ports", "warning",
            f"Linux hands out ports up to {last}, Slurm runs listen on {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}: "
            "one may be taken",
        )  # fmt: skip


def _room(job: Job) -> Iterator[Finding]:
    """Memory and disk, beside what the configured run keeps there."""
    cfg, neighbours = job.config, peers.hosts().count(socket.gethostname())
    try:
        mesh = build_mesh(cfg)
    except UserError as error:
        yield Finding("mesh", "error", str(error))
        return
    with jax.set_mesh(mesh):
        state = jax.tree.leaves(assemble(cfg, mesh).abstract)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in state) / GIB
    here = size * neighbours / jax.process_count()
    memory = psutil.virtual_memory().available / GIB
    yield Finding(
        "host memory", "ok" if memory > here else "error",
        f"{memory:.1f} GiB available; a checkpoint takes {here:.2f} GiB of this host's while it is saved",
    )  # fmt: skip
    folder = existing(job.run_dir)
    free, kept = shutil.disk_usage(folder).free / GIB, cfg.checkpoint.max_to_keep + 1  # one more while it is written
    fits: Status = "ok" if free > kept * size else "warning" if free > 2 * size else "error"
    yield Finding(
        "disk", fits,
        f"{free:.1f} GiB free in {folder}; checkpoint.max_to_keep={cfg.checkpoint.max_to_keep} needs "
        f"{kept} x {size:.2f} = {kept * size:.1f} GiB",
    )  # fmt: skip


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
