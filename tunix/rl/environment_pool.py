"""Processes that hold environments: asked without waiting, killed when one call is late, and filled again by replay.

    episode      0 1 2 3 4 5 6 7
    process 0    0   2   4   6        each calls one environment at a time, in the order of the requests
    process 1      1   3   5   7

A process that ends or is killed takes all of its episodes with it. Each of them is played again, from its seed and the
texts of its turns, when it is asked next. The episode that was at work is played again once: after the second death it
is given up, and has no score. So one bad episode costs itself, and no other.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from tunix.base.errors import UserError
from tunix.rl.child_process import START_S, ChildProcess, LateProcess, LostProcess
from tunix.rl.environment_worker import Request
from tunix.rl.environments import Reply
from tunix.rl.table import find_environment

log = logging.getLogger(__name__)

DEATHS = 2  # of processes in which an episode is at work; with the last one it is given up


class Answered(NamedTuple):
    """The reply to the newest request of an episode, or in its place the text of an error, which ends the episode."""

    number: int  # of the episode
    reply: Reply | None
    problem: str
    seconds: float  # that its environment has worked


@dataclass
class _Played:
    """What an episode was asked and what it has replied."""

    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    deaths: int = 0


class _Holder(threading.Thread):
    """A thread that talks with one process, and what is known of the episodes that the process holds."""

    def __init__(self, pool: "EnvironmentPool"):
        super().__init__(name="environments", daemon=True)
        self.pool = pool
        self.inbox: queue.SimpleQueue[tuple[int, int, Request] | None] = queue.SimpleQueue()
        self.process = ChildProcess("tunix.rl.environment_worker:serve", pool.arguments)
        self.played: dict[int, _Played] = {}
        self.present: set[int] = set()  # episodes that the process holds
        self.generation = 0
        self.seconds = 0.0  # that its environments have worked since `EnvironmentPool.begin`

    def run(self) -> None:
        while (item := self.inbox.get()) is not None:
            generation, number, request = item
            if generation != self.generation:  # episodes of an earlier rollout, which may have been given up
                self.generation = generation
                for old in [*self.played]:
                    self._forget(old)
            try:
                if request[0] == "forget":
                    self._forget(number)
                else:
                    self.pool.outbox.put((generation, self._ask(number, request)))
            except BaseException as error:  # the thread that waits for replies raises it
                self.pool.outbox.put((generation, error))
                return

    def _ask(self, number: int, request: Request) -> Answered:
        played = self.played.setdefault(number, _Played())
        played.requests.append(request)
        while True:
            again = number not in self.present and len(played.requests) > 1
            if again and not self.pool.replays:
                return Answered(number, None, "its process was lost, and replays=False forbids to play it again", 0.0)
            requests = played.requests if number not in self.present else [request]
            self.present.add(number)
            try:
                replies, problem, seconds = self.process.exchange(
                    ("play", number, requests), self.pool.timeout_s * len(requests)
                )
                self.seconds += seconds
            except LostProcess as lost:
                if not self.process.closed:
                    self._replace(lost)
                played.deaths += 1
                if isinstance(lost, LateProcess) or played.deaths == DEATHS or self.process.closed:
                    twice = "" if isinstance(lost, LateProcess) else ", twice"
                    return Answered(number, None, f"its process {lost}{twice}", 0.0)
                continue
            if not problem and replies[:-1] != played.replies[len(played.requests) - len(requests) :]:
                problem = "played again, it says something else; set replays = False on its class"
            if problem:
                return Answered(number, None, problem, seconds)
            played.replies.append(replies[-1])
            return Answered(number, replies[-1], "", seconds)

    def _forget(self, number: int) -> None:
        self.played.pop(number, None)
        if number not in self.present:
            return
        self.present.discard(number)
        try:
            self.process.exchange(("forget", number), self.pool.timeout_s)
        except LostProcess as lost:
            if not self.process.closed:
                self._replace(lost)

    def _replace(self, lost: LostProcess) -> None:
        log.debug("a process of environments %s; it is started again", lost)
        self.pool.count_lost()
        self.process.kill()
        self.process.connection.close()
        self.present.clear()
        self.process.start()
        self.process.wait_until_ready(START_S)


class EnvironmentPool:
    """Processes with environments: `with EnvironmentPool(...) as pool: pool.ask(...)`, then `pool.replies(...)`."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        tool_calls: str,
        processes: int,
        timeout_s: float,
        memory_mib: int,
    ):
        """`name` is a row of `ENVIRONMENTS`, `tool_calls` one of `TOOL_CALLS`, or either a dotted path.

        Args:
            timeout_s: seconds that one call of an environment may take.
            memory_mib: of each process.
        """
        self.name, self.timeout_s = name, timeout_s
        self.arguments = name, dict(options), tool_calls, memory_mib
        self.replays = getattr(find_environment(name), "replays", True)
        self.num_processes, self.holders = processes, list[_Holder]()
        self.outbox: queue.SimpleQueue[tuple[int, Answered | BaseException]] = queue.SimpleQueue()
        self.generation, self.num_lost, self.lock = 0, 0, threading.Lock()
        self.num_pending = 0  # replies that are still to come

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            UserError: one ends, or takes too long, before it has imported the environment.
        """
        try:
            for _ in range(self.num_processes):
                self.holders.append(_Holder(self))
            for holder in self.holders:  # they start side by side
                holder.process.wait_until_ready(START_S)
        except LostProcess as lost:
            self.__exit__()
            raise UserError(f"task.environment={self.name}: its process {lost}") from None
        except BaseException:
            self.__exit__()
            raise
        for holder in self.holders:
            holder.start()
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self.holders:
            holder.inbox.put(None)
            holder.process.close()
        for holder in self.holders:
            if holder.ident is not None:
                holder.join()
            holder.process.connection.close()

    def begin(self) -> None:
        """Begin new episodes: those before are forgotten, and so are the replies that they still owe."""
        self.generation += 1
        self.num_lost = self.num_pending = 0
        for holder in self.holders:
            holder.seconds = 0.0

    @property
    def busiest_s(self) -> float:
        """Seconds that the environments of the busiest process have worked since `begin`."""
        return max(holder.seconds for holder in self.holders)

    def ask(self, number: int, request: Request) -> None:
        """Send a request of an episode; its reply comes with `replies`."""
        self.num_pending += request[0] != "forget"
        self.holders[number % len(self.holders)].inbox.put((self.generation, number, request))

    def forget(self, number: int) -> None:
        """End an episode, whose environment is closed; there is no reply."""
        self.ask(number, ("forget",))

    def replies(self, timeout_s: float) -> list[Answered]:
        """Return the replies that have come: all that are due, or those of the next `timeout_s`.

        Raises:
            UserError: a process that was lost cannot be started again.
        """
        found: list[Answered] = []
        deadline = time.monotonic() + timeout_s
        while self.num_pending:
            wait_s = deadline - time.monotonic()
            try:
                generation, answered = self.outbox.get(timeout=wait_s) if wait_s > 0 else self.outbox.get_nowait()
            except queue.Empty:
                break
            if isinstance(answered, LostProcess):
                raise UserError(f"task.environment={self.name}: a new process {answered}")
            if isinstance(answered, BaseException):
                raise answered
            if generation == self.generation:
                self.num_pending -= 1
                found.append(answered)
        return found

    def count_lost(self) -> None:
        with self.lock:
            self.num_lost += 1

    def try_out(self, columns: Mapping[str, Any]) -> Sequence[Reply]:
        """Play an episode of one empty turn in every process; `columns` are those of a prompt's row.

        A model may write anything, also nothing, so an environment must take every text.

        Libraries that the environment imports at its first call are there afterwards.

        Raises:
            UserError: the environment fails; the message names it and its error.
        """
        self.begin()
        usual, self.timeout_s = self.timeout_s, START_S
        first = []
        for requests in ([("reset", 0, dict(columns))], [("step", "")]):
            for number in range(len(self.holders)):
                self.ask(number, requests[0])
            waiting = set(range(len(self.holders)))
            while waiting:
                for answered in self.replies(START_S):
                    if answered.reply is None:
                        raise UserError(f"task.environment={self.name} fails: {answered.problem}")
                    waiting.discard(answered.number)
                    first.append(answered.reply)
        for number in range(len(self.holders)):
            self.forget(number)
        self.timeout_s = usual
        return first
