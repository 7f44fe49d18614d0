"""Identity of this process: its rank, the number of processes, and the address where they meet.

The first source that recognises the environment decides: the config, torchrun, mpirun, Slurm, JAX's own detectors.
jax is imported only if JAX's detectors are asked. What users export for a node's launcher (`tunix.launch`) is read here
too: the number of nodes, and which of them this is.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tunix.base.errors import UserError, first_line
from tunix.base.files import is_whole_number
from tunix.config import Distributed

Environment = Mapping[str, str]

# Variables of Kubernetes' indexed Jobs and of TPU pods: with one of them, JAX's own detectors are asked.
JAX_VARIABLES = {"JOB_COMPLETION_INDEX", "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"}
GPUS = ("cuda", "gpu")  # names of the platform in JAX_PLATFORMS
# Of process 0: a port that all processes compute from the job's number, so that most jobs of a node have another one.
FIRST_PORT, NUM_PORTS = 61440, 4096  # above the ports that Linux gives to outgoing connections


@dataclass(frozen=True)
class Identity:
    """One process of a run."""

    source: str  # where the numbers come from, for messages
    coordinator_address: str  # host:port of process 0
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None  # None: all devices that this process sees
    # Processes on this host, where the environment tells; no part of who this process is.
    num_local: int | None = field(default=None, compare=False)


ALONE = Identity("a run of one process", "", 1, 0)


def find_identity(distributed: Distributed, environment: Environment = os.environ) -> Identity | None:
    """Return the identity of this process, or None if it is the only process of its run.

    Keys of the section `distributed` win over the environment.

    Raises:
        UserError: the environment contradicts itself, or lacks the coordinator's address.
    """
    keys = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
    explicit = {key: getattr(distributed, key) for key in keys if getattr(distributed, key) is not None}
    if {"num_processes", "process_id", "coordinator_address"} <= explicit.keys():
        identity = Identity("distributed.*", **explicit)
    else:
        if distributed.coordinator_address:
            environment = {**environment, "JAX_COORDINATOR_ADDRESS": distributed.coordinator_address}
        # Slurm behind torchrun and mpirun: in a job, srun often starts one torchrun a node, and mpirun starts one
        # daemon a node by srun. Then srun's variables count those, and the launcher's own count the processes.
        sources = (_read_torchrun, _read_open_mpi, _read_mpich, _read_slurm, _query_jax)
        read = next(filter(None, (source(environment) for source in sources)), None)
        if read is None and explicit.keys() - {"local_device_ids"}:
            missing = [f"distributed.{key}" for key in keys[:3] if key not in explicit]
            raise UserError(f"distributed.{next(iter(explicit))} is set; {' and '.join(missing)} must be set too")
        if "local_device_ids" in explicit and (read is None or read.num_processes == 1):
            raise UserError(
                "distributed.local_device_ids chooses the devices of one process of several, but this run has one "
                "process; use CUDA_VISIBLE_DEVICES instead"
            )
        if read is None:
            return None
        identity = replace(read, **explicit)
    if identity.num_processes < 1:
        raise UserError(f"{identity.source}: {identity.num_processes} processes; there is at least this one")
    return _check(identity) if identity.num_processes > 1 else None


def reject_idle_gpus(identity: Identity, distributed: Distributed, environment: Environment = os.environ) -> None:
    """Raise `UserError` if the processes of this host take one GPU each, and leave others without work."""
    platforms = environment.get("JAX_PLATFORMS", "cuda").split(",")
    is_chosen = distributed.allow_idle_devices or distributed.local_device_ids is not None
    num_local = 0 if is_chosen or identity.local_device_ids is None else identity.num_local
    if not num_local or not set(GPUS) & set(platforms):
        return
    if (num_gpus := count_gpus(environment)) > num_local:
        raise UserError(
            f"{identity.source}: {num_local} processes of this host take one GPU each, and it has {num_gpus}: "
            f"{num_gpus - num_local} would have no work. Start {num_gpus} processes on each host, or one; hide GPUs by "
            "CUDA_VISIBLE_DEVICES, or set distributed.allow_idle_devices=true"
        )


def reject_restart(begins: str, environment: Environment = os.environ) -> None:
    """Raise `UserError` where torchrun starts a run again whose command names no newest checkpoint; `begins` says where
    it would begin."""
    if (count := environment.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        raise UserError(
            f"torchrun starts this run again (TORCHELASTIC_RESTART_COUNT={count}), and it would begin {begins}; go on "
            "with resume=RUN_DIR, with which torchrun may start it again (--max-restarts)"
        )


def count_gpus(environment: Environment) -> int:
    """Return the number of GPUs in CUDA_VISIBLE_DEVICES, or of those that the driver lists."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        hidden = next((index for index, name in enumerate(names) if name in ("-1", "NoDevFiles")), len(names))
        return len(list(filter(None, names[:hidden])))
    if not shutil.which("nvidia-smi"):
        return 0
    try:
        entries = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60).stdout
    except subprocess.TimeoutExpired:
        raise UserError("nvidia-smi -L does not answer within 60 s; give the number of processes by --nprocs") from None
    return sum(line.startswith("GPU ") for line in entries.splitlines())


