"""The parts of a run as a launcher sees them: pass signals on, end all parts together, find the exit code that counts.

A part is a process of this node (`children`), or a node with its processes (`ray`).

    a part dies -- LAST_WORDS_S --> SIGTERM to the others -- grace_s --> SIGKILL
"""

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TypeVar

from tunix.processes import exits

# Exit codes from the best to the worst; every other code is worse than these.
SEVERITY = (0, exits.STOPPED, exits.PEER, exits.DIVERGED, exits.USER_ERROR)
LAST_WORDS_S = 2.0  # after a part died, seconds in which the others may notice it themselves and log the reason
# Signals that the launcher passes on to every part. Ctrl-C (SIGINT) is passed on as SIGTERM.
FORWARDED = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}


class Part(Protocol):
    """A part of a run, which ends with an exit code."""

    rank: int
    code: int | None  # its exit code, once it has ended
    was_ended: bool  # the launcher has sent SIGTERM to it, because another part died

    def has_ended(self) -> bool:
        """Return whether the part has ended."""

    def send(self, number: int) -> None:
        """Send a signal."""


AnyPart = TypeVar("AnyPart", bound=Part)


@contextmanager
def receive_signals() -> Iterator[list[int]]:
    """Note the signals of `FORWARDED` in a list, in place of what they did before."""
    received: list[int] = []

    def note_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note_signal) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_all(parts: Sequence[Part], received: list[int], grace_s: float) -> bool:
    """Wait until all parts have ended; pass signals on, and end the others when one dies.

    Args:
        received: signals that have come; they are taken out of the list.
        grace_s: seconds between SIGTERM and SIGKILL after a part died.

    Returns True if a signal has asked the run to stop.
    """
    stops, died_at, ended_at = 0, None, None
    while running := [part for part in parts if not part.has_ended()]:
        while received:
            number = FORWARDED[signal.Signals(received.pop(0))]
            stops += number == signal.SIGTERM
            if stops > 1:
                number = signal.SIGKILL
            elif stops:
                say("stopping: every process may save and end; a second signal kills them")
            for part in running:
                part.send(number)
        now = time.monotonic()
        # A part with 0 or 75 has not died: the others come to the same end by themselves, and may still be saving.
        if died_at is None and any(part.code not in (None, 0, exits.STOPPED) for part in parts):
            died_at = now
        if died_at and ended_at is None and now > died_at + LAST_WORDS_S:
            ended_at = now
            for part in running:
                part.was_ended = True
                part.send(signal.SIGTERM)
        if ended_at and now > ended_at + grace_s:
            for part in running:
                part.send(signal.SIGKILL)
        time.sleep(0.02)  # a loop that asks, because no call waits for signals and for several parts at once
    return stops > 0


def find_worst(parts: Sequence[AnyPart]) -> AnyPart:
    """Return the part whose exit code counts for the whole run: the worst one."""

    def severity(part: Part) -> int:
        return SEVERITY.index(part.code) if part.code in SEVERITY else len(SEVERITY)

    # A part that the launcher's signal has killed says nothing about why the run failed.
    own = [part for part in parts if not (part.was_ended and (part.code or 0) > 128)]
    return max(own or parts, key=lambda part: (severity(part), -part.rank))


def say(text: str) -> None:
    """Print a line of the launcher."""
    print(f"tunix.launch: {text}", file=sys.stderr, flush=True)
