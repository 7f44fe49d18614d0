"""The watchdog: a thread that ends the process when a peer has failed, or when a deadline has passed.

The main thread may wait for ever: a collective whose peer has died does not return, and no exception reaches it. So a
second thread looks at the clock, and at what the other processes have published:

    progress/RANK    step, phase and its seconds, every 5 s      who is late, where a deadline has passed
    failed/RANK      exit code and reason, once                  the others end with them, instead of waiting
"""

import faulthandler
import json
import logging
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import jax
from jax.experimental import multihost_utils

from tunix.base import progress
from tunix.base.errors import Ending, PeerLost
from tunix.base.files import STOP_SIGNALS, handling_signals, remove_unfinished
from tunix.config import Distributed
from tunix.processes import exits, peers

log = logging.getLogger(__name__)


# Stopping early: signals and time limits, after the same step on every process.
#
# A signal reaches processes at different moments, and perhaps only one of them. A process that stopped at once would
# leave the others inside the next step. So a process only notes a signal. After each step all processes ask whether one
# of them has noted one, and JAX's runtime gives all of them the same answer:
#
#     process 0   step 7 | ask: no | step 8        | ask: no | step 9 | ask: yes -> save, stop
#     process 1   step 7 | ask: no | step 8 SIGTERM| ask: no | step 9 | ask: yes -> save, stop

_stop_signals: list[str] = []
_agreed: list[str] = []  # why all processes stop, once they know that they do
_failures: list[str] = []  # reasons of this process to stop that are failures
_time_limits: list[tuple[float, float]] = []  # training.time_limit_s, and when it is over, by time.monotonic()
_polls = count(1)


@contextmanager
def listening() -> Iterator[None]:
    """Let the stop signals ask the run to save and stop; after `peers.join`, which replaces the handlers."""
    # With several processes JAX's own handler of SIGTERM stays: it tells the other processes.
    numbers = [number for number in STOP_SIGNALS if number != signal.SIGTERM or jax.process_count() == 1]
    try:
        with handling_signals(numbers, lambda number, _: request_stop(signal.Signals(number).name)):
            yield
    finally:
        _failures.clear()  # they say nothing about what the process does next


def forget_requests() -> None:
    """Forget what an earlier run of this process was asked."""
    for requests in (_stop_signals, _agreed, _time_limits):
        requests.clear()


def limit_time(limit_s: float | None, start_time: float) -> None:
    """Let `stop_requested` ask the run to stop `limit_s` after `start_time`, which is a time.monotonic()."""
    if limit_s is not None:
        _time_limits.append((limit_s, start_time + limit_s))


def request_stop(reason: str, fails: bool = False) -> None:
    """Ask all processes to save and stop; safe in a signal handler, unless the run `fails` by this reason."""
    if fails:  # first, so that the others find it when they stop
        _failures.append(reason)
        peers.publish("failure/0", reason)
    # JAX's own handler of SIGTERM starts the agreement with the other processes.
    if not _stop_signals and jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)
    _stop_signals.append(reason)


def failure_of_stop() -> str | None:
    """Return the failure for which the processes stop, once `stop_requested` has returned a reason."""
    return next(iter([*_failures, *peers.published("failure").values()]), None)


def stopped_by_signal() -> bool:
    """Return True if a signal has asked the run to stop, and not its own time limit alone."""
    return any(reason in signal.Signals.__members__ for reason in _stop_signals)


def find_request() -> str | None:
    """Return why this process or another one has been asked to stop; any thread may ask."""
    return _stop_signals[0] if _stop_signals else "SIGTERM" if peers.is_preempted() else None