def count_nodes(nnodes: int | None, env: Environment, num_local: int) -> int:
    """Return the number of nodes, by --nnodes or WORLD_SIZE; `num_local` is the number of processes on each node."""
    world = read_whole(env, "WORLD_SIZE")
    if world is None:
        if "RANK" in env and nnodes is None:
            raise UserError(f"RANK={env['RANK']} is set; WORLD_SIZE or --nnodes must be set too, or --standalone")
        return nnodes or 1
    if nnodes and world != nnodes * num_local:
        raise UserError(f"WORLD_SIZE={world}, but --nnodes={nnodes} x --nprocs={num_local} is {nnodes * num_local}")
    if not world or world % num_local:
        raise UserError(f"WORLD_SIZE={world} is not a multiple of --nprocs={num_local}, the processes of each node")
    return world // num_local


def find_node_rank(node_rank: int | None, env: Environment, nodes: int, num_local: int) -> int | None:
    """Return the number of this node, or None if neither a flag nor the environment gives it.

    Users export RANK with two meanings: the first global rank of the node, and the number of the node. With 2 nodes of
    4 processes RANK=4 can only be the former, RANK=1 only the latter. RANK=2 on 4 nodes of 2 can be both: an error.
    """
    node = node_rank if node_rank is not None else read_whole(env, "NODE_RANK")
    rank = read_whole(env, "RANK")
    if node is not None:
        if not 0 <= node < nodes:
            raise UserError(f"--node_rank={node}: the {nodes} nodes have the numbers 0 to {nodes - 1}")
        if rank is not None and rank not in (node, node * num_local):
            raise UserError(
                f"RANK={rank} contradicts --node_rank={node}: expected {node * num_local}, its first global rank"
            )
        return node
    if rank is None:
        return 0 if nodes == 1 else None
    readings = {rank // num_local} if rank % num_local == 0 and rank // num_local < nodes else set()
    readings |= {rank} if rank < nodes else set()
    if len(readings) == 1:
        return readings.pop()
    if readings:
        raise UserError(
            f"RANK={rank} can be the first global rank of node {rank // num_local}, or the number of node {rank} "
            f"({nodes} nodes x {num_local} processes); say which with --node_rank"
        )
    raise UserError(
        f"RANK={rank} is neither a node's number nor its first global rank ({nodes} nodes x {num_local} processes)"
    )


def read_whole(values: Environment, name: str) -> int | None:
    value = values.get(name)
    if not value:
        return None
    if not is_whole_number(value):
        raise UserError(f"{name}={value}: expected a whole number")
    return int(value)


def _read_torchrun(env: Environment) -> Identity | None:
    """Read the variables of torchrun, accelerate and tunix.launch.

    MASTER_ADDR alone means nothing: accelerate sets it for a single process too.
    """
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size, rank = _read_number(env, "WORLD_SIZE"), _read_number(env, "RANK")
    if size == 1:
        # A platform that runs the command in one container sets both, and mpirun or srun may start processes in it.
        return ALONE if "LOCAL_RANK" in env else None
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise UserError(f"RANK={rank} and WORLD_SIZE={size} are set, {' and '.join(missing)} must be set too")
        port = _read_number(env, "MASTER_PORT") + 1  # the launcher itself listens on MASTER_PORT
        if port > 65535:
            raise UserError(f"MASTER_PORT={port - 1}: tunix listens on the port after it; choose a lower one")
        coordinator = f"{env['MASTER_ADDR']}:{port}"
    num_local = _read_number(env, "LOCAL_WORLD_SIZE", 1)
    local = _select_devices(env, _read_number(env, "LOCAL_RANK", 0), num_local)
    return Identity("RANK and WORLD_SIZE", coordinator, size, rank, local, num_local)


def _read_slurm(env: Environment) -> Identity | None:
    """Read the variables of a task of `srun`. The batch script itself is no task, and is a single process."""
    if "SLURM_STEP_NODELIST" not in env or "SLURM_PROCID" not in env:
        return None
    size = _read_number(env, "SLURM_STEP_NUM_TASKS", _read_number(env, "SLURM_NTASKS", 1))
    if size == 1:
        return ALONE
    # Nothing tells the tasks a port. They compute one from the job's number, so that jobs that share a node differ.
    port = FIRST_PORT + _read_number(env, "SLURM_JOB_ID") % NUM_PORTS
    coordinator = env.get("JAX_COORDINATOR_ADDRESS") or f"{_find_first_node(env['SLURM_STEP_NODELIST'])}:{port}"
    num_local = _count_local_tasks(env)
    local = _select_devices(env, _read_number(env, "SLURM_LOCALID"), num_local)
    return Identity("Slurm", coordinator, size, _read_number(env, "SLURM_PROCID"), local, num_local)


def _read_open_mpi(env: Environment) -> Identity | None:
    """Read the variables of a process that `mpirun` of Open MPI has started."""
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    size, rank = _read_number(env, "OMPI_COMM_WORLD_SIZE"), _read_number(env, "OMPI_COMM_WORLD_RANK")
    if size == 1:
        return ALONE
    local_size = _read_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        uri = env.get("OMPI_MCA_orte_hnp_uri") or env.get("PMIX_SERVER_URI41") or ""
        # The job and the addresses of its first node: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1]:34911
        # Open MPI 5 gives each process the daemon of its own node, and names the first node in the job:
        # prterun-node0-4711@0.1;tcp4://127.0.0.1:41671
        job, _, after = uri.partition(";")
        address = re.match(r"tcp4?://([^,:]+)|tcp6://\[([^,\]]+)", after)
        first = re.match(r"prterun-(.+)-[0-9]+@", job) if local_size < size else None
        if address is None:
            raise UserError("Open MPI does not tell where process 0 is; set distributed.coordinator_address=HOST:PORT")
        host = first[1] if first else address[1] or f"[{address[2]}]"
        number = int("".join(filter(str.isdigit, job.split(".")[0])) or 0)
        # mpirun counts jobs in the bits from the 12th on, so the rest of a division by `NUM_PORTS` is 0 for every job.
        port = FIRST_PORT + (number >> 12 if number % (1 << 12) == 0 else number) % NUM_PORTS
        coordinator = f"{host}:{port}"
    local = _select_devices(env, _read_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0), local_size)
    return Identity("Open MPI", coordinator, size, rank, local, local_size)


