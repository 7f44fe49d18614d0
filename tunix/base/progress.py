"""A line about work that takes long. Imports little: it watches imports too."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 4.0  # of work, before it is announced
REPEAT_S = 30.0  # at most, between two lines about the same work


def find_wait(elapsed_s: float) -> float:
    """Return the seconds before the next line about work that has taken so long: more, the longer it takes."""
    return min(max(QUIET_S, elapsed_s / 4), REPEAT_S)


def is_watched() -> bool:
    """Return whether stdout is a terminal. mpirun gives its processes one also where it writes into a file."""
    return sys.stdout.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ


def print_progress(line: str) -> None:
    """Print a line on stderr: what a command returns is on stdout."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announcing(work: str, say: Callable[[str], None] = print_progress) -> Iterator[None]:
    """Say again and again (`find_wait`) what the block does."""
    start = time.monotonic()
    with repeating(lambda: say(f"{work}: {time.monotonic() - start:.0f} s so far")):
        yield


@contextmanager
def repeating(report: Callable[[], None], wait: Callable[[float], float] = find_wait) -> Iterator[None]:
    """Call `report` in a thread while the block runs: again after `wait` of the seconds so far."""
    ended, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(wait(time.monotonic() - start)):
            report()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