def stop_requested() -> str | None:
    """Return why to stop now, the same call on every process; None to go on.

    Every process calls it at the same places of the program: after each step, and while answers are drawn. Once there
    is a reason, each later call returns it too.
    """
    for limit_s, end in _time_limits:
        if time.monotonic() > end:
            request_stop(f"training.time_limit_s={limit_s:g}")
    if jax.process_count() == 1:
        return _stop_signals[0] if _stop_signals else None
    # JAX answers yes for one number: the largest that any process has asked for when the signal comes, plus 1. So the
    # numbers count the calls, from 1. Numbers of steps would not do: in a run that is resumed at step 1000, a signal
    # before the first call would choose the number 1, which nobody asks for.
    if not _agreed and multihost_utils.reached_preemption_sync_point(next(_polls)):
        _agreed.append(_stop_signals[0] if _stop_signals else "SIGTERM")
    return _agreed[0] if _agreed else None


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
REPEAT_S = 600.0  # before a process is named again


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
        if is_slow and now - self.named.get(rank, -REPEAT_S) >= REPEAT_S:
            self.named[rank] = now
            log.warning(
                "process %d (%s) is slow: of a step of %.3f s it spends %.3f s beside its devices, %.3f s of them "
                "waiting for data; the median of the other processes is %.3f s",
                rank, state["host"], state["step_time_s"], state["host_s"], state["data_wait_s"], others_s,
            )  # fmt: skip


POLL_S = 1.0  # seconds between two looks at the deadline and at the peers
PUBLISH_S = 5.0  # seconds between two reports of this process
JOIN_S = 10.0  # the thread may be waiting for a coordinator that has stopped


