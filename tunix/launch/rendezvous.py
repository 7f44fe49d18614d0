"""Nodes that all run the same command meet at one address and get their numbers in the order they come.

The node that owns the address is node 0 and listens; each other sends one line of JSON and gets one back.
"""

import errno
import socket
import time
from typing import Any

from tunix.base.errors import UserError
from tunix.processes.rollcall import read, write

JOIN_TIMEOUT_S = 300.0


def meet(host: str, port: int, num_nodes: int, run: dict[str, Any], timeout_s: float = JOIN_TIMEOUT_S) -> int:
    """Number of this node, once all `num_nodes` are there.

    Args:
        run: what must be the same on all nodes.

    Raises:
        UserError: an unknown host, a node that says otherwise, or nodes missing after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError:
        raise UserError(f"--rdzv_endpoint: host {host} is unknown here ({socket.gethostname()})") from None
    try:
        with socket.socket() as probe:
            probe.bind((address[0], 0))  # only on the host that has this address, which may know itself as 127.0.1.1
        with socket.create_server(("", port)) as server:
            return _welcome(server, num_nodes, run, deadline)
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            raise
    return _join(address, run, deadline)


def _welcome(server: socket.socket, num_nodes: int, run: dict[str, Any], deadline: float) -> int:
    """Node 0: wait for the others, then tell each its number, or all what is wrong."""
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
            if theirs is None:  # not one of us
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
    """Any other node: knock until node 0 is there, then wait for the number."""
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
