"""A sink that works in a thread of its own: one that is slow, or fails, neither stops nor delays a step.

    the loop  ->  queue of calls  ->  thread: make the sink, then call by call; a call that fails is tried again

The first failure is logged when it comes, and their number at the end.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tunix.sinks.sink import Sink, Start, give_table

log = logging.getLogger(__name__)
MOST_WAITING = 100_000  # calls; what comes while so many wait is dropped and counted
DELAYS_S = (1, 2, 4, 8, 16, 32, 64)  # before a call is tried again; then, after 127 s in all, it is dropped and counted


class Background:
    """The thread of one sink, and the calls that wait for it."""

    def __init__(self, name: str, make: Callable[[Start], Sink], start: Start):
        self.name, self.make, self.start = name, make, start
        # A queue without a limit of its own: `put` never waits, so the loop never waits for a server.
        self.calls: queue.SimpleQueue[tuple[str, tuple]] = queue.SimpleQueue()
        self.failures = self.dropped = 0
        self.deadline: float | None = None  # by time.monotonic(), once the run ends
        self.ends = threading.Event()  # set when the run ends; wakes the thread from a delay
        self.thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self.thread.start()

    def write(self, record: dict[str, Any], group: str) -> None:
        self._add("write", record, group)

    def text(self, name: str, text: str, step: int) -> None:
        self._add("text", name, text, step)

    def image(self, name: str, png: bytes, step: int) -> None:
        self._add("image", name, png, step)

    # Whether the sink has a method `table` is not known yet: the thread makes the sink. `_call` asks it.
    def table(self, name: str, rows: list[dict[str, Any]], text: str, step: int) -> None:
        self._add("table", name, rows, text, step)

    def close(self, error: BaseException | None) -> None:
        """Ask the sink to end; the caller then waits with `wait`."""
        self.calls.put(("close", (error,)))

    def wait(self, deadline: float) -> None:
        """Wait until the sink has ended, at most until `deadline` (by time.monotonic()), and log what was lost."""
        self.deadline = deadline
        self.ends.set()
        self.thread.join(max(0.0, deadline - time.monotonic()))
        # The call that is at work when the time is over counts as lost too: the thread ends with the process.
        lost = self.dropped + self.calls.qsize() + self.thread.is_alive()
        if self.failures or lost:
            log.warning("logging.sinks=%s: %d failures; %d calls are lost", self.name, self.failures, lost)

    def _add(self, method: str, *arguments: Any) -> None:
        if self.calls.qsize() < MOST_WAITING:
            self.calls.put((method, arguments))
        else:
            self.dropped += 1

    def _work(self) -> None:
        """Make the sink, and hand it the calls until `close` is done or the deadline has passed."""
        # Making the sink logs in at a server. Without it every call is lost, so this is tried until the run ends. The
        # calls wait in the queue meanwhile.
        sink = None
        while sink is None:
            sink = self._try(lambda: self.make(self.start))
            if sink is None and self._is_late():
                return
        while True:
            method, arguments = self.calls.get()
            if self._try(lambda method=method, arguments=arguments: _call(sink, method, arguments)) is None:  # type: ignore[misc]
                self.dropped += 1
            if method == "close" or self._is_late():
                return

    def _try(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work()`, which may fail a few times; None where it fails every time."""
        for delay_s in (*DELAYS_S, None):
            try:
                return work()
            except Exception as error:
                self.failures += 1
                if self.failures == 1:
                    reason = (str(error).splitlines() or [""])[0][:300]
                    log.warning(
                        "logging.sinks=%s fails: %s: %s; it is tried again, and the run goes on",
                        self.name, type(error).__name__, reason,
                    )  # fmt: skip
            if delay_s is None or self._is_late():
                break
            # When the run ends, delays are at most a second: the process waits for this thread.
            if self.ends.wait(delay_s):
                time.sleep(min(delay_s, 1))
        return None

    def _is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline


def _call(sink: Sink, method: str, arguments: tuple) -> bool:
    """Call a method of the sink, and return True: `_try` returns None for a call that failed."""
    if method == "table":
        give_table(sink, *arguments)
    else:
        getattr(sink, method)(*arguments)
    return True
