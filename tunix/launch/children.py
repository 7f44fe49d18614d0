"""The parts of a run as a launcher sees them: start them together, pass signals on, log each, end them together.

A part is a process of this node (`Child`), or a node with its processes (`ray_cluster.Node`).

    a part dies -- LAST_MESSAGES_S --> SIGTERM to the others -- grace_s --> SIGKILL
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, Protocol, TypeVar

from tunix.base.errors import UserError
from tunix.base.files import HANGUP, describing_refusal, handling_signals
from tunix.launch.nodes import Node
from tunix.processes import exits

# Exit codes from the best to the worst; every other code is worse than these.
SEVERITY = (0, exits.STOPPED, exits.PEER, exits.DIVERGED, exits.USER_ERROR)
LAST_MESSAGES_S = 2.0  # after a part died, seconds in which the others may notice it themselves and log the reason
# Signals that the launcher passes on to every part. Ctrl-C (SIGINT) is passed on as SIGTERM.
FORWARDED = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    **dict.fromkeys(HANGUP, signal.SIGTERM),
    signal.SIGUSR1: signal.SIGUSR1,
}


class Part(Protocol):
    """A part of a run, which ends with an exit code."""

    rank: int
    code: int | None  # its exit code, once it has ended
    was_stopped: bool  # the launcher has sent SIGTERM to it, because another part died

    def is_done(self) -> bool:
        """Return whether the part has ended."""

    def send(self, number: int) -> None:
        """Send a signal."""


AnyPart = TypeVar("AnyPart", bound=Part)


@contextmanager
def receive_signals() -> Iterator[list[int]]:
    """Note the signals of `FORWARDED` in a list, in place of what they did before."""
    received: list[int] = []
    with handling_signals(FORWARDED, lambda number, _frame: received.append(number)):
        yield received


def wait_for_all(parts: Sequence[Part], received: list[int], grace_s: float) -> bool:
    """Wait until all parts have ended; pass signals on, and end the others when one dies.

    Args:
        received: signals that have come; they are taken out of the list.
        grace_s: seconds between SIGTERM and SIGKILL after a part died.

    Returns True if a signal has asked the run to stop.
    """
    stops, died_at, ended_at = 0, None, None
    while running := [part for part in parts if not part.is_done()]:
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
        if died_at and ended_at is None and now > died_at + LAST_MESSAGES_S:
            ended_at = now
            for part in running:
                part.was_stopped = True
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
    local = [part for part in parts if not (part.was_stopped and (part.code or 0) > 128)]
    return max(local or parts, key=lambda part: (severity(part), -part.rank))


def say(text: str) -> None:
    """Print a line of the launcher."""
    print(f"tunix.launch: {text}", file=sys.stderr, flush=True)


TAIL_LINES = 20


class Copier(threading.Thread):
    """A thread that copies an output to the terminal and the log as it comes, or with a label line by line."""

    def __init__(self, source: IO[bytes], terminal: BinaryIO, log: Path, label: bytes):
        super().__init__(daemon=True)
        self.source, self.terminal, self.log, self.label = source, terminal, log, label
        self.num_read, self.is_writing = 0, False

    def run(self) -> None:
        try:
            log: IO[bytes] = self.log.open("ab", buffering=0)
        except OSError as error:
            log = self._give_up_log(error)
        with log as file:
            # With labels it copies whole lines, so that lines of two processes do not mix. Without, it copies what is
            # there: a progress bar ends no line, and should be seen as it moves.
            while data := self.source.readline() if self.label else os.read(self.source.fileno(), 65536):
                self.num_read, self.is_writing = self.num_read + 1, True
                try:
                    file.write(data)
                except OSError as error:  # a full disk; whoever writes would wait for ever if nobody read on
                    file = self._give_up_log(error)
                try:
                    self.terminal.write(self.label + data)
                    self.terminal.flush()
                except OSError:  # the terminal is gone; go on with the log alone
                    self.terminal = open(os.devnull, "wb")  # noqa: SIM115
                self.is_writing = False

    def _give_up_log(self, error: OSError) -> IO[bytes]:
        """Say that the terminal alone has the output, and return a file that keeps nothing."""
        say(f"{self.log} cannot be written ({error.strerror}); the terminal alone shows what follows")
        return open(os.devnull, "wb")

    def finish(self, received: list[int]) -> None:
        """Wait until all output is copied, however slowly the terminal is read, or until a signal is received.

        A program that the process has left behind may keep the output open. It is not waited for.
        """
        # The process has ended, so its last output is in the pipe. Nothing more came for a second: all of it is copied.
        # The end of the pipe would say so exactly, but comes only when every process that inherited the pipe has ended.
        num_read = -1
        while self.is_alive() and not received and (self.is_writing or self.num_read != num_read):
            num_read = self.num_read
            self.join(timeout=1)


@dataclass
class Child:
    """One process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    copiers: list[Copier] = field(default_factory=list)
    code: int | None = None  # its exit code, once it has ended
    was_stopped: bool = False  # the launcher has sent SIGTERM to it, because another process died

    def is_done(self) -> bool:
        """Return whether the process has ended. Then the processes that it has started and left behind are killed."""
        if self.code is None and (status := self.process.poll()) is not None:
            self._kill_group()
            self.code = exits.find_exit_code(status)
        return self.code is not None

    def send(self, number: int) -> None:
        """Send a signal to the process; SIGKILL also goes to the processes that it started."""
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self.process.send_signal(number)

    def _kill_group(self) -> None:
        # The process has a session of its own (`_start`), so its process id is also the id of its group: the processes
        # that it has started, for example workers that read data.
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self.process.pid, signal.SIGKILL)


