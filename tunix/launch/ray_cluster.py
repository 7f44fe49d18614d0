"""A Ray cluster as the driver of a run sees it: connect, take nodes, follow them, give them back. Imports ray."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tunix.base.errors import Stopped, UserError
from tunix.launch import watch
from tunix.launch.ray_node import STDERR, STDOUT, RayNode
from tunix.processes import exits

CONNECT_S = 10.0
FEWER_S = 10.0  # seconds to wait for each smaller number of nodes; nodes that are there already are free at once
TERMINALS = {STDOUT: "stdout", STDERR: "stderr"}


@contextmanager
def connect(address: str) -> Iterator[None]:
    """Join the cluster as a driver; its actors end with the block.

    Raises:
        UserError: there is no such cluster, or it has another version of Ray or Python.
    """
    try:
        where = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if where != "auto":  # try the port first: Ray itself would try for minutes
            host, _, port = where.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise UserError(
            f"launcher.address={address}: {_first_line(error).rstrip('.')}; `ray start --head` starts a cluster, "
            "launcher.address=HOST:PORT names one (docs/ray.md)"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


class Node:
    """One node of the run: its actor, and a thread that follows its output."""

    def __init__(self, rank: int, group: PlacementGroup, bundle: dict[str, float]):
        self.rank, self.group = rank, group
        amounts = dict(bundle)
        self.actor: Any = (
            ray.remote(RayNode)
            .options(
                num_cpus=amounts.pop("CPU"),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                max_concurrency=4,  # a signal comes while the processes run
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
        )
        self.address = "", 0  # host and port, once the actor has sent them
        self.code: int | None = None
        self.was_ended = False  # as in `watch.Part`
        self.is_killed = False  # `send` has ended the actor

    @property
    def host(self) -> str:
        return self.address[0]

    def start(self, *arguments: Any) -> None:
        """Start the processes of the node; `arguments` are those of `RayNode.run`."""
        items = self.actor.run.options(num_returns="streaming").remote(*arguments)
        self.thread = threading.Thread(target=self._follow, args=(items,), name=f"node {self.rank}", daemon=True)
        self.thread.start()

    def has_ended(self) -> bool:
        """Return whether all processes of the node have ended, or the node is lost."""
        return not self.thread.is_alive()

    def send(self, number: int) -> None:
        """Send a signal to the processes of the node; SIGKILL ends the actor, and the processes with it."""
        if number == signal.SIGKILL:
            self.is_killed = True
            ray.kill(self.actor)
        else:
            self.actor.send.remote(number)

    def _follow(self, items: Any) -> None:
        """Copy the output of the node to the terminal, whole lines at a time, until the exit code comes."""
        rest = dict.fromkeys(TERMINALS, b"")  # of each stream, the begin of a line whose end has not come yet
        code = None
        try:
            for item in map(ray.get, items):  # as `RayNode.run` yields them: pieces of output, then the exit code
                if isinstance(item, int):
                    code = item
                else:
                    stream, data = item
                    lines, newline, rest[stream] = (rest[stream] + data).rpartition(b"\n")
                    _print(stream, lines + newline)
        except RayError as error:
            if not self.is_killed:
                watch.say(f"node {self.rank} ({self.host}) is lost: {_first_line(error)}")
        for stream, text in rest.items():
            _print(stream, text)
        if code is None:
            code = 128 + signal.SIGKILL if self.is_killed else exits.PEER
        self.code = code


def take_nodes(bundle: dict[str, float], sizes: Sequence[int], timeout_s: float, received: Sequence[int]) -> list[Node]:
    """Take as many different nodes as the first of `sizes` says; if they do not come in time, as the next one says.

    Args:
        bundle: what the run takes of each node: {"CPU": 8, "GPU": 8}.
        timeout_s: seconds to wait for the first number of nodes.
        received: signals; the first one ends the waiting.

    Raises:
        UserError: the cluster lacks the nodes, or tunix cannot be started on them.
        Stopped: a signal came.
    """
    for size in sizes:
        deadline = time.monotonic() + (timeout_s if size == sizes[0] else FEWER_S)
        # Ray may give a node that dies before its actor runs. Then all nodes are given back and asked for again.
        while time.monotonic() < deadline:
            group = placement_group([bundle] * size, strategy="STRICT_SPREAD")
            # STRICT_SPREAD: no two bundles on one node. One second at a time, so that a signal is noticed.
            while not (is_ready := group.wait(1)) and time.monotonic() < deadline and not received:
                pass
            if is_ready and (nodes := _start_actors(group, bundle, size)):
                return nodes
            remove_placement_group(group)
            if received:
                raise Stopped(f"{signal.Signals(received[0]).name} while the run waited for nodes: nothing to save")
        watch.say(f"{size} nodes with {bundle} were not free in time")
    raise UserError(
        f"launcher.nodes={sizes[0]}: the cluster did not have {sizes[-1]} nodes with {bundle} free within "
        f"launcher.start_timeout_s={timeout_s:g}; `ray status` shows what it has. Ask for less, or wait longer"
    )


def give_back(nodes: Sequence[Node]) -> None:
    """End what still runs on the nodes, and let others use them."""
    remove_placement_group(nodes[0].group)


def _start_actors(group: PlacementGroup, bundle: dict[str, float], size: int) -> list[Node]:
    """Return the nodes of a placement group; none if one of them is lost already.

    Raises:
        UserError: tunix cannot be started there.
    """
    nodes = [Node(rank, group, bundle) for rank in range(size)]
    try:
        addresses = ray.get([node.actor.find_address.remote() for node in nodes], timeout=120)
    except (ActorDiedError, GetTimeoutError) as error:
        if "creation task" in str(error):  # Ray's words where the node cannot import `RayNode`
            raise UserError(
                f"launcher=ray: tunix cannot be started on the nodes: {_last_line(error)}; install the same tunix on "
                "each node, or send it with `ray job submit --working-dir`"
            ) from None
        watch.say(f"a node is lost: {_first_line(error)}")
        return []
    for node, address in zip(nodes, addresses, strict=True):
        node.address = address
    return nodes


def _print(stream: int, text: bytes) -> None:
    terminal = getattr(sys, TERMINALS[stream])
    terminal.write(text.decode(errors="replace"))
    terminal.flush()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[-1]