def _read_mpich(env: Environment) -> Identity | None:
    """Read the variables of a process that `mpirun` of MPICH or Intel MPI has started: they tell no address."""
    if "MPI_LOCALRANKID" not in env or "PMI_RANK" not in env:
        return None
    size, rank = _read_number(env, "PMI_SIZE"), _read_number(env, "PMI_RANK")
    if size == 1:
        return ALONE
    coordinator = env.get("JAX_COORDINATOR_ADDRESS")
    if coordinator is None:
        raise UserError(
            f"PMI_RANK={rank} and PMI_SIZE={size}: mpirun of MPICH and of Intel MPI does not tell where process 0 is; "
            "set distributed.coordinator_address=HOST:PORT"
        )
    local_size = _read_number(env, "MPI_LOCALNRANKS", 1)
    local = _select_devices(env, _read_number(env, "MPI_LOCALRANKID"), local_size)
    return Identity("PMI_RANK and PMI_SIZE", coordinator, size, rank, local, local_size)


def _query_jax(env: Environment) -> Identity | None:
    """Ask JAX's own detectors. They know TPU pods, and Kubernetes if its Python package is installed."""
    if not JAX_VARIABLES & env.keys():
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
    except Exception as error:  # the detector asks an API over the network, which may fail in any way
        raise UserError(
            f"JAX's own detector of this cluster failed: {first_line(error)}; set "
            "distributed.coordinator_address, distributed.num_processes and distributed.process_id"
        ) from None
    return Identity(f"JAX's detector {found.name}", coordinator, size, rank, None if local is None else (local,))