def build_command(script: str, arguments: list[str], module: bool, no_python: bool) -> list[str]:
    """Return the words that each process runs.

    Raises:
        UserError: there is no such script or program.
    """
    if module and no_python:
        raise UserError("--module and --no_python exclude each other")
    if module:
        return [sys.executable, "-m", script, *arguments]
    if no_python:
        if not shutil.which(script):
            raise UserError(f"--no_python {script}: no such program on the PATH")
        return [script, *arguments]
    if not Path(script).is_file():
        raise UserError(f"{script}: no such file")
    return [sys.executable, script, *arguments]


def run(
    node: Node, command: list[str], environment: Mapping[str, str], log_dir: Path | None, grace_s: float, label: bool
) -> int:
    """Run `command` once for each process of this node; return the worst of their exit codes.

    With `label` the terminal shows the output of every process, each line behind its rank; else that of process 0.
    """
    with describing_refusal(f"--log_dir={log_dir or '(a temporary one)'}", otherwise="name another folder"):
        log_dir = log_dir or Path(tempfile.mkdtemp(prefix="tunix-launch-"))
        log_dir.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    with receive_signals() as received:
        try:
            for local_rank in range(node.num_processes):
                extra_env = {"PYTHONUNBUFFERED": "1", **environment, **node.environment(local_rank)}
                children.append(_start(command, extra_env, log_dir, label))
            # Only now, because this starts threads: a process that is forked while another thread holds a lock (of the
            # memory allocator, for example) may wait for that lock for ever.
            for child in children:
                for source, terminal in ((child.process.stdout, sys.stdout), (child.process.stderr, sys.stderr)):
                    if source is not None:
                        begin = f"{child.rank}: ".encode() if label else b""
                        child.copiers.append(Copier(source, terminal.buffer, child.log, begin))
                        child.copiers[-1].start()
            say(f"{len(children)} of {node.world_size} processes; output of each in {log_dir}/train.RANK.log")
            wait_for_all(children, received, grace_s)
            for copier in (copier for child in children for copier in child.copiers):
                copier.finish(received)
            return _report(children)
        finally:
            for child in children:
                if not child.is_done():
                    child.send(signal.SIGKILL)


def _start(command: list[str], environment: Mapping[str, str], log_dir: Path, label: bool) -> Child:
    """Start one process. The output of rank 0 (with `label`, of each) goes to the terminal and to its log.

    Raises:
        UserError: its log cannot be written, or the system cannot start the program.
    """
    rank = int(environment["RANK"])
    log = log_dir / f"train.{rank}.log"
    with describing_refusal(f"--log_dir: {log}", otherwise="name another folder"):
        file = log.open("ab")
    with file:
        output = subprocess.PIPE if rank == 0 or label else file
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so a terminal sends Ctrl-C to the launcher alone, which passes it on once
                preexec_fn=exits.end_with_parent(),
            )
        except OSError as error:
            hint = "; a script begins with a line #!PROGRAM" * (error.errno in (errno.ENOEXEC, errno.ENOENT))
            raise UserError(f"{command[0]} cannot be started ({error.strerror}){hint}") from None
    return Child(rank, process, log)


def _report(children: list[Child]) -> int:
    """Return the worst exit code, and print the last lines of the process that it is from."""
    worst = find_worst(children)
    assert worst.code is not None
    if worst.code not in (0, exits.STOPPED):
        if worst.process.stdout is None:  # else its output is on the terminal already
            # A machine may clear /tmp of files that nobody has written to for days.
            with suppress(OSError), worst.log.open("rb") as file:
                file.seek(max(0, worst.log.stat().st_size - 100_000))
                print("\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]), file=sys.stderr)
        say(f"process {worst.rank} ended with exit code {worst.code}; its output is in {worst.log}")
    return worst.code
