"""A line about work that takes long. Imports little: it watches imports too."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 4.0  # of work, before it is announced
AGAIN_S = 30.0  # between two lines about the same work


def print_progress(line: str) -> None:
    """Print a line on stderr: what a command returns is on stdout."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def announcing(work: str, say: Callable[[str], None] = print_progress) -> Iterator[None]:
    """Say what the block does where it takes long: after QUIET_S, and again every AGAIN_S."""
    ended, start = threading.Event(), time.monotonic()

    def watch() -> None:
        wait_s = QUIET_S
        while not ended.wait(wait_s):
            say(f"{work}: {time.monotonic() - start:.0f} s so far")
            wait_s = AGAIN_S

    thread = threading.Thread(target=watch, name=f"announcing {work}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
