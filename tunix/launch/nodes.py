"""Which node of a run this is: from flags, from the environment, or by meeting the others."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tunix.base.errors import UserError
from tunix.launch import rendezvous

Environment = Mapping[str, str]
STATIC_PORT, MEETING_PORT = 29500, 29400  # torchrun's defaults


@dataclass(frozen=True)
class Asked:
    """What the command line says; None where it says nothing."""

    nprocs: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    standalone: bool | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None

    def or_else_file(self, file: "Asked", environment: Environment) -> "Asked":
        """`file` where this says nothing; of several nodes NODE_RANK says more than a file that all of them share."""
        ours, theirs = ({field.name: getattr(asked, field.name) for field in fields(Asked)} for asked in (self, file))
        if (self.nnodes or 1) > 1:
            theirs["standalone"] = None
        if environment.get("NODE_RANK"):
            theirs["node_rank"] = None
        return Asked(**theirs | {name: value for name, value in ours.items() if value is not None})


@dataclass(frozen=True)
class Node:
    """This node's share of a run."""

    rank: int
    num_nodes: int
    num_processes: int  # here, and on every other node
    master_addr: str
    master_port: int  # process 0 listens on the port after it

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def environment(self, local_rank: int) -> dict[str, str]:
        """torchrun's variables for one process."""
        values = {
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
            "WORLD_SIZE": self.world_size,
            "RANK": self.rank * self.num_processes + local_rank,
            "LOCAL_WORLD_SIZE": self.num_processes,
            "LOCAL_RANK": local_rank,
            "GROUP_WORLD_SIZE": self.num_nodes,
            "GROUP_RANK": self.rank,
        }
        return {name: str(value) for name, value in values.items()}


def this_node(asked: Asked, environment: Environment = os.environ) -> Node:
    """This node of the run that was asked for.

    Raises:
        UserError: what is given does not fit together, can be read in two ways, or lacks node 0's address.
    """
    if asked.standalone and (asked.nnodes or 1) > 1:
        raise UserError(f"--standalone is a run of one node, --nnodes={asked.nnodes} of several; leave one out")
    if asked.nnodes is not None and asked.nnodes < 1:
        raise UserError(f"--nnodes={asked.nnodes}: must be at least 1")
    env = {} if asked.standalone else environment
    here = _processes_here(asked.nprocs or "1", environment)
    nodes = 1 if asked.standalone else _num_nodes(asked, env, here)
    rank = _node_rank(asked, env, nodes, here)
    meeting_host, _, meeting_port = (asked.rdzv_endpoint or "").partition(":")
    addr = asked.master_addr or meeting_host or env.get("MASTER_ADDR")
    port = asked.master_port or _number({"--rdzv_endpoint": meeting_port}, "--rdzv_endpoint")
    port = port or _number(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65535:
        raise UserError(f"port {port} of node 0: must be from 1 to 65534, and the port after it is used too")
    if nodes == 1:
        return Node(0, 1, here, addr or "127.0.0.1", port or free_port())
    if not addr:
        raise UserError(f"a run of {nodes} nodes needs the address of node 0: set --master_addr or MASTER_ADDR")
    if rank is None and asked.rdzv_endpoint:
        port = port or MEETING_PORT
        rank = rendezvous.meet(addr, port, nodes, {"rdzv_id": asked.rdzv_id, "nnodes": nodes, "nprocs": here})
    if rank is None:
        raise UserError(f"which of the {nodes} nodes is this? Set --node_rank, or RANK in the environment")
    return Node(rank, nodes, here, addr, port or STATIC_PORT)


def free_port() -> int:
    """A port that is free, and so is the next."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def _processes_here(nprocs: str, environment: Environment) -> int:
    counts = {
        "gpu": lambda: _gpus(environment),
        "cpu": lambda: os.cpu_count() or 1,
        "auto": lambda: _gpus(environment) or os.cpu_count() or 1,
    }
    count = counts[nprocs]() if nprocs in counts else _number({"--nprocs": nprocs}, "--nprocs")
    if not count:
        raise UserError(f"--nprocs={nprocs}: " + ("no NVIDIA GPU here" if nprocs == "gpu" else "must be at least 1"))
    return count


def _gpus(environment: Environment) -> int:
    """GPUs that CUDA_VISIBLE_DEVICES shows, or that the driver lists."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def _num_nodes(asked: Asked, env: Environment, here: int) -> int:
    world = _number(env, "WORLD_SIZE")
    if world is None:
        if "RANK" in env and asked.nnodes is None:
            raise UserError(f"RANK={env['RANK']} is set; WORLD_SIZE or --nnodes must be set too, or --standalone")
        return asked.nnodes or 1
    if asked.nnodes and world != asked.nnodes * here:
        raise UserError(f"WORLD_SIZE={world}, but --nnodes={asked.nnodes} x --nprocs={here} is {asked.nnodes * here}")
    if not world or world % here:
        raise UserError(f"WORLD_SIZE={world} is not a multiple of --nprocs={here}, the processes of each node")
    return world // here


def _node_rank(asked: Asked, env: Environment, nodes: int, here: int) -> int | None:
    """Number of this node, or None if nothing tells.

    The same RANK is exported in two ways: as the first global rank of the node, and as the node's number.
    """
    node = asked.node_rank if asked.node_rank is not None else _number(env, "NODE_RANK")
    rank = _number(env, "RANK")
    if node is not None:
        if not 0 <= node < nodes:
            raise UserError(f"--node_rank={node}: the {nodes} nodes count from 0")
        if rank is not None and rank not in (node, node * here):
            raise UserError(
                f"RANK={rank} contradicts --node_rank={node}: expected {node * here}, its first global rank"
            )
        return node
    if rank is None:
        return 0 if nodes == 1 else None
    readings = {rank // here} if rank % here == 0 and rank // here < nodes else set()
    readings |= {rank} if rank < nodes else set()
    if len(readings) == 1:
        return readings.pop()
    if readings:
        raise UserError(
            f"RANK={rank} can be the first global rank of node {rank // here}, or the number of node {rank} "
            f"({nodes} nodes x {here} processes); say which with --node_rank"
        )
    raise UserError(
        f"RANK={rank} is neither a node's number nor its first global rank ({nodes} nodes x {here} processes)"
    )


def _number(values: Environment, name: str) -> int | None:
    value = values.get(name)
    if not value:
        return None
    if not value.isdigit():
        raise UserError(f"{name}={value}: expected a whole number")
    return int(value)
