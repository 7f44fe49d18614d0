"""Rendezvous: nodes that all run the same command meet at one address, and are numbered in the order they come.

The node that has the address becomes node 0 and listens. Each other node sends one line of JSON and gets one back:

    node k -> 0    {"rdzv_id": ..., "nnodes": 4, "nprocs": 8}
    node 0 -> k    {"rank": 2}   or {"error": ...}

Node 0 answers when all have come, so no node starts its processes while another is missing.
"""

import errno
import socket
import time
from typing import Any

from tunix.base.errors import UserError
from tunix.processes.rollcall import read, write

JOIN_TIMEOUT_S = 300.0


def meet(host: str, port: int, num_nodes: int, run: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S) -> int:
    """Wait until all `num_nodes` nodes are there, and return the number of this node.

    Args:
        run: values that must be the same on all nodes, by their flags.

    Raises:
        UserError: the host is unknown, a node has other values, or nodes are missing after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError:
        raise UserError(f"--rdzv_endpoint: host {host} is unknown here ({socket.gethostname()})") from None
    try:
        with socket.socket() as probe:
            # This works only on the host that has the address. Comparing addresses would not do: a host may resolve
            # its own name to 127.0.1.1.
            probe.bind((address[0], 0))
        with socket.create_server(("", port)) as server:
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
                guest, (name, *_) = server.accept()
            except TimeoutError:
                answer = {"error": f"{len(guests) + 1} of {num_nodes} nodes came within the time limit"}
                break
            guest.settimeout(5)
            theirs = read(guest)
            if theirs is None:  # another program, like a port scanner
                guest.close()
                continue
            guests.append(guest)
            if theirs != run:
                keys = [key for key in run if theirs.get(key) != run[key]]
                answer = {
                    "error": "; ".join(f"{key}={theirs.get(key)} on {name}, {run[key]} on node 0" for key in keys)
                }
        for number, guest in enumerate(guests, start=1):
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
            with socket.create_connection(address, timeout=5) as host:
                write(host, run)
                host.settimeout(max(0.01, deadline - time.monotonic()))
                answer = read(host)
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"--rdzv_endpoint={address[0]}:{address[1]}: nobody answers ({error})") from None
            time.sleep(0.2)
            continue
        if answer and "rank" in answer:
            return int(answer["rank"])
        raise UserError(f"--rdzv_endpoint={address[0]}:{address[1]}: {(answer or {}).get('error', 'node 0 went away')}")
