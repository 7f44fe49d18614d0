"""Find out which node of a run this is: from flags, from the environment, or by meeting the other nodes."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tunix.base.errors import UserError
from tunix.launch import rendezvous
from tunix.processes.identity import count_gpus

Environment = Mapping[str, str]
STATIC_PORT, MEETING_PORT = 29500, 29400  # torchrun's defaults


@dataclass(frozen=True)
class NodeFlags:
    """Flags of the launcher that describe the run; None where a flag is not given."""

    nprocs: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    standalone: bool | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None

    def with_defaults(self, file: "NodeFlags", environment: Environment) -> "NodeFlags":
        """Return these flags, with the values of `file` for those that are not given.

        All nodes may share one file, so NODE_RANK in the environment wins over the file's node_rank.
        """
        values = {field.name: getattr(file, field.name) for field in fields(NodeFlags)}
        if (self.nnodes or 1) > 1:
            values["standalone"] = None
        if environment.get("NODE_RANK"):
            values["node_rank"] = None
        for field in fields(NodeFlags):
            if (own := getattr(self, field.name)) is not None:
                values[field.name] = own
        return NodeFlags(**values)


@dataclass(frozen=True)
class Node:
    """This node's share of a run."""

    rank: int
    num_nodes: int
    num_processes: int  # on this node; every node has as many
    master_addr: str  # host of node 0
    master_port: int  # process 0 listens on the port after this one

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.num_processes

    def environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables of one process, those that torchrun sets."""
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


def find_node(flags: NodeFlags, environment: Environment = os.environ) -> Node:
    """Return this node of the run. A flag wins over the environment.

    Raises:
        UserError: flags and environment contradict each other, have two meanings, or lack the address of node 0.
    """
    if flags.standalone and (flags.nnodes or 1) > 1:
        raise UserError(f"--standalone is a run of one node, --nnodes={flags.nnodes} of several; leave one out")
    if flags.nnodes is not None and flags.nnodes < 1:
        raise UserError(f"--nnodes={flags.nnodes}: must be at least 1")
    env = {} if flags.standalone else environment
    here = _count_processes(flags.nprocs or "1", environment)
    nodes = 1 if flags.standalone else _count_nodes(flags, env, here)
    rank = _find_node_rank(flags, env, nodes, here)
    meeting_host, _, meeting_port = (flags.rdzv_endpoint or "").partition(":")
    addr = flags.master_addr or meeting_host or env.get("MASTER_ADDR")
    port = flags.master_port or _read_number({"--rdzv_endpoint": meeting_port}, "--rdzv_endpoint")
    port = port or _read_number(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65535:
        raise UserError(f"port {port} of node 0: must be from 1 to 65534, and the port after it is used too")
    if nodes == 1:
        return Node(0, 1, here, addr or "127.0.0.1", port or find_free_port())
    if not addr:
        way_out = "--rdzv_endpoint=HOST:PORT" if flags.rdzv_backend == "c10d" else "--master_addr or MASTER_ADDR"
        raise UserError(f"a run of {nodes} nodes needs the address of node 0: set {way_out}")
    if rank is None and flags.rdzv_endpoint:
        port = port or MEETING_PORT
        rank = rendezvous.meet(addr, port, nodes, {"rdzv_id": flags.rdzv_id, "nnodes": nodes, "nprocs": here})
    if rank is None:
        raise UserError(f"which of the {nodes} nodes is this? Set --node_rank, or RANK in the environment")
    return Node(rank, nodes, here, addr, port or STATIC_PORT)


def find_free_port() -> int:
    """Return a port that is free, and whose next port is free too.

    Another program may take a port before process 0 listens there; then process 0 says so and ends.
    """
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def _count_processes(nprocs: str, environment: Environment) -> int:
    """Return the number of processes on each node, by --nprocs."""
    counts = {
        "gpu": lambda: count_gpus(environment),
        "cpu": lambda: os.cpu_count() or 1,
        "auto": lambda: count_gpus(environment) or os.cpu_count() or 1,
    }
    if nprocs not in counts and not nprocs.isdigit():
        raise UserError(f"--nprocs={nprocs}: expected a whole number, or one of {', '.join(counts)}")
    count = counts[nprocs]() if nprocs in counts else int(nprocs)
    if not count:
        raise UserError(f"--nprocs={nprocs}: " + ("no NVIDIA GPU here" if nprocs == "gpu" else "must be at least 1"))
    return count


def _count_nodes(flags: NodeFlags, env: Environment, here: int) -> int:
    """Return the number of nodes, by --nnodes or WORLD_SIZE; `here` is the number of processes on each node."""
    world = _read_number(env, "WORLD_SIZE")
    if world is None:
        if "RANK" in env and flags.nnodes is None:
            raise UserError(f"RANK={env['RANK']} is set; WORLD_SIZE or --nnodes must be set too, or --standalone")
        return flags.nnodes or 1
    if flags.nnodes and world != flags.nnodes * here:
        raise UserError(f"WORLD_SIZE={world}, but --nnodes={flags.nnodes} x --nprocs={here} is {flags.nnodes * here}")
    if not world or world % here:
        raise UserError(f"WORLD_SIZE={world} is not a multiple of --nprocs={here}, the processes of each node")
    return world // here


def _find_node_rank(flags: NodeFlags, env: Environment, nodes: int, here: int) -> int | None:
    """Return the number of this node, or None if neither a flag nor the environment gives it.

    Users export RANK with two meanings: the first global rank of the node, and the number of the node. With 2 nodes of
    4 processes RANK=4 can only be the former, RANK=1 only the latter. RANK=2 on 4 nodes of 2 can be both: an error.
    """
    node = flags.node_rank if flags.node_rank is not None else _read_number(env, "NODE_RANK")
    rank = _read_number(env, "RANK")
    if node is not None:
        if not 0 <= node < nodes:
            raise UserError(f"--node_rank={node}: the {nodes} nodes have the numbers 0 to {nodes - 1}")
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


def _read_number(values: Environment, name: str) -> int | None:
    value = values.get(name)
    if not value:
        return None
    if not value.isdigit():
        raise UserError(f"{name}={value}: expected a whole number")
    return int(value)
