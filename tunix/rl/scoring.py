"""Scores of answers, computed by rewards in processes of their own; and processes that run code of the user.

    rows of a batch     0 1 2 3 4 5 6 7
    a worker            0 1 2 3                each worker scores its rows with one reward after the other
    another one                 4 5 6 7

A reward is code of the user. It may raise, hang, end its process or return anything; training must go on or end with a
message that names it. So each reward runs in a process that can be killed (`ChildProcess`), which talks to this one
through a socket:

    parent   {function, prompts, completions, columns, group_size}  ->   worker: `serve`
    parent   <-  for each answer its score, or a text about what is wrong   worker

Imports no jax, for the workers' sake.
"""

import ctypes
import inspect
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol, Self

import psutil

from tunix.base import dotted_path
from tunix.base.dotted_path import describe_value, select_named
from tunix.base.errors import UserError
from tunix.base.files import STOP_SIGNALS, follow_parent
from tunix.rl import rewards as rewards_of_tunix
from tunix.rl.rewards import MAX_SCORE, Reward
from tunix.rl.table import find_reward

log = logging.getLogger(__name__)


# Processes that run code of the user, as rewards and environments are: started, asked, killed when they are late, and
# started again.
#
#    parent   ChildProcess("tunix.rl.scoring:serve", ...)   -- request -->   child   serve(descriptor, parent, ...)
#                                                                <-- reply --
#
# The processes are started here and not by `multiprocessing`: its processes import the main program again, and with it
# jax, or run a user's script a second time. A child works in its main thread, so that the user's code may set alarms
# (math-verify does). When the parent is gone, the socket ends and so does the child; a thread watches the parent while
# the user's code runs.


START_S = 120.0  # to import the user's code, and to call it for the first time: libraries are imported, files are read
# prctl(2): a signal for this process when its parent ends; descendants whose parents have ended become its children
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PROGRAM = (  # of a child: it finds the modules that this process finds
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tunix.base.dotted_path import import_object;"
    " import_object(sys.argv[2])(int(sys.argv[3]), int(sys.argv[4]), *json.loads(sys.argv[5]))"
)


class LostProcess(Exception):
    """A process that is gone or was killed before it answered; the text says why, and begins with a verb."""


class LateProcess(LostProcess):
    """A process that was killed because it took too long."""


