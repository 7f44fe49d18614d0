"""A Ray cluster as the driver of a run sees it: connect, take nodes, follow them, give them back. Imports ray."""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tunix.base.errors import Stopped, UserError, first_line
from tunix.launch import children
from tunix.launch.nodes import find_free_port
from tunix.processes import exits

STDOUT, STDERR = 1, 2


class RayNode:
    """An actor of Ray: an object in a process of its own on a node, whose methods the driver calls from afar.

    Ray calls the methods in several threads: a signal can be sent while `run` is at work. The processes of the node end
    with the actor, also when it is killed.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.has_started = threading.Event()
        self.sent: set[int] = set()  # signals

    def find_address(self) -> tuple[str, int]:
        """Return this node's address, and a port that is free here, as is the next one."""
        return ray.util.get_node_ip_address(), find_free_port()

    def run(
        self, command: list[str], environment: Mapping[str, str], here: str, config: Path, text: str
    ) -> Iterator[tuple[int, bytes] | int]:
        """Run a command of Python's; yield its output as it comes (`STDOUT` or `STDERR`, bytes), then its exit code.

        Args:
            command: its words, without the interpreter.
            environment: variables beside those of this process.
            here: the folder of the driver; the command starts there if this node has such a folder.
            config: the file with the run's config; it is written with `text` if this node does not see it.
        """
        if not config.exists():
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(text)
        root = str(Path(__file__).parents[2])  # where Ray has found tunix
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=here if Path(here).is_dir() else None,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=exits.end_with_parent(),
        )
        self.has_started.set()
        # Wait for both streams at once: a program that fills the pipe of the one that nobody reads would stop.
        with selectors.DefaultSelector() as open_streams:
            for number, stream in ((STDOUT, self.process.stdout), (STDERR, self.process.stderr)):
                assert stream is not None
                open_streams.register(stream, selectors.EVENT_READ, number)
            while open_streams.get_map():
                for key, _ in open_streams.select():
                    if data := os.read(key.fd, 65536):
                        yield key.data, data
                    else:
                        open_streams.unregister(key.fileobj)
        status = self.process.wait()
        # A signal ended the launcher before it handled signals, so there was nothing to save: 75, and not 143.
        yield exits.STOPPED if -status in self.sent else exits.find_exit_code(status)

    def send(self, number: int) -> None:
        """Send a signal to the command, which passes it on to its processes."""
        self.has_started.wait()  # a signal may come while `run` still starts the command
        assert self.process is not None
        self.sent.add(number)
        self.process.send_signal(number)


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
        target = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        if target != "auto":  # try the port first: Ray itself would try for minutes
            host, _, port = target.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise UserError(
            f"launcher.address={address}: {first_line(error).rstrip('.')}; `ray start --head` starts a cluster, "
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
        self.was_stopped = False  # as in `children.Part`
        self.is_killed = False  # `send` has ended the actor

    @property
    def host(self) -> str:
        return self.address[0]

    def start(self, *arguments: Any) -> None:
        """Start the processes of the node; `arguments` are those of `RayNode.run`."""
        items = self.actor.run.options(num_returns="streaming").remote(*arguments)
        self.thread = threading.Thread(target=self._follow, args=(items,), name=f"node {self.rank}", daemon=True)
        self.thread.start()

    def is_done(self) -> bool:
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
        remaining = dict.fromkeys(TERMINALS, b"")  # of each stream, the begin of a line whose end has not come yet
        code = None

        def show(stream: int, text: bytes) -> None:
            print(text.decode(errors="replace"), end="", file=getattr(sys, TERMINALS[stream]), flush=True)

        try:
            for item in map(ray.get, items):  # as `RayNode.run` yields them: pieces of output, then the exit code
                if isinstance(item, int):
                    code = item
                else:
                    stream, data = item
                    lines, newline, remaining[stream] = (remaining[stream] + data).rpartition(b"\n")
                    show(stream, lines + newline)
        except RayError as error:
            if not self.is_killed:
                children.say(f"node {self.rank} ({self.host}) is lost: {first_line(error)}")
        for stream, text in remaining.items():
            show(stream, text)
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
        children.say(f"{size} nodes with {bundle} were not free in time")
    raise UserError(
        f"launcher.nodes={sizes[0]}: the cluster did not have {sizes[-1]} nodes with {bundle} free within "
        f"launcher.start_timeout_s={timeout_s:g}; `ray status` shows what it has. Ask for less, or wait longer"
    )


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
            reason = (str(error).strip() or repr(error)).splitlines()[-1]
            raise UserError(
                f"launcher=ray: tunix cannot be started on the nodes: {reason}; install the same tunix on "
                "each node, or send it with `ray job submit --working-dir`"
            ) from None
        children.say(f"a node is lost: {first_line(error)}")
        return []
    for node, address in zip(nodes, addresses, strict=True):
        node.address = address
    return nodes
