"""Processes that hold environments: asked without waiting, killed when one call is late, and filled again by replay.

    episode      0 1 2 3 4 5 6 7      the process that has the fewest takes an episode
    process 0    0   2   4   6        each calls one environment at a time, in the order of the requests
    process 1      1   3   5   7

A process that ends or is killed takes all of its episodes with it. Each of them is played again, from its seed and the
texts of its turns, when it is asked next. The episode that was at work is played again once: after the second death it
is given up, and has no score. An episode whose call was late is given up at once. So one bad episode costs itself, and
no other.

A process answers (`serve`):

    parent   ("play", key, limit_s, requests) ->   child   an object for each episode, by its key
    parent   <-  (replies, problem, seconds)       child
    parent   ("forget", key, limit_s)         ->   child   ends an episode, also one that is not there

`limit_s` is None, or the seconds after which the call is interrupted, where episodes cannot be played again.

    requests   ("reset", seed, columns) · ("step", text) · ("finish",)

The requests of an episode are the newest one, or, where the process does not have the episode, all since its reset: an
environment that gets its seed and the texts of its turns again comes into the same state.

Episodes that are played together belong to a session. Several sessions share the processes at one time: those of
rollouts that are drawn ahead, and of held-out prompts. Each has replies of its own.

Imports no jax, for the processes' sake.
"""

import itertools
import logging
import os
import queue
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

from tunix.base import dotted_path
from tunix.base.errors import UserError
from tunix.rl import environments
from tunix.rl.environments import OpenEnvironment, Reply, open_environment
from tunix.rl.scoring import START_S, ChildProcess, LateProcess, LostProcess, connect, describe_error
from tunix.rl.table import find_environment, format_environment
from tunix.rl.tools import remove_folders

log = logging.getLogger(__name__)

Request = tuple[Any, ...]
Key = tuple[int, int]  # of an episode: the number of its session, and its own

SAMPLE: Key = -1, 0  # of the episode that a new process plays first
GRACE_S = 1.0  # for a call that is interrupted to end
DEATHS = 2  # of processes in which an episode is at work; with the last one it is given up


class Answered(NamedTuple):
    """The reply to the newest request of an episode, or in its place the text of an error, which ends the episode."""

    number: int  # of the episode
    reply: Reply | None
    problem: str
    seconds: float  # that its environment has worked


@dataclass
class _Played:
    """Requests to the environment of an episode, and its replies."""

    requests: list[Request] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    deaths: int = 0


class _Holder(threading.Thread):
    """A thread that talks with one process, and what is known of the episodes that the process holds."""

    def __init__(self, pool: "EnvironmentPool", index: int):
        super().__init__(name="environments", daemon=True)
        self.pool, self.index = pool, index
        self.inbox: queue.SimpleQueue[tuple[Session, int, Request] | None] = queue.SimpleQueue()
        self.process = ChildProcess("tunix.rl.environment_pool:serve", pool.arguments)
        self.played: dict[Key, _Played] = {}
        self.present: set[Key] = set()  # episodes that the process holds
        self.num_episodes = 0  # that are not over yet

    def run(self) -> None:
        while (item := self.inbox.get()) is not None:
            session, number, request = item
            try:
                if request[0] == "close":
                    for key in [key for key in self.played if key[0] == session.number]:
                        self._forget(session, key)
                elif session.is_closed:
                    continue
                elif request[0] == "forget":
                    self._forget(session, (session.number, number))
                else:
                    session.outbox.put(self._ask(session, number, request))
            except BaseException as error:  # the threads that wait for replies raise it
                self.pool.fail(error)
                return

    def _ask(self, session: "Session", number: int, request: Request) -> Answered:
        key = session.number, number
        played = self.played.setdefault(key, _Played())
        played.requests.append(request)
        while True:
            again = key not in self.present and len(played.requests) > 1
            if again and not self.pool.replays:
                return Answered(number, None, "its process was lost, and replays=False forbids to play it again", 0.0)
            requests = played.requests if key not in self.present else [request]
            self.present.add(key)
            try:
                replies, problem, seconds = self._exchange("play", key, self.pool.timeout_s * len(requests), requests)
                session.seconds[self.index] += seconds
            except LostProcess as lost:
                self._replace(session, lost)
                played.deaths += 1
                if isinstance(lost, LateProcess) or played.deaths == DEATHS or self.process.closed:
                    twice = "" if isinstance(lost, LateProcess) else ", twice"
                    return Answered(number, None, f"its process {lost}{twice}", 0.0)
                continue
            if not problem and replies[:-1] != played.replies[len(played.requests) - len(requests) :]:
                problem = "played again, it says something else; set replays = False on its class"
            if problem.startswith("MemoryError") and self.pool.replays:
                # What earlier episodes have left in the process may be what fills it: a new one has room.
                self._replace(session, LostProcess("has no memory left"))
            if problem:
                return Answered(number, None, problem, seconds)
            played.replies.append(replies[-1])
            return Answered(number, replies[-1], "", seconds)

    def _forget(self, session: "Session", key: Key) -> None:
        self.played.pop(key, None)
        if key not in self.present:
            return
        self.present.discard(key)
        try:
            self._exchange("forget", key, self.pool.timeout_s)
        except LostProcess as lost:
            self._replace(session, lost)

    def _replace(self, session: "Session", lost: LostProcess) -> None:
        """Start the process again, unless the pool is closed."""
        if self.process.closed:
            return
        log.debug("a process of environments %s; it is started again", lost)
        with self.pool.lock:
            session.num_lost += 1
        self.present.clear()
        self._start_again()
        if self.pool.sample is None:
            return
        # What the environment loads at its first call may take longer than a call may.
        try:
            self._exchange("play", SAMPLE, START_S, self.pool.sample)
            self._exchange("forget", SAMPLE, START_S)
        except LostProcess as again:
            log.debug("a new process of environments %s at its first call; it is started again", again)
            if not self.process.closed:
                self._start_again()

    def _exchange(self, kind: str, key: Key, timeout_s: float, *more: Any) -> Any:
        """Send a request to the process, and return its reply; raises `LostProcess`. Where a process that is killed
        would end all of its episodes, a late call is interrupted, and the process is killed if that is in vain."""
        if self.pool.replays:
            return self.process.exchange((kind, key, None, *more), timeout_s)
        return self.process.exchange((kind, key, timeout_s, *more), timeout_s + GRACE_S)

    def _start_again(self) -> None:
        self.process.kill()
        remove_folders(self.process.process.pid)
        self.process.connection.close()
        self.process.start()
        self.process.wait_until_ready(START_S)


