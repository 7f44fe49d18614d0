"""The processes of one node: start them together, log each in its own file, end them together."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from tunix.base.errors import UserError
from tunix.launch.nodes import Node
from tunix.processes import exits

# Exit codes from the best to the worst; every other code is worse than these.
SEVERITY = (0, exits.STOPPED, exits.PEER, exits.DIVERGED, exits.USER_ERROR)
LAST_WORDS_S = 2.0  # after a process died, seconds in which the others may notice it themselves and log the reason
TAIL_LINES = 20
# Signals that the launcher passes on to every process. Ctrl-C (SIGINT) is passed on as SIGTERM.
FORWARDED = {
    signal.SIGINT: signal.SIGTERM,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
}


@dataclass
class Child:
    """One process of the run."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    copiers: list[threading.Thread] = field(default_factory=list)
    code: int | None = None  # its exit code, once it has ended
    was_ended: bool = False  # the launcher has sent SIGTERM to it, because another process died

    def has_ended(self) -> bool:
        """Return whether the process has ended. The processes that it started are killed then."""
        if self.code is None and (status := self.process.poll()) is not None:
            self._kill_group()
            self.code = exits.exit_code(status)
            for copier in self.copiers:
                copier.join(timeout=1)
        return self.code is not None

    def send(self, number: int) -> None:
        """Send a signal to the process; SIGKILL also goes to the processes that it started."""
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self.process.send_signal(number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self.process.pid, signal.SIGKILL)

    def copy_output(self) -> None:
        """Copy the output of the process to the terminal and the log, if it comes through pipes (rank 0)."""
        for source, terminal in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if source is not None:
                self.copiers.append(
                    threading.Thread(target=_copy, args=(source, terminal.buffer, self.log), daemon=True)
                )
                self.copiers[-1].start()


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


def run(node: Node, words: list[str], environment: Mapping[str, str], log_dir: Path | None, grace_s: float) -> int:
    """Run `words` once for each process of this node; return the worst of their exit codes."""
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="tunix-launch-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log_dir={log_dir} cannot be written ({error.strerror})") from None
    received: list[int] = []

    def note_signal(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note_signal) for number in FORWARDED}
    children: list[Child] = []
    try:
        for local_rank in range(node.num_processes):
            own_environment = {"PYTHONUNBUFFERED": "1", **environment, **node.environment(local_rank)}
            children.append(_start(words, own_environment, log_dir))
        for child in children:  # this starts threads, which must not exist when a process is forked
            child.copy_output()
        _say(f"{len(children)} of {node.world_size} processes; output of each in {log_dir}/train.RANK.log")
        return _watch(children, received, grace_s)
    finally:
        for child in children:
            if not child.has_ended():
                child.send(signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(words: list[str], environment: Mapping[str, str], log_dir: Path) -> Child:
    """Start one process. The output of rank 0 goes to the terminal and to its log, that of others to their logs."""
    rank = int(environment["RANK"])
    log = log_dir / f"train.{rank}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else file,
            stderr=subprocess.PIPE if rank == 0 else file,
            start_new_session=True,  # a Ctrl-C on the terminal goes to the launcher only, which passes it on
            preexec_fn=exits.end_with_parent(),
        )
    return Child(rank, process, log)


def _copy(source: BinaryIO, terminal: BinaryIO, log: Path) -> None:
    with log.open("ab", buffering=0) as file:
        while data := os.read(source.fileno(), 65536):
            file.write(data)
            try:
                terminal.write(data)
                terminal.flush()
            except OSError:  # the terminal is gone; go on with the log alone
                terminal = open(os.devnull, "wb")  # noqa: SIM115


def _watch(children: list[Child], received: list[int], grace_s: float) -> int:
    """Wait until all have ended and return the worst exit code. Pass signals on; when one dies, end the others.

    a process dies -- LAST_WORDS_S --> SIGTERM to the others -- grace_s --> SIGKILL
    """
    stops, died_at, ended_at = 0, None, None
    while running := [child for child in children if not child.has_ended()]:
        while received:
            number = FORWARDED[signal.Signals(received.pop(0))]
            stops += number == signal.SIGTERM
            if stops > 1:
                number = signal.SIGKILL
            elif stops:
                _say("stopping: every process may save and end; a second signal kills them")
            for child in running:
                child.send(number)
        now = time.monotonic()
        if died_at is None and any(child.code not in (None, 0, exits.STOPPED) for child in children):
            died_at = now
        if died_at and ended_at is None and now > died_at + LAST_WORDS_S:
            ended_at = now
            for child in running:
                child.was_ended = True
                child.send(signal.SIGTERM)
        if ended_at and now > ended_at + grace_s:
            for child in running:
                child.send(signal.SIGKILL)
        time.sleep(0.02)
    return _report(children)


def _report(children: list[Child]) -> int:
    """Return the worst exit code, and print the last lines of the process that it is from."""

    def severity(child: Child) -> int:
        return SEVERITY.index(child.code) if child.code in SEVERITY else len(SEVERITY)

    # A process that the launcher's signal has killed says nothing about why the run failed.
    own = [child for child in children if not (child.was_ended and (child.code or 0) > 128)]
    worst = max(own or children, key=lambda child: (severity(child), -child.rank))
    assert worst.code is not None
    if worst.code not in (0, exits.STOPPED):
        if worst.rank != 0:  # the output of rank 0 is on the terminal already
            print("\n".join(_read_tail(worst.log)), file=sys.stderr)
        _say(f"process {worst.rank} ended with exit code {worst.code}; its output is in {worst.log}")
    return worst.code


def _read_tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 100_000))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def _say(text: str) -> None:
    print(f"tunix.launch: {text}", file=sys.stderr, flush=True)
