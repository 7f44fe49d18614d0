"""Who am I: which process of which run, from the config or from what started it.

The first source that recognises the environment decides: the config, torchrun, Slurm, Open MPI, JAX's own detectors.
Only where those are asked is jax imported.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tunix.base.errors import UserError
from tunix.config import Distributed

Environment = Mapping[str, str]


FOR_JAX = {"JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"}  # of indexed Jobs, of TPU pods
FIRST_PORT, NUM_PORTS = 61440, 4096  # above those that Linux hands out by itself


@dataclass(frozen=True)
class Identity:
    """One process of a run."""

    source: str  # what told us
    coordinator_address: str  # host:port of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all that this process sees


ALONE = Identity("a run of one process", "", 1, 0)


def who_am_i(cfg: Distributed, environment: Environment = os.environ) -> Identity | None:
    """This process, or None if it is alone.

    Raises:
        UserError: an environment that contradicts itself, or lacks the coordinator's address.
    """
    keys = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    given = {key: getattr(cfg, key) for key in keys if getattr(cfg, key) is not None}
    if {"num_processes", "process_id", "coordinator_address"} <= given.keys():
        identity = Identity("distributed.*", **given)
    else:
        if cfg.coordinator_address:
            environment = {**environment, "JAX_COORDINATOR_ADDRESS": cfg.coordinator_address}
        found = next(filter(None, (source(environment) for source in (_torchrun, _slurm, _open_mpi, _jax))), None)
        if found is None and given.keys() - {"local_device_ids"}:
            missing = [f"distributed.{key}" for key in keys[:3] if key not in given]
            raise UserError(f"distributed.{next(iter(given))} is set; {' and '.join(missing)} must be set too")
        if "local_device_ids" in given and (found is None or found.num_processes == 1):
            raise UserError(
                "distributed.local_device_ids chooses devices of one process among several; this one is alone: "
                "CUDA_VISIBLE_DEVICES does"
            )
        if found is None:
            return None
        identity = replace(found, **given)
    return _checked(identity) if identity.num_processes > 1 else None


def _torchrun(env: Environment) -> Identity | None:
    """torchrun, accelerate, tunix.launch. MASTER_ADDR alone means nothing: accelerate sets it for one process too."""
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size, rank = _number(env, "WORLD_SIZE"), _number(env, "RANK")
    if size == 1:
        return ALONE
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise UserError(f"RANK={rank} and WORLD_SIZE={size} are set, {' and '.join(missing)} must be set too")
        port = _number(env, "MASTER_PORT") + 1  # MASTER_PORT itself is held by the launcher's store
        if port > 65535:
            raise UserError(f"MASTER_PORT={port - 1}: tunix listens on the port after it; choose a lower one")
        coordinator = f"{env['MASTER_ADDR']}:{port}"
    local = _local_devices(env, _number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1))
    return Identity("RANK and WORLD_SIZE", coordinator, size, rank, local)


def _slurm(env: Environment) -> Identity | None:
    """A task of `srun`. The batch shell itself has no step, and is one process."""
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return None
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if size == 1:
        return ALONE
    port = _port(_number(env, "SLURM_JOB_ID"))  # of this job alone, on nodes that jobs may share
    coordinator = env.get("JAX_COORDINATOR_ADDRESS") or f"{_first_node(env['SLURM_STEP_NODELIST'])}:{port}"
    local = _local_devices(env, _number(env, "SLURM_LOCALID"), _tasks_here(env))
    return Identity("Slurm", coordinator, size, _number(env, "SLURM_PROCID"), local)


def _open_mpi(env: Environment) -> Identity | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    size, rank = _number(env, "OMPI_COMM_WORLD_SIZE"), _number(env, "OMPI_COMM_WORLD_RANK")
    if size == 1:
        return ALONE
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        uri = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_SERVER_URI41") or ""
        job, _, address = uri.partition(";tcp://")
        if not address:
            raise UserError("Open MPI does not tell where process 0 is; set distributed.coordinator_address=HOST:PORT")
        port = _port(int("".join(filter(str.isdigit, job.split(".")[0])) or 0))
        coordinator = f"{address.split(',')[0].split(':')[0]}:{port}"
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    local = _local_devices(env, _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), local_size)
    return Identity("Open MPI", coordinator, size, rank, local)


def _jax(env: Environment) -> Identity | None:
    """What JAX finds out by itself: on Kubernetes through the package and the API of that name, on TPU pods."""
    if not FOR_JAX & env.keys():
        return None
    from jax._src.clusters import ClusterEnv  # the detectors have no public name

    kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
    try:
        found = next((kind for kind in kinds if kind.is_env_present()), None)
        if found is None:
            return None
        coordinator = env.get("JAX_COORDINATOR_ADDRESS") or found.get_coordinator_address(
            timeout_secs=60, override_coordinator_port=env.get("JAX_COORDINATOR_PORT")
        )
        size, rank, local = found.get_process_count(), found.get_process_id(), found.get_local_process_id()
    except Exception as error:  # of the API that the detector asks
        raise UserError(
            f"JAX's own detector of this cluster failed: {(str(error) or repr(error)).splitlines()[0]}; set "
            "distributed.coordinator_address, distributed.num_processes and distributed.process_id"
        ) from None
    return Identity(f"JAX's detector {found.name}", coordinator, size, rank, None if local is None else (local,))


def _local_devices(env: Environment, local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """One process of a host takes every device; one of many takes its own, unless its launcher hid the others."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and len(visible.split(",")) == 1
    return None if local_size == 1 or hidden else (local_rank,)


def _port(job: int) -> int:
    return FIRST_PORT + job % NUM_PORTS


def _tasks_here(env: Environment) -> int:
    """`SLURM_STEP_TASKS_PER_NODE` is like 4(x2),3; this node's place in it is SLURM_NODEID."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts[min(_number(env, "SLURM_NODEID", 0), len(counts) - 1)]


def _first_node(nodes: str) -> str:
    """Address of the first node of a list like node[3-5,7]; Slurm may know it by another name than the resolver."""

    def scontrol(*words: str) -> str:
        if not shutil.which("scontrol"):
            return ""
        return subprocess.run(["scontrol", "show", *words], capture_output=True, text=True, check=False).stdout

    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at a comma outside brackets
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)
    facts = dict(word.split("=", 1) for word in scontrol("node", name).split() if "=" in word)
    return facts.get("NodeAddr", name)


def _checked(identity: Identity) -> Identity:
    told, host_port = identity.source, identity.coordinator_address
    if identity.process_id >= identity.num_processes:
        raise UserError(f"{told}: process {identity.process_id} of {identity.num_processes}; they count from 0")
    if not host_port.rpartition(":")[0] or not host_port.rpartition(":")[2].isdigit():
        raise UserError(f"{told}: coordinator address {host_port} must be HOST:PORT")
    if ":" in (host := host_port.rpartition(":")[0]) and not host.startswith("["):  # IPv6, as JAX takes it
        return replace(identity, coordinator_address=f"[{host}]:{host_port.rpartition(':')[2]}")
    return identity


def _number(env: Environment, name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise UserError(f"the environment has {name}={value}, which must be a whole number")
    return int(value)
