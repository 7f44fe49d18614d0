"""The other processes of a run: agree with them, wait for them, and leave them so that none waits in vain.

Everything here goes through the key-value store of JAX's runtime, which process 0 keeps, and not through collectives of
the devices. So it works while the devices compute, in any thread, and before the first program is compiled.

    gather     every process sets tunix/gather/N/RANK, waits at a barrier, and reads all of tunix/gather/N/
    publish    one process sets tunix/KEY; the others read it whenever they like, and wait for nothing
"""

import json
import logging
import os
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed as runtime

from tunix.base.errors import UserError
from tunix.processes import exits

log = logging.getLogger(__name__)


# Pace of each process: the seconds of a step in which it does not wait for its devices.
#
# All devices take a step together, so every process measures the time of the slowest one. The part that is a process's
# own is the time that it spends beside its devices: reading data, writing, waiting for a core.
#
#     process 0   |host|  waits for the devices                  |
#     process 1   |host . . . . . . . . . . . . . . .|  waits    |      process 0 waits for process 1

NUM_STEPS = 20  # the newest ones, of which means are taken
MAX_OF = 0.5  # of a step: a process that spends more of it beside its devices may hold up the others
TIMES_OTHERS = 3  # and this many times what the others spend
AGAIN_S = 600.0  # before a process is named again