class Watchdog:
    """Knows what the main thread does, since when, and how long that may take.

    `phase` surrounds work that is no part of a step: saving, an evaluation, reading. The time between two `step` calls
    is a step, with a deadline of `step_deadline_factor` times the median step. The start, which compiles, has the
    deadline of a phase. Phases without a limit come before the first step, and a request to stop ends them at once.
    """

    def __init__(self, cfg: Distributed):
        self.cfg, self.steps = cfg, deque[float](maxlen=50)
        self.num_begun = 0  # steps, since the start or a change of batch
        # What the main thread does, in which step, since when (by time.monotonic()), and how many seconds it may take.
        self.doing, self.number, self.since, self.limit = "starting", 0, time.monotonic(), float(cfg.phase_deadline_s)
        # When the step began. A phase within the step changes `since`, and not this.
        self.start_time = self.since
        self.pace = Pace()
        # Whether the log says what the main thread does, where that takes long, and when it said so last.
        self.is_announced, self.announced = True, 0.0
        self.tell: Callable[[Ending], object] = lambda ending: None  # called before this thread ends the process
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        forget_requests()
        self.thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the other processes, where this one has not failed: one may fail in its last act, a write for all.

        Then wait for the thread: Python aborts the process (exit code 134) if it ends while a thread is inside jaxlib.
        """
        if kind is None:
            with self.phase("ending"):
                peers.gather("", "the end of all processes")
        self.ended.set()
        self.thread.join(JOIN_S)

    def step(self, number: int) -> None:
        """Note that step `number` begins."""
        now = time.monotonic()
        # The first step ends for the loop when the devices have it in their queue; each one after it, when the devices
        # have done the one before. So the first two have no limit of their own.
        if self.num_begun > 1:
            self.steps.append(now - self.start_time)
        self.num_begun += 1
        median = statistics.median(self.steps) if self.steps else float("inf")
        limit = max(self.cfg.step_deadline_s, self.cfg.step_deadline_factor * median)
        self.doing, self.number, self.start_time, self.since = "a step", number, now, now
        self.is_announced = False  # each step has a line of its own
        self.limit = min(limit, self.cfg.phase_deadline_s)

    def start_over(self) -> None:
        """Forget how long steps took: those that follow have another batch. The next one has a phase's deadline."""
        self.steps.clear()
        self.num_begun = 0
        self.doing, self.since, self.limit = "a change of batch", time.monotonic(), float(self.cfg.phase_deadline_s)

    @contextmanager
    def phase(self, name: str, limit_s: float | None = None, is_announced: bool = True) -> Iterator[None]:
        """Name the work of the block, which may take `limit_s`, or `phase_deadline_s` where that is None.

        Without `is_announced` nothing says that it takes long.
        """
        # Phases may lie within one another. After one, the work around it has its full time again.
        before = self.doing, self.limit, self.is_announced
        limit = self.cfg.phase_deadline_s if limit_s is None else limit_s
        self.doing, self.since, self.limit, self.is_announced = name, time.monotonic(), limit, is_announced
        try:
            yield
        finally:
            self.doing, self.limit, self.is_announced = before
            self.since = time.monotonic()

    def _watch(self) -> None:
        last_published = 0.0
        while not self.ended.wait(POLL_S):
            now = time.monotonic()
            if now - last_published > PUBLISH_S:
                last_published = now
                self._publish()
                if jax.process_index() == 0:
                    self.pace.compare(_read_states())
            if self.limit == math.inf and (reason := find_request()):
                self._stop(reason)
            # A process that fails says so before it ends. The others read it here, and end at once with its reason; by
            # heartbeats alone they would learn of the end after `heartbeat_timeout_s`, without the reason.
            for rank, failure in peers.published("failed").items():
                if int(rank) != jax.process_index():
                    self._follow(int(rank), failure)
            if now - self.since > self.limit:
                self._expire(now - self.since)
            self._announce(now)

    def _announce(self, now: float) -> None:
        """Say on process 0 what takes long, again and again (`progress.find_wait`)."""
        begun = self.since
        last = max(begun, self.announced)
        if self.is_announced and peers.is_main() and now - last > progress.find_wait(last - begun):
            self.announced = now
            log.info("%s: %.0f s so far", self.doing, now - begun)

    def _publish(self) -> None:
        state = {"step": self.number, "doing": self.doing, "host": socket.gethostname(), **self.pace.average()}
        peers.publish(f"progress/{jax.process_index()}", json.dumps({**state, "for_s": time.monotonic() - self.since}))

    def _stop(self, reason: str) -> None:
        """End before the first step, with nothing to save: data may take hours, and a cluster waits for minutes."""
        reason = f"{reason} while {self.doing}: nothing to save"
        print(reason, flush=True)
        remove_unfinished()
        peers.leave(exits.STOPPED, reason)
        os._exit(exits.STOPPED)

    def _follow(self, rank: int, failure: str) -> None:
        """End after a peer that has failed."""
        # An error that all processes find at the same time ends each by itself, with its own message.
        if self.ended.wait(POLL_S):
            return
        self._dump_stacks()
        self._end(*peers.describe_failure(rank, failure))

    def _expire(self, waited_s: float) -> None:
        """End after a deadline has passed: log where every process is, and name the one that is late."""
        since = self.since
        self._publish()
        if self.ended.wait(2 * POLL_S):  # until the others have published their state too
            return
        # The work may have ended meanwhile: late, and not for ever.
        if self.since != since:
            log.warning("step %d took %.0f s, more than its deadline of %.0f s", self.number, waited_s, self.limit)
            return
        states = _read_states()
        lines = [
            f"process {rank} ({state['host']}): step {state['step']}, {state['doing']}, {state['for_s']:.0f} s"
            for rank, state in sorted(states.items())
        ]
        log.error("\n".join(["where each process is:", *lines]))
        self._dump_stacks()
        # The late process is in the earliest step. Of several in that step, it is one that does something else than the
        # step: those inside the step wait for it.
        #     process 0: step 7, a step         process 1: step 7, reading data   <- late      process 2: step 7, a step
        late = min(states, key=lambda rank: (states[rank]["step"], states[rank]["doing"] == "a step"), default=0)
        who = f"process {late} is late; " if len(states) > 1 else ""
        self._end(
            exits.PEER,
            f"{self.doing} at step {self.number} has taken {waited_s:.0f} s, its deadline was {self.limit:.0f} s; {who}"
            "stacks are in the log; distributed.step_deadline_s, distributed.phase_deadline_s",
        )

    def _dump_stacks(self) -> None:
        """Write the stack of every thread into this process's log."""
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler) and handler.stream:
                faulthandler.dump_traceback(handler.stream, all_threads=True)

    def _end(self, code: int, reason: str) -> None:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        ending = PeerLost(reason)
        ending.code = code
        telling = threading.Thread(target=self.tell, args=(ending,), daemon=True)  # it may hang too
        telling.start()
        telling.join(JOIN_S)
        peers.leave(code, reason)
        os._exit(code)  # sys.exit would end this thread alone


def _read_states() -> dict[int, dict[str, Any]]:
    """Return what each process has published of itself, by rank."""
    return {int(rank): json.loads(text) for rank, text in peers.published("progress").items()}
