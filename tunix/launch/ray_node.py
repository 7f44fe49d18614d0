"""The part of a Ray launch that runs on a node: start the node's processes, send their output, pass signals on."""

import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray

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
        self, words: list[str], environment: Mapping[str, str], here: str, config: Path, text: str
    ) -> Iterator[tuple[int, bytes] | int]:
        """Run a command of Python's; yield its output as it comes (`STDOUT` or `STDERR`, bytes), then its exit code.

        Args:
            words: the command, without the interpreter.
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
            [sys.executable, *words],
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
