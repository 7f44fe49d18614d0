"""Nodes of a run: who is who, from flags, an accelerate config, the environment, or by meeting the others."""

import argparse
import errno
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunix.base.errors import UserError, first_line
from tunix.base.files import is_whole_number, read_yaml
from tunix.processes.identity import Environment, count_gpus, count_nodes, find_node_rank, read_whole
from tunix.processes.rollcall import READ_S, connect, read, write

# Rendezvous: nodes that all run the same command meet at one address, and are numbered in the order they come.
#
# The node that has the address becomes node 0 and listens. Each other node sends one line of JSON and gets one back:
#
#     node k -> 0    {"rdzv_id": ..., "nnodes": 4, "nprocs": 8}
#     node 0 -> k    {"rank": 2}   or {"error": ...}
#
# Node 0 answers when all have come, so no node starts its processes while another is missing.

INIT_TIMEOUT_S = 300.0


def meet(host: str, port: int, num_nodes: int, run: dict[str, Any], timeout_s: float = INIT_TIMEOUT_S) -> int:
    """Wait until all `num_nodes` nodes are there, and return the number of this node.

    Args:
        run: values that must be the same on all nodes, by their flags.

    Raises:
        UserError: the host is unknown, a node has other values, or nodes are missing after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise UserError(f"--rdzv_endpoint: host {host[:100]} is unknown here ({socket.gethostname()})") from None
    family, *_, address = min(found, key=lambda each: each[0])  # IPv4 where there is one
    try:
        with socket.socket(family) as probe:
            # This works only on the host that has the address. Comparing addresses would not do: a host may resolve
            # its own name to 127.0.1.1.
            probe.bind((address[0], 0))
        with socket.create_server(("", port), family=family) as server:
            return _welcome(server, num_nodes, run, deadline)
    except OSError as error:
        # Join: the address is not ours (EADDRNOTAVAIL), or another launcher of this host is node 0 (EADDRINUSE).
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    return _join(address, run, deadline)


def _welcome(server: socket.socket, num_nodes: int, run: dict[str, Any], deadline: float) -> int:
    """Wait for the other nodes as node 0, then send each its number, or send all of them an error."""
    guests: list[socket.socket] = []
    answer: dict[str, Any] = {}
    try:
        while len(guests) < num_nodes - 1 and not answer:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                if time.monotonic() > deadline:  # strangers may come forever
                    raise TimeoutError
                guest, (name, *_) = server.accept()
            except TimeoutError:
                answer = {"error": f"{len(guests) + 1} of {num_nodes} nodes came within the time limit"}
                break
            theirs = read(guest, min(READ_S, deadline - time.monotonic()))
            if theirs is None or "nprocs" not in theirs:  # another program, like a port scanner
                guest.close()
                continue
            guests.append(guest)
            if theirs != run:
                different = [key for key in run if theirs.get(key) != run[key]]
                values = (f"{key}={theirs.get(key)} on {name}, {run[key]} on node 0" for key in different)
                answer = {"error": "; ".join(values)}
        for number, guest in enumerate(guests, start=1):
            with suppress(OSError):  # the node has died since; the roll call of the processes will say who is missing
                guest.settimeout(READ_S)
                write(guest, answer or {"rank": number})
    finally:
        for guest in guests:
            guest.close()
    if answer:
        raise UserError(f"--rdzv_endpoint: {answer['error']}")
    return 0


def _join(address: Any, run: dict[str, Any], deadline: float) -> int:
    """Join as any other node: try until node 0 listens, then wait for the number and return it."""
    while True:
        try:
            with connect(*address[:2]) as host:
                write(host, run)
                answer = read(host, deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"--rdzv_endpoint={address[0]}:{address[1]}: nobody answers ({error})") from None
            time.sleep(0.2)
            continue
        rank = (answer or {}).get("rank")
        if type(rank) is int and 0 < rank < run["nnodes"]:
            return rank
        problem = (answer or {}).get("error", "node 0 went away, or another program answers there")
        raise UserError(f"--rdzv_endpoint={address[0]}:{address[1]}: {problem}")


STATIC_PORT, MEETING_PORT = 29500, 29400  # torchrun's defaults


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


def find_node(flags: argparse.Namespace, environment: Environment = os.environ) -> Node:
    """Return this node of the run. A flag (`launch.__main__.parser`) wins over the environment.

    Raises:
        UserError: flags and environment contradict each other, have two meanings, or lack the address of node 0.
    """
    if flags.standalone and (flags.nnodes or 1) > 1:
        raise UserError(f"--standalone is a run of one node, --nnodes={flags.nnodes} of several; leave one out")
    if flags.nnodes is not None and flags.nnodes < 1:
        raise UserError(f"--nnodes={flags.nnodes}: must be at least 1")
    env = {} if flags.standalone else environment
    num_local = _count_processes(flags.nprocs or "1", environment)
    nodes = 1 if flags.standalone else count_nodes(flags.nnodes, env, num_local)
    rank = find_node_rank(flags.node_rank, env, nodes, num_local)
    ipv6, _, after = (flags.rdzv_endpoint or "").rpartition("]")  # HOST, HOST:PORT or [fe80::1]:PORT
    meeting_host, _, meeting_port = after.partition(":")
    meeting_host = ipv6.removeprefix("[") or meeting_host
    addr = flags.master_addr or meeting_host or env.get("MASTER_ADDR")
    port = flags.master_port or read_whole({"--rdzv_endpoint": meeting_port}, "--rdzv_endpoint")
    port = port or read_whole(env, "MASTER_PORT")
    if port is not None and not 0 < port < 65535:
        raise UserError(f"port {port} of node 0: must be from 1 to 65534, and the port after it is used too")
    if nodes == 1:
        return Node(0, 1, num_local, addr or "127.0.0.1", port or find_free_port())
    if not addr:
        hint = "--rdzv_endpoint=HOST:PORT" if flags.rdzv_backend == "c10d" else "--master_addr or MASTER_ADDR"
        raise UserError(f"a run of {nodes} nodes needs the address of node 0: set {hint}")
    if rank is None and flags.rdzv_endpoint:
        port = port or MEETING_PORT
        rank = meet(addr, port, nodes, {"rdzv_id": flags.rdzv_id, "nnodes": nodes, "nprocs": num_local})
    if rank is None:
        raise UserError(f"which of the {nodes} nodes is this? Set --node_rank, or RANK in the environment")
    return Node(rank, nodes, num_local, addr, port or STATIC_PORT)


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
    if nprocs not in counts and not is_whole_number(nprocs):
        raise UserError(f"--nprocs={nprocs}: expected a whole number, or one of {', '.join(counts)}")
    count = counts[nprocs]() if nprocs in counts else int(nprocs)
    if not count:
        raise UserError(f"--nprocs={nprocs}: " + ("no NVIDIA GPU here" if nprocs == "gpu" else "must be at least 1"))
    return count


class Settings(BaseModel):
    """Keys of accelerate's config file (made by `accelerate config`), with its defaults.

    The first keys say how many processes run where. From `distributed_type` on, a key asks for something that is chosen
    elsewhere in tunix, or not needed: it is accepted only with a value that asks for nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_processes: int = Field(1, ge=1)
    """Processes on all machines together."""
    num_machines: int = Field(1, ge=1)
    machine_rank: int = Field(0, ge=0)
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: Literal["static", "c10d"] = "static"
    gpu_ids: str | int | None = None
    """`all`, or numbers separated by commas."""
    use_cpu: bool = False
    distributed_type: Literal["MULTI_GPU", "MULTI_CPU", "NO"] = "NO"
    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    main_training_function: Literal["main"] = "main"
    mixed_precision: Literal["no", False] = "no"
    downcast_bf16: Literal["no", False] = "no"
    enable_cpu_affinity: Literal[False] = False
    debug: Literal[False] = False
    same_network: bool = True
    tpu_env: tuple[()] = ()
    tpu_use_cluster: Literal[False] = False
    tpu_use_sudo: Literal[False] = False

    @property
    def flags(self) -> dict[str, Any]:
        """The flags of the launcher that mean the same."""
        if self.num_processes % self.num_machines:
            raise UserError(f"num_processes={self.num_processes} is not a multiple of num_machines={self.num_machines}")
        many = self.num_machines > 1
        return {
            "nprocs": str(self.num_processes // self.num_machines),
            "nnodes": self.num_machines,
            "node_rank": self.machine_rank if many else None,
            "master_addr": self.main_process_ip if many else None,
            "master_port": self.main_process_port,
            "standalone": not many,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that choose the devices."""
        if self.use_cpu or self.distributed_type == "MULTI_CPU":
            return {"JAX_PLATFORMS": "cpu"}
        return {} if self.gpu_ids in (None, "all") else {"CUDA_VISIBLE_DEVICES": str(self.gpu_ids)}


# What to do instead, added to the message for a value or a key that is not accepted.
INSTEAD = {
    "mixed_precision": "; choose training.mixed_precision on the command line of the training",
    "distributed_type": "; set it to MULTI_GPU, and choose training.sharding_strategy on the training's command line",
    "fsdp_config": "; choose training.sharding_strategy on the command line of the training",
    "deepspeed_config": "; choose training.sharding_strategy on the command line of the training",
}


def read_config(file: Path) -> Settings:
    """Read the file.

    Raises:
        UserError: the file cannot be read, or a key or value has no meaning here; the message names it.
    """
    try:
        values: Any = read_yaml(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--accelerate_config={file} cannot be read: {first_line(error)}") from None
    if isinstance(values, dict):  # `accelerate config` writes an empty section for each plugin that is not used
        values = {key: value for key, value in values.items() if value != {} or key in Settings.model_fields}
    try:
        return Settings.model_validate(values)
    except ValidationError as errors:
        first = errors.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        instead = INSTEAD.get(key, "")
        if first["type"] == "extra_forbidden":
            raise UserError(f"--accelerate_config={file}: {key} has no meaning here; remove it{instead}") from None
        reason = f"{first['msg'][0].lower()}{first['msg'][1:]}{instead}"
        raise UserError(f"--accelerate_config={file}: {key}={first['input']}: {reason}") from None
