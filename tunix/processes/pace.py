"""Pace of each process: the seconds of a step in which it does not wait for its devices.

All devices take a step together, so every process measures the time of the slowest one. The part that is a process's
own is the time that it spends beside its devices: reading data, writing, waiting for a core.

    process 0   |host|  waits for the devices                  |
    process 1   |host . . . . . . . . . . . . . . .|  waits    |      process 0 waits for process 1
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)
NUM_STEPS = 20  # the newest ones, of which means are taken
MOST_OF = 0.5  # of a step: a process that spends more of it beside its devices may hold up the others
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
        is_slow = state["host_s"] > max(MOST_OF * state["step_time_s"], TIMES_OTHERS * others_s)
        now = time.monotonic()
        if is_slow and now - self.named.get(rank, -AGAIN_S) >= AGAIN_S:
            self.named[rank] = now
            log.warning(
                "process %d (%s) is slow: of a step of %.3f s it spends %.3f s beside its devices, %.3f s of them "
                "waiting for data; the median of the other processes is %.3f s",
                rank, state["host"], state["step_time_s"], state["host_s"], state["data_wait_s"], others_s,
            )  # fmt: skip
