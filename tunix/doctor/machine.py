"""Checks of one process's machine: devices, driver, limits, memory, disk, host name and ports."""

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
from tunix.costs.devices import find_kind
from tunix.doctor.findings import Finding, Status
from tunix.processes import peers
from tunix.processes.identity import FIRST_PORT, NUM_PORTS
from tunix.training.mesh_choices import build_mesh
from tunix.training.program import assemble

GIB = 2**30
DRIVERS = {"12": 525, "13": 580}  # oldest driver for a CUDA version; docs.nvidia.com/deploy/cuda-compatibility
FILES = 4096  # open files that a run may need: sockets to its peers, data workers, checkpoints
SHM_GIB = 1  # shared memory for the buffers of NCCL and of data workers


def examine(job: Job) -> Iterator[Finding]:
    """Run all checks of this process. jax must have started."""
    yield from _check_devices()
    yield from _check_limits()
    yield from _check_ports()
    yield from _check_space(job)


def _check_devices() -> Iterator[Finding]:
    local = jax.local_devices()
    kind, driver = local[0].device_kind, _read_driver_version()
    platform = f"{len(local)} x {kind}, backend {jax.default_backend()}"
    talks = jax.config.jax_cpu_collectives_implementation if jax.default_backend() == "cpu" else "NCCL"  # type: ignore[attr-defined]
    yield Finding("devices", "ok", f"{platform}, collectives by {talks}{f', driver {driver}' if driver else ''}")
    if driver and jax.default_backend() == "cpu":
        yield Finding("devices", "error", f"driver {driver} is here, but jax has no GPU: install jax[cuda13]")
    if jax.default_backend() == "gpu":
        cuda = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version.lower())
        oldest = DRIVERS.get(cuda[1][:2]) if cuda else None
        if driver and oldest and int(driver.split(".")[0]) < oldest:
            yield Finding("devices", "error", f"driver {driver} is older than {oldest}, which CUDA {cuda[1]} needs")  # type: ignore[index]
        if find_kind(kind) is None:
            yield Finding("devices", "warning", f"{kind} is not in conf/command/device: MFU will be null")


def _read_driver_version() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
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
    """Check that this host can be reached by its own name, and that Linux does not use the ports of Slurm runs."""
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
            "ports",
            "warning",
            f"Linux hands out ports up to {last}, Slurm runs listen on {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}: "
            "one may be taken",
        )


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
    yield Finding(
        "host memory",
        "ok" if memory > here else "error",
        f"{memory:.1f} GiB available; a checkpoint takes {here:.2f} GiB of this host's while it is saved",
    )
    folder = find_existing(job.run_dir)
    free = shutil.disk_usage(folder).free / GIB
    count = cfg.checkpoint.max_to_keep + 1  # the oldest is removed when the newest is complete
    status: Status = "ok" if free > count * size else "warning" if free > 2 * size else "error"
    yield Finding(
        "disk",
        status,
        f"{free:.1f} GiB free in {folder}; checkpoint.max_to_keep={cfg.checkpoint.max_to_keep} needs "
        f"{count} x {size:.2f} = {count * size:.1f} GiB",
    )


def find_existing(folder: Path) -> Path:
    """Return the folder, or the nearest folder above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