class Pace:
    """Pace of this process, which its loop notes; on process 0 also the pace of the slowest process.

    The watchdog publishes what `average` returns. On process 0 it gives `compare` what all processes have published.
    """

    def __init__(self) -> None:
        self.steps = deque[tuple[float, float, float]](maxlen=NUM_STEPS)
        self.slowest: dict[str, float] = {}  # numbers for metrics.jsonl; empty for a run of one process
        self.named: dict[int, float] = {}  # when each process was last named in the log

    def note(self, step_time_s: float, device_wait_s: float, data_wait_s: float) -> None:
        """Note the seconds of a step, those in which this process waited for devices, and those for data."""
        self.steps.append((step_time_s, step_time_s - device_wait_s, data_wait_s))

    def average(self) -> dict[str, float]:
        """Return the means of this process over the newest steps; empty before the first one."""
        # A list first: the watchdog calls this from its thread while the loop adds a step.
        if not (steps := list(self.steps)):
            return {}
        names = ("step_time_s", "host_s", "data_wait_s")
        return {name: statistics.fmean(column) for name, column in zip(names, zip(*steps, strict=True), strict=True)}

    def compare(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Find the slowest of the processes, and name it in the log if the others wait for it.

        `states` has what each process has published, by rank: its `host` and the numbers of `average`.
        """
        known = {rank: state for rank, state in states.items() if "host_s" in state}
        if len(known) < 2:
            return
        rank = max(known, key=lambda rank: known[rank]["host_s"])
        state = known[rank]
        self.slowest = {
            "slowest_process": rank,
            "slowest_host_s": state["host_s"],
            "slowest_data_wait_s": state["data_wait_s"],
        }
        # The median and not the mean: one more slow process among the others must not hide this one.
        others_s = statistics.median(other["host_s"] for each, other in known.items() if each != rank)
        is_slow = state["host_s"] > max(MAX_OF * state["step_time_s"], TIMES_OTHERS * others_s)
        now = time.monotonic()
        if is_slow and now - self.named.get(rank, -AGAIN_S) >= AGAIN_S:
            self.named[rank] = now
            log.warning(
                "process %d (%s) is slow: of a step of %.3f s it spends %.3f s beside its devices, %.3f s of them "
                "waiting for data; the median of the other processes is %.3f s",
                rank, state["host"], state["step_time_s"], state["host_s"], state["data_wait_s"], others_s,
            )  # fmt: skip


T = TypeVar("T")
# Words in the runtime's errors that mean a lost peer.
LOST_PEER = ("Gloo", "NCCL", "Connection reset", "Connection closed", "heartbeat", "Barrier timed out")
NO_LIMIT_S = 7 * 24 * 3600.0  # preparing a large corpus takes hours; the heartbeat detects a process that dies
_gathers = count()  # gives each gather a number


def is_main() -> bool:
    """Return True on process 0, which writes what is written once: logs, metrics, the run's folder."""
    return jax.process_index() == 0


def agree(text: str, name: str, timeout_s: float = 600) -> str:
    """Return the text of process 0 on every process."""
    return gather(text if is_main() else "", name, timeout_s)[0]


def gather(text: str, name: str, timeout_s: float = 600) -> list[str]:
    """Return the texts of all processes, in their order; `name` stands in the error of one that waits in vain."""
    if jax.process_count() == 1:
        return [text]
    # A new number for each gather, because the store keeps what was set. It is the same on all processes, because they
    # call gathers in the same order: only the main thread may call them. Six digits of the rank, so that the
    # alphabetical order of the keys is the order of ranks.
    key = f"tunix/gather/{next(_gathers)}"
    _find_store().key_value_set(f"{key}/{jax.process_index():06}", text)
    barrier(f"{name}, {key}", timeout_s)
    return [value for _, value in sorted(_find_store().key_value_dir_get(f"{key}/"))]


@cache
def hosts() -> list[str]:
    """Return the host of each process, in their order."""
    return gather(socket.gethostname(), "hosts")


def num_on_host() -> int:
    """Return the number of processes of the run on this host, which share its cores and its memory."""
    return hosts().count(socket.gethostname())


def first_of_host() -> bool:
    """Return True on the process that writes what each host keeps for itself."""
    return hosts().index(socket.gethostname()) == jax.process_index()


def together(work: Callable[[], T], name: str, timeout_s: float = 600) -> T:
    """Call `work()` on every process at once; a `UserError` on one process is raised on all."""
    result, mistake = None, ""
    # If one process alone raised its error, the others would wait for it at the next barrier.
    try:
        result = work()
    except UserError as error:
        mistake = str(error) or "failed"
    mistakes = [text for text in gather(mistake, name, timeout_s) if text]
    if mistakes:
        raise UserError(mistakes[0])
    return cast(T, result)


def on_main(work: Callable[[], T], name: str, timeout_s: float = NO_LIMIT_S) -> T | None:
    """Call `work()` on process 0 and return its result there, None elsewhere; a `UserError` is raised on all."""
    return together(lambda: work() if is_main() else None, name, timeout_s)


def share(size: int) -> range:
    """Return this process's part of `size` pieces of work; the parts of all processes, in order, are all of it."""
    rank, count = jax.process_index(), jax.process_count()
    return range(rank * size // count, (rank + 1) * size // count)


def main_first(work: Callable[[], T], name: str) -> T:
    """Call `work()` on process 0, then on the first process of every other host, then on the rest.

    Of the processes that share a disk, one writes what `work` leaves there, and the others find it.
    A `UserError` on one process is raised on all.
    """
    first = first_of_host()
    # Every process takes part in all three turns, and works in its own.
    turn = 0 if is_main() else 1 if first else 2
    result: T | None = None
    for now in range(3 if jax.process_count() > 1 else 1):
        if now == turn:
            result = together(work, name, NO_LIMIT_S)
        else:
            together(lambda: None, name, NO_LIMIT_S)
    return cast(T, result)


def barrier(name: str, timeout_s: float = 600) -> None:
    """Wait for every process to come here; RuntimeError naming the barrier after `timeout_s`."""
    if jax.process_count() > 1:
        _find_store().wait_at_barrier(f"tunix: {name}", round(1000 * timeout_s))


def publish(key: str, value: str) -> None:
    """Set a value that the other processes read with `published`. Does nothing once the coordinator is gone."""
    if jax.process_count() > 1:
        try:
            _find_store().key_value_set(f"tunix/{key}", value, allow_overwrite=True)
        except RuntimeError:
            log.warning("the coordinator does not answer")


def published(folder: str) -> dict[str, str]:
    """Return what processes have published as FOLDER/KEY, by KEY."""
    if jax.process_count() == 1:
        return {}
    try:
        entries = _find_store().key_value_dir_get(f"tunix/{folder}/")
    except RuntimeError:
        return {}
    return {key.rsplit("/", 1)[1]: value for key, value in entries}


@contextmanager
def deadline(seconds: float, label: str) -> Iterator[None]:
    """End this process with exit code 76 if the block takes longer; `label` says what did not happen in time."""

    # An exception in this thread would not end the main thread, which waits inside the runtime.
    def end() -> None:
        print(f"error: {label} within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(exits.PEER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def blame(error: Exception) -> tuple[int, str]:
    """Return exit code and reason of an unexpected error in a run of several processes.

    The cause is a lost peer, or a bug here: then its traceback is printed and the code is 1.
    """
    # The cause may be on another process: then the error here is only that its connection broke. Give it the time to
    # publish its reason.
    time.sleep(2)
    for rank, text in published("failed").items():
        failure = json.loads(text)
        return exits.PEER, f"process {rank} ({failure['host']}) failed: {failure['why']}"
    line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if any(word in str(error) for word in LOST_PEER):
        return exits.PEER, f"another process died or cannot be reached: {line}"
    traceback.print_exception(error)
    return 1, line


def leave(code: int, reason: str) -> None:
    """Tell the other processes why, and end this one with `code` without waiting for them. Returns if it is alone."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        publish(
            f"failed/{jax.process_index()}", json.dumps({"code": code, "why": reason, "host": socket.gethostname()})
        )
        if is_main():
            # The store ends with this process, and then the runtime aborts the others. So give their watchdogs the time
            # to read why: they look every `watchdog.POLL_S`.
            time.sleep(3)
        # Not sys.exit: at its end Python would call the shutdown of JAX's runtime, which waits for all processes.
        os._exit(code)


def _find_store() -> Any:
    """Return JAX's client of the store of small texts, which runs on process 0; None for a run of one process."""
    return runtime.global_state.client