def _select_devices(env: Environment, local_rank: int, local_size: int) -> tuple[int, ...] | None:
    """Return the devices of this process; None means every device that it sees.

    The only process of a host takes every device. One of several takes the device with its local rank, unless its
    launcher has already hidden all others by CUDA_VISIBLE_DEVICES.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and len(visible.split(",")) == 1
    return None if local_size == 1 or hidden else (local_rank,)


def _count_local_tasks(env: Environment) -> int:
    """Return the number of tasks on this node.

    SLURM_STEP_TASKS_PER_NODE is a list like 4(x2),3, which means 4, 4 and 3; SLURM_NODEID is this node's place in it.
    """
    counts: list[int] = []
    text = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    for part in text.split(","):
        if not (found := re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)):
            raise UserError(f"the environment has SLURM_STEP_TASKS_PER_NODE={text}, which must be like 4(x2),3")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(_read_number(env, "SLURM_NODEID", 0), len(counts) - 1)]


def _find_first_node(nodes: str) -> str:
    """Return the address of the first node of a list like node[3-5,7].

    Slurm is asked for the address, since the name that Slurm gives a node need not be known to DNS.
    """

    def scontrol(*args: str) -> str:
        if not shutil.which("scontrol"):
            return ""
        return subprocess.run(["scontrol", "show", *args], capture_output=True, text=True, check=False).stdout

    first = re.split(r",(?![^\[]*\])", nodes)[0]  # up to the first comma outside brackets: node[3-5,7]
    name = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)  # the first number in the brackets: node3
    return dict(word.split("=", 1) for word in scontrol("node", name).split() if "=" in word).get("NodeAddr", name)


def _check(identity: Identity) -> Identity:
    """Check rank and address, and return the identity with an IPv6 address in brackets, as JAX reads it."""
    source, address, last = identity.source, identity.coordinator_address, identity.num_processes - 1
    host, _, port = address.rpartition(":")
    if identity.process_id > last:
        raise UserError(f"{source}: this is process {identity.process_id}, but the processes are 0 to {last}")
    if not host or not is_whole_number(port) or not 0 < int(port) < 65536:
        raise UserError(f"{source}: coordinator address {address} must be HOST:PORT, with a port from 1 to 65535")
    if ":" in host and not host.startswith("["):
        return replace(identity, coordinator_address=f"[{host}]:{port}")
    return identity


def _read_number(env: Environment, name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    if value is None or not is_whole_number(value):
        raise UserError(f"the environment has {name}={value}, which must be a whole number")
    return int(value)