class ChildProcess:
    """A process that answers one request at a time, of which the first reply says that it is ready."""

    def __init__(self, function: str, arguments: tuple[Any, ...]):
        """`function` is the place of the child's program, which gets a descriptor, the parent's process id and
        `arguments`, which JSON can hold."""
        self.function, self.arguments = function, arguments
        self.closed = False
        self.start()

    def start(self) -> None:
        """Start the process; raises `LostProcess` where the system refuses one, as where the user has too many."""
        self.connection, child = Pipe()
        ends = str(child.fileno()), str(os.getpid())
        words = json.dumps(sys.path), self.function, *ends, json.dumps(self.arguments)
        # Hashes of texts, by which sets are ordered, are those of each process that plays an episode or resumes a run.
        environment = {"PYTHONHASHSEED": "0", **os.environ}
        # A session of its own: Ctrl-C does not reach it, and what the user's code has started is killed with it.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words],
                pass_fds=[child.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise LostProcess(f"cannot be started ({error.strerror})") from None
        finally:
            child.close()

    def wait_until_ready(self, start_s: float) -> None:
        """Wait until the process has imported the user's code. Raises `LostProcess` where it ends, or takes longer than
        `start_s`."""
        try:
            if self.connection.poll(start_s):
                self.connection.recv()
                return
        except (EOFError, OSError):
            raise LostProcess(f"{self.describe_end()} while it imported them; its error is on stderr") from None
        raise LateProcess(f"has not imported them after {start_s:g} s")

    def exchange(self, request: tuple[Any, ...], timeout_s: float) -> Any:
        """Send a request and return the reply; after `timeout_s` the process is killed.

        Raises:
            LostProcess: the process is gone, or was killed because it is late.
        """
        # Code that hangs cannot be interrupted from within: a timer kills its process, and the read below ends. A
        # timeout of `poll` would not do: `send` waits too, when the process does not read and the pipe is full.
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(min(timeout_s, threading.TIMEOUT_MAX), end)
        timer.start()
        try:
            self.connection.send(request)
            return self.connection.recv()
        except (EOFError, OSError):
            if late.is_set():
                raise LateProcess(f"takes longer than {timeout_s:g} s") from None
            raise LostProcess(self.describe_end()) from None
        finally:
            timer.cancel()
            timer.join()

    def describe_end(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        """End the process, and what it has started, also what has a session of its own."""
        try:
            started = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            started = []
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for each in started:
            with suppress(psutil.Error):
                each.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process for good."""
        self.closed = True
        self.kill()


# The child's side.


def connect(descriptor: int, parent: int) -> Connection:
    """Return the connection to the parent, with which this process ends."""
    # The parent decides when a child ends. A handler that does nothing is not passed on to what the user's code starts.
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also ends code that lets no other thread run, like a regex
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    follow_parent(parent)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    # What the user's code forks may live longer than this process, whose end the parent sees by the socket's end.
    os.register_at_fork(after_in_child=connection.close)
    return connection


def describe_error(error: BaseException, own_files: Collection[str]) -> str:
    """Return one line about an error: its type, its text, and where the user's code raised it.

    An error that tunix raises in `own_files`, like that of a missing column, has no place.
    """
    try:
        text = (str(error).splitlines() or [""])[0][:300]
    except Exception:  # the user's class of errors may fail here too
        text = ""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in {__file__, *own_files}]
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    # Half of a pair of surrogates, as in the name of a file that is no UTF-8, cannot be written into samples.jsonl.
    return f"{type(error).__name__}: {text}{location}".encode(errors="replace").decode()


# Processes that score answers.


OWN_FILES = {__file__, rewards_of_tunix.__file__, dotted_path.__file__}
OnError = Literal["zero", "stop"]  # an answer without a score gets 0 and is counted, or ends the run
Columns = Mapping[str, Sequence[Any]]  # {name: a value for each completion}


class ScoringProcess(ChildProcess):
    """A process that runs `serve`, which is started again after it was killed or has died."""

    def __init__(self, functions: list[str], start_s: float):
        self.functions, self.start_s = functions, start_s
        self.sample: tuple | None = None  # prompts, completions and columns that a new process scores before others
        super().__init__("tunix.rl.scoring:serve", (functions,))

    def start(self) -> None:
        """Start the process; raises `UserError` where the system refuses one."""
        try:
            super().start()
        except LostProcess as lost:
            raise self._explain(lost) from None

    def wait_for_rewards(self) -> None:
        """Wait until the process has imported the rewards. Raises `UserError` where it ends, or takes too long."""
        try:
            self.wait_until_ready(self.start_s)
        except LostProcess as lost:
            raise self._explain(lost) from None

    def _explain(self, lost: LostProcess) -> UserError:
        return UserError(f"rewards: the process that scores with {', '.join(self.functions)} {lost}")

    def ask(self, request: tuple, timeout_s: float) -> list[float | str]:
        """Return for each answer of the request its score, or why it has none. The process is replaced if it is lost.

        `request` is what `serve` reads.
        """
        try:
            return self.exchange(request, timeout_s)
        except LateProcess as late:
            self._replace()
            return [str(late)] * len(request[2])
        except LostProcess as lost:
            if self.closed:  # by another thread, because another process found that a reward fails
                return [str(lost)] * len(request[2])
            log.warning("a process that scores answers %s; it is started again, and asked once more", lost)
            self._replace()
        # Once more, because the kernel (out of memory) or an operator may have killed the process. A reward that ends
        # its process does so again, and then its answers have no score.
        try:
            return self.exchange(request, timeout_s)
        except LostProcess as lost:
            self._replace()
            return [str(lost)] * len(request[2])

    def _replace(self) -> None:
        self.kill()
        if self.closed:
            return
        self.connection.close()
        self.start()
        self.wait_for_rewards()
        if self.sample is not None:
            try:
                for function in self.functions:
                    self.exchange((function, *self.sample, 1), self.start_s)
            except LostProcess as lost:  # a reward that fails here fails for the next batch too, which counts it
                log.warning("a process that scores answers %s at its start", lost)


class Term(Protocol):
    """A reward and its weight, like `tunix.config.rewards.RewardTerm`, which stands above this file."""

    @property
    def function(self) -> str:
        """Name of a reward, or its dotted path."""

    @property
    def weight(self) -> float: ...

    @property
    def label(self) -> str:
        """Name in records."""


@dataclass(frozen=True)
class Scores:
    """Scores of the answers of one batch."""

    values: dict[str, list[float]]  # {label of a reward: a score for each answer}, 0 where there is none
    total: list[float]  # for each answer the weighted sum of its scores: 0 without rewards
    errors: dict[str, int]  # {label of a reward: answers that it did not score}
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)  # what a judge has cost, for metrics.jsonl
    failed: list[bool] = field(default_factory=list)  # for each answer, whether a reward did not score it


class Scorer:
    """Workers that score answers: `with Scorer(...) as scorer: scorer.score(prompts, completions, columns)`."""

    def __init__(
        self,
        rewards: Sequence[Term],
        processes: int,
        timeout_s: float,
        errors: OnError,
        start_s: float = START_S,
        column_names: Sequence[str] = (),
    ):
        """`timeout_s` is the time that one reward has for the answers of one batch.

        Args:
            errors: an answer that a reward does not score gets 0 and is counted, or ends the run.
            start_s: seconds for the start of a worker, and for the first row that it scores.
            column_names: of the data; rewards get None for each row of a batch that has no such column.
        """
        self.rewards, self.processes = rewards, processes if rewards else 0
        self.timeout_s, self.errors, self.start_s = timeout_s, errors, start_s
        self.column_names = column_names
        self.workers: list[ScoringProcess] = []
        # Each thread waits for one worker. Batches of several callers share the workers, the first that came first.
        self.threads = ThreadPoolExecutor(max(1, self.processes), "scoring")
        self.idle: queue.SimpleQueue[ScoringProcess] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        functions = [term.function for term in self.rewards]
        try:
            for _ in range(self.processes if functions else 0):
                self.workers.append(ScoringProcess(functions, self.start_s))
            for worker in self.workers:  # they start side by side
                worker.wait_for_rewards()
                self.idle.put(worker)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()  # a thread that waits for it goes on, and ends
        self.threads.shutdown()
        for worker in self.workers:
            worker.connection.close()

    def try_out(self, prompt: str, columns: Mapping[str, Any]) -> None:
        """Score made-up answers to one prompt in every worker; `columns` are those of the prompt's row.

        Libraries that a reward imports at its first call are there afterwards. Raises `UserError` where a reward fails;
        the message names it and its first error.
        """
        # The data's own answer runs the code for right answers; the empty one is what a new model may give.
        answers = [str(columns.get("answer", "42")), ""]
        row = [prompt] * 2, answers, self._complete({name: [value] * 2 for name, value in columns.items()}, 2)

        def try_worker(worker: "ScoringProcess") -> None:
            worker.sample = row
            for term in self.rewards:
                scores = worker.ask((term.function, *row, len(answers)), self.start_s)
                if failed := [score for score in scores if isinstance(score, str)]:
                    raise UserError(f"rewards: {term.function} fails: {failed[0]}")

        for tried in as_completed([self.threads.submit(try_worker, worker) for worker in self.workers]):
            tried.result()  # the first failure ends the run, whatever the other processes still do

    def score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Columns, group_size: int = 1
    ) -> Scores:
        """Score the answers of one batch; the answers to one prompt are `group_size` rows one after the other.

        A reward gets whole groups, those of one worker at a time.

        Raises:
            UserError: an answer has no score and `errors` is "stop"; the message names the reward and the error.
        """
        start_time = time.perf_counter()
        slices = _split(len(completions), group_size, len(self.workers))
        columns = self._complete(columns, len(completions))

        def score_share(share: slice) -> list[list[float | str]]:
            """Return for each reward the scores of the share's answers."""
            local = {name: list(values[share]) for name, values in columns.items()}
            texts = list(prompts[share]), list(completions[share])
            worker = self.idle.get()  # there is one, because there are as many threads as workers
            try:
                return [worker.ask((term.function, *texts, local, group_size), self.timeout_s) for term in self.rewards]
            finally:
                self.idle.put(worker)

        # A thread waits for each worker: the workers compute side by side, and this process does nothing meanwhile.
        parts = list(self.threads.map(score_share, slices)) if self.workers else []
        values: dict[str, list[float]] = {}
        errors: dict[str, int] = {}
        failed = [False] * len(completions)
        for number, term in enumerate(self.rewards):
            scores = [score for part in parts for score in part[number]]
            values[term.label], errors[term.label] = count_failed(term.function, term.label, scores, self.errors)
            failed = mark_failed(failed, scores)
        weights = [term.weight for term in self.rewards]
        rows = zip(*values.values(), strict=True) if values else [()] * len(completions)
        total = [sum(weight * score for weight, score in zip(weights, row, strict=True)) for row in rows]
        return Scores(values, total, errors, time.perf_counter() - start_time, failed=failed)

    def _complete(self, columns: Columns, num_rows: int) -> Columns:
        return {**{name: [None] * num_rows for name in self.column_names}, **columns}


def count_failed(name: str, label: str, scores: Sequence[float | str], errors: OnError) -> tuple[list[float], int]:
    """Return the scores of a reward with 0 for each answer that has none, but a text that says why; and how many.

    `name` is that of the reward in an error, and `label` that in records. Raises `UserError` where there is such an
    answer, and `errors` is "stop".
    """
    failed = [score for score in scores if isinstance(score, str)]
    if failed and errors == "stop":
        raise UserError(f"rewards: {name} fails: {failed[0]}; reward_errors=zero scores such answers 0 and counts them")
    if failed:
        counts = label, len(failed), len(scores), failed[0]
        log.warning("reward %s: %d of %d answers have no score and get 0: %s", *counts)
    return [0.0 if isinstance(score, str) else score for score in scores], len(failed)


def mark_failed(failed: Sequence[bool], scores: Sequence[float | str]) -> list[bool]:
    """Return for each answer whether an earlier reward did not score it, or this one, which gives a text then."""
    return [before or isinstance(score, str) for before, score in zip(failed, scores, strict=True)]


def _split(num_rows: int, group_size: int, num_parts: int) -> list[slice]:
    """Cut the rows into consecutive parts of whole groups, as equal as can be; empty parts are left out."""
    num_groups = -(-num_rows // group_size)
    # 5 groups of 2 rows for 3 parts: cuts at groups 0, 1, 3 and 5, so at rows 0, 2, 6 and 10.
    bounds = [number * num_groups // num_parts * group_size for number in range(num_parts)] + [num_rows]
    return [slice(first, stop) for first, stop in pairwise(bounds) if first < stop]


# The worker's side.


def serve(descriptor: int, parent: int, rewards: list[str]) -> None:
    """Import the rewards, report that all is ready, and answer requests until the parent closes the socket."""
    connection = connect(descriptor, parent)
    functions = {name: find_reward(name) for name in rewards}
    connection.send("ready")
    while True:
        try:
            name, prompts, completions, columns, group_size = connection.recv()
        except EOFError:
            return
        connection.send(score(functions[name], prompts, completions, columns, group_size))


def score(
    function: Any, prompts: list[str], completions: list[str], columns: dict[str, list[Any]], group_size: int
) -> list[float | str]:
    """Return for each answer its score, or the text of an error.

    When the function raises, it is called again for each group of answers alone, so that one bad row costs the scores
    of its group only.
    """
    try:
        # Lists of its own: what it takes out of them is there again for the call for each group.
        return call_reward(function, prompts, completions, {name: list(values) for name, values in columns.items()})
    except BaseException as error:  # a reward may raise anything, also SystemExit
        if len(completions) <= group_size:
            return [describe_error(error, OWN_FILES)] * len(completions)
    scores: list[float | str] = []
    for first in range(0, len(completions), group_size):
        part = slice(first, first + group_size)
        local = {name: values[part] for name, values in columns.items()}
        # A group is not longer than `group_size`, so this call goes no deeper.
        scores += score(function, prompts[part], completions[part], local, group_size)
    return scores


# Call of a reward: the columns that it takes, and a check of what it returns.

BATCH_NAMES = ("prompts", "completions")
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def select_arguments(
    function: Reward, prompts: Sequence[str], completions: Sequence[str], columns: Columns
) -> tuple[list[list[str]], dict[str, Sequence[Any]]]:
    """Return what a function takes by position and by name: prompts, completions, and the columns of its parameters, or
    all columns where it has **columns.

    Its first two parameters are prompts and completions, whatever their names. Where they are not, as in TRL's
    `(completions, **columns)`, it gets both by name.

    Raises:
        ValueError: it takes no completions; it has a parameter without a default that is no column of the data; or a
            column has the name of one of the two.
    """
    parameters = inspect.signature(function).parameters.values()
    batch = dict(zip(BATCH_NAMES, (list(prompts), list(completions)), strict=True))
    batch_names = [each.name for each in parameters if each.kind in BY_POSITION][:2]
    takes_any = any(each.kind == each.VAR_POSITIONAL for each in parameters)
    by_position, by_name = list(batch.values()), dict[str, Sequence[Any]]()
    if not (len(batch_names) == 2 or takes_any) or batch_names[:1] == ["completions"] or batch_names[1:] == ["prompts"]:
        has_columns = any(each.kind == each.VAR_KEYWORD for each in parameters)
        names = {each.name for each in parameters if each.kind != each.POSITIONAL_ONLY}
        batch_names = [name for name in BATCH_NAMES if name in names or has_columns]
        by_position, by_name = [], {name: batch[name] for name in batch_names}
        if "completions" not in by_name:
            raise ValueError("takes no completions; its parameters are to be (prompts, completions, **columns)")
    reserved = {*BATCH_NAMES, *batch_names}
    if "messages" in reserved:  # this column is not asked for by name, and not every row of a user has it
        columns = {name: values for name, values in columns.items() if name != "messages"}
    if taken := [name for name in columns if name in reserved]:
        raise ValueError(f"the data have a column {taken[0]}, which is an argument of every reward; rename the column")
    keywords = [each for each in parameters if each.name not in batch_names]
    return by_position, by_name | select_named("it", keywords, columns, columns)


def call_reward(
    function: Reward, prompts: Sequence[str], completions: Sequence[str], columns: Columns
) -> list[float | str]:
    """Return for each completion its score, or in place of a score the text that says what is wrong with it. Raises
    `ValueError` where the function returns no list with one value for each completion, and whatever it raises."""
    by_position, by_name = select_arguments(function, prompts, completions, columns)
    returned: Any = function(*by_position, **by_name)
    try:
        # Characters of a text and keys of a mapping are no scores, and a set has no order.
        values = None if isinstance(returned, str | bytes | Mapping | Set) else list(returned)
    except TypeError:
        values = None
    if values is None:
        raise ValueError(
            f"returned {describe_value(returned)}, not a list with a score for each of the {len(completions)} answers"
        )
    if len(values) != len(completions):
        raise ValueError(f"returned {len(values)} scores for {len(completions)} answers")
    return [read_score(value) for value in values]


def read_score(value: Any) -> float | str:
    """Return the score that a reward has given for an answer, or what is wrong with it."""
    if value is None:
        return "returned None for an answer"
    try:
        score = float(value)
    except (TypeError, ValueError):
        return f"returned {describe_value(value)} for an answer, not a number"
    except OverflowError:  # a whole number; Python does not even print one of more than 4,300 digits
        return f"returned a number beyond {MAX_SCORE:g} for an answer"
    if math.isfinite(score) and abs(score) > MAX_SCORE:
        return f"returned {score} for an answer, beyond {MAX_SCORE:g}"
    return score if math.isfinite(score) else f"returned {score} for an answer"