class Session:
    """Episodes that are played together, each known by its number: `with pool.open() as session`."""

    def __init__(self, pool: "EnvironmentPool", number: int):
        self.pool, self.number, self.is_closed = pool, number, False
        self.outbox: queue.SimpleQueue[Answered | None] = queue.SimpleQueue()  # None: the pool has failed
        self.seconds = [0.0] * len(pool.holders)  # that the environments of each process have worked
        self.num_lost = 0  # processes, while they worked for this session
        self.num_pending = 0  # replies that are still to come
        self.holders: dict[int, _Holder] = {}  # of the episodes that are not over

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Give up the episodes, and the replies that they still owe."""
        self.is_closed = True
        self.pool.sessions.discard(self)
        for number in [*self.holders]:
            self._leave(number)
        for holder in self.pool.holders:
            holder.inbox.put((self, 0, ("close",)))

    def ask(self, number: int, request: Request) -> None:
        """Send a request of an episode; its reply comes with `replies`, but for `forget`, which ends the episode.

        The process with the fewest episodes takes a new one.
        """
        self.num_pending += request[0] != "forget"
        if request[0] == "reset":
            _, seed, columns = request
            request = ("reset", seed, {**dict.fromkeys(self.pool.column_names), **columns})
        if number not in self.holders:
            with self.pool.lock:
                holder = min(self.pool.holders, key=lambda holder: holder.num_episodes)
                holder.num_episodes += 1
            self.holders[number] = holder
        self.holders[number].inbox.put((self, number, request))
        if request[0] == "forget":
            self._leave(number)

    def replies(self, timeout_s: float) -> list[Answered]:
        """Return the replies that have come: all that are due, or those of the next `timeout_s`.

        Raises:
            UserError: a process that was lost cannot be started again.
        """
        found: list[Answered] = []
        deadline = time.monotonic() + timeout_s
        self.pool.check()
        while self.num_pending:
            wait_s = deadline - time.monotonic()
            try:
                answered = self.outbox.get(timeout=wait_s) if wait_s > 0 else self.outbox.get_nowait()
            except queue.Empty:
                break
            if answered is None:
                self.pool.check()
            else:
                self.num_pending -= 1
                found.append(answered)
        return found

    def _leave(self, number: int) -> None:
        holder = self.holders.pop(number)
        with self.pool.lock:
            holder.num_episodes -= 1


class EnvironmentPool:
    """Processes with environments: `with EnvironmentPool(...) as pool, pool.open() as session: session.ask(...)`."""

    def __init__(
        self,
        name: str | Sequence[str],
        options: Mapping[str, Any],
        tool_calls: str,
        processes: int,
        timeout_s: float,
        memory_mib: int,
        column_names: Sequence[str] = (),
    ):
        """`name` is a row of `ENVIRONMENTS`, or several, `tool_calls` one of `TOOL_CALLS`; or dotted paths.

        Args:
            timeout_s: seconds that one call of an environment may take.
            memory_mib: of each process.
            column_names: of the data; `reset` gets None for each of them that a row lacks.
        """
        self.name, self.timeout_s, self.column_names = format_environment(name), timeout_s, column_names
        self.arguments = name, dict(options), tool_calls, memory_mib
        self.replays = getattr(find_environment(name), "replays", True)
        self.num_processes, self.holders = processes, list[_Holder]()
        self.sessions: set[Session] = set()
        self.numbers, self.lock = itertools.count(), threading.Lock()
        self.sample: list[Request] | None = None  # requests of an episode that a new process plays before others
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        """Start the processes. Raises `UserError` where one ends, or takes too long, before it has imported the
        environment."""
        try:
            for index in range(self.num_processes):
                self.holders.append(_Holder(self, index))
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
            # Before its thread ends: the process would end with the thread, and what it has left would not.
            holder.process.close()
            holder.inbox.put(None)
        for holder in self.holders:
            if holder.ident is not None:
                holder.join()
            remove_folders(holder.process.process.pid)
            holder.process.connection.close()

    def open(self) -> Session:
        """Return a session for new episodes."""
        session = Session(self, next(self.numbers))
        self.sessions.add(session)
        return session

    def fail(self, error: BaseException) -> None:
        """Take an error after which a process is not there any more: all sessions raise it."""
        self.error = error
        for session in [*self.sessions]:
            session.outbox.put(None)

    def check(self) -> None:
        """Raise the error of the processes, if there is one."""
        if isinstance(self.error, LostProcess):
            raise UserError(f"task.environment={self.name}: a new process {self.error}")
        if self.error is not None:
            raise self.error

    def try_out(self, columns: Mapping[str, Any]) -> Sequence[Reply]:
        """Play an episode of one empty turn in every process; `columns` are those of a prompt's row.

        A model may write anything, also nothing, so an environment must take every text.

        Libraries that the environment imports at its first call are there afterwards.

        Raises:
            UserError: the environment fails; the message names it and its error.
        """
        usual, self.timeout_s = self.timeout_s, START_S
        first = []
        sample: list[Request] = [("reset", 0, dict(columns)), ("step", "")]
        with self.open() as session:
            for request in sample:
                for number in range(len(self.holders)):
                    session.ask(number, request)
                waiting = set(range(len(self.holders)))
                while waiting:
                    for answered in session.replies(START_S):
                        if answered.reply is None:
                            raise UserError(f"task.environment={self.name} fails: {answered.problem}")
                        waiting.discard(answered.number)
                        first.append(answered.reply)
        self.timeout_s, self.sample = usual, sample
        return first


# The processes' side.

OWN_FILES = {__file__, environments.__file__, dotted_path.__file__}


def serve(
    descriptor: int, parent: int, name: str | list[str], options: dict[str, Any], tool_calls: str, memory_mib: int
) -> None:
    """Import the environment, report that all is ready, and answer requests until the parent closes the socket."""
    connection = connect(descriptor, parent)
    process_id = os.getpid()
    make = partial(open_environment, find_environment(name), options, tool_calls)
    # Of anonymous memory: what libraries map without using it does not count. A child that it starts has the same.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib * 2**20, memory_mib * 2**20))
    episodes: dict[Key, OpenEnvironment] = {}
    connection.send("ready")
    while True:
        try:
            kind, key, limit_s, *rest = connection.recv()
        except EOFError:
            return
        start_time = time.perf_counter()
        limit = nullcontext() if limit_s is None else dotted_path.time_limit(limit_s)
        if kind == "play":
            replies, problem = play(episodes, make, key, rest[0], limit)
        else:
            replies, problem = [], ""
            with suppress(Exception), limit:  # an error while it is closed changes nothing that is known of the episode
                if key in episodes:
                    episodes.pop(key).close()
        if os.getpid() != process_id:  # the environment has forked, and its child comes here too
            os._exit(0)
        connection.send((replies, problem, time.perf_counter() - start_time))


def play(
    episodes: dict[Key, OpenEnvironment],
    make: Callable[[], OpenEnvironment],
    key: Key,
    requests: list[Request],
    limit: AbstractContextManager[None],
) -> tuple[list[Reply], str]:
    """Return the replies of an episode's environment, and the text of an error, which ends the episode.

    `limit` raises an error in a call that is late.
    """
    replies = []
    try:
        with limit:
            for request in requests:
                replies.append(_call(episodes, make, key, request))
    except BaseException as error:  # an environment may raise anything, also SystemExit
        return replies, describe_error(error, OWN_FILES)
    return replies, ""


def _call(
    episodes: dict[Key, OpenEnvironment], make: Callable[[], OpenEnvironment], key: Key, request: Request
) -> Reply:
    kind, *arguments = request
    if kind == "reset":
        episodes[key] = make()
        return episodes[key].reset(*arguments)
    if kind == "step":
        return episodes[key].step(*arguments)
    assert kind == "finish", kind
    return Reply(None, episodes[key].finish(), True)
