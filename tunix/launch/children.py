"""The processes of one node: started together, logged each in its own file, ended together."""

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

# Exit codes from the best to the worst; all others are worse.
SEVERITY = (0, exits.STOPPED, exits.PEER, exits.NOT_FINITE, exits.USER_ERROR)
LAST_WORDS_S = 2.0  # in which the others may find out by themselves that one died, and say so
TAIL_LINES = 20
FORWARDED = {  # a signal to the launcher is for all; Ctrl-C means what SIGTERM means
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
    code: int | None = None  # once it ended
    was_told: bool = False  # that the run is over, because another one died

    def has_ended(self) -> bool:
        """Whether it ended; its own children end with it."""
        if self.code is None and (status := self.process.poll()) is not None:
            self._kill_group()
            self.code = exits.exit_code(status)
            for copier in self.copiers:
                copier.join(timeout=1)
        return self.code is not None

    def send(self, number: int) -> None:
        """A signal to the process; its own children hear of it from there, but SIGKILL is for them too."""
        if number == signal.SIGKILL:
            self._kill_group()
        else:
            self.process.send_signal(number)

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
            os.killpg(self.process.pid, signal.SIGKILL)

    def show(self) -> None:
        """Copy what it writes to the terminal, if its output comes through pipes."""
        for source, terminal in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            if source is not None:
                self.copiers.append(
                    threading.Thread(target=_copy, args=(source, terminal.buffer, self.log), daemon=True)
                )
                self.copiers[-1].start()


def command(script: str, arguments: list[str], module: bool, no_python: bool) -> list[str]:
    """What each process runs.

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
    """Run `words` once for each process of this node; returns the worst of their exit codes."""
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="tunix-launch-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log_dir={log_dir} cannot be written ({error.strerror})") from None
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in FORWARDED}
    children: list[Child] = []
    try:
        for local_rank in range(node.num_processes):
            of_rank = {"PYTHONUNBUFFERED": "1", **environment, **node.environment(local_rank)}
            children.append(_start(words, of_rank, log_dir))
        for child in children:  # threads only after the last fork
            child.show()
        _say(f"{len(children)} of {node.world_size} processes; output of each in {log_dir}/train.RANK.log")
        return _watch(children, received, grace_s)
    finally:
        for child in children:
            if not child.has_ended():
                child.send(signal.SIGKILL)
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(words: list[str], environment: Mapping[str, str], log_dir: Path) -> Child:
    """Rank 0 is shown on the terminal too."""
    rank = int(environment["RANK"])
    log = log_dir / f"train.{rank}.log"
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else file,
            stderr=subprocess.PIPE if rank == 0 else file,
            start_new_session=True,  # a Ctrl-C on the terminal reaches it through the launcher alone
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
            except OSError:  # the terminal is gone; the file goes on
                terminal = open(os.devnull, "wb")  # noqa: SIM115


def _watch(children: list[Child], received: list[int], grace_s: float) -> int:
    """Wait until all have ended; pass signals on; when one dies, end the others."""
    stops, died_at, told_at = 0, None, None
    while running := [child for child in children if not child.has_ended()]:
        while received:
            number = FORWARDED[signal.Signals(received.pop(0))]
            stops += number == signal.SIGTERM
            if stops > 1:
                number = signal.SIGKILL
            elif stops:
                _say("stopping: every process may save and end; once more kills them")
            for child in running:
                child.send(number)
        now = time.monotonic()
        if died_at is None and any(child.code not in (None, 0, exits.STOPPED) for child in children):
            died_at = now
        if died_at and told_at is None and now > died_at + LAST_WORDS_S:
            told_at = now
            for child in running:
                child.was_told = True
                child.send(signal.SIGTERM)
        if told_at and now > told_at + grace_s:
            for child in running:
                child.send(signal.SIGKILL)
        time.sleep(0.02)
    return _report(children)


def _report(children: list[Child]) -> int:
    """The worst exit code, after the end of the output of the process that it is from."""

    def severity(child: Child) -> int:
        return SEVERITY.index(child.code) if child.code in SEVERITY else len(SEVERITY)

    own = [child for child in children if not (child.was_told and (child.code or 0) > 128)]  # the rest we killed
    worst = max(own or children, key=lambda child: (severity(child), -child.rank))
    assert worst.code is not None
    if worst.code not in (0, exits.STOPPED):
        if worst.rank != 0:  # whose output is on the terminal
            print("\n".join(_tail(worst.log)), file=sys.stderr)
        _say(f"process {worst.rank} ended with exit code {worst.code}; its output is in {worst.log}")
    return worst.code


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 100_000))
        return file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]


def _say(text: str) -> None:
    print(f"tunix.launch: {text}", file=sys.stderr, flush=True)
