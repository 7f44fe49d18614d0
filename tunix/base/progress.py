"""A line about work that takes long. Imports little: it watches imports too."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 4.0  # of work, before it is announced
REPEAT_S = 30.0  # between two lines about the same work


def is_watched() -> bool:
    """Return whether stdout is a terminal. mpirun gives its processes one also where it writes into a file."""
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def print_progress(line: str) -> None:
    """Print a line on stderr: what a command returns is on stdout."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announcing(work: str, say: Callable[[str], None] = print_progress) -> Iterator[None]:
    """Say what the block does where it takes long: after QUIET_S, and again every REPEAT_S."""
    start = time.monotonic()
    with repeating(lambda: say(f"{work}: {time.monotonic() - start:.0f} s so far"), QUIET_S, REPEAT_S):
        yield


@contextmanager
def repeating(report: Callable[[], None], first_s: float, every_s: float) -> Iterator[None]:
    """Call `report` in a thread while the block runs: after `first_s` seconds, and again every `every_s`."""
    ended = threading.Event()

    def watch() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            report()
            wait_s = every_s

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
