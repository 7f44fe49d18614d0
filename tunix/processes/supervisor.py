"""One process of several runs in a child of its own, so that its end has a code of ours whatever ends it.

The runtime aborts a process that has lost the coordinator, and no Python runs after that. Knows no jax.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tunix.processes import exits
from tunix.processes.identity import Identity

CHILD = "TUNIX_SUPERVISED"


def is_child() -> bool:
    return CHILD in os.environ


def this_command() -> list[str]:
    """This program with its arguments, as a new process starts it: a script, or a module as in `python -m NAME`."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return [sys.executable, *sys.argv]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


def supervise(identity: Identity, patience_s: float) -> int:
    """Run this command line again as a child; its exit code, or 76 where the runtime aborted it.

    A child that somebody has stopped (SIGSTOP) for `patience_s` is ended: the others have given it up.
    """
    environment = {**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(this_command(), env=environment, preexec_fn=exits.end_with_parent())
    asked: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        asked.append(number)
        child.send_signal(number)

    for number in exits.STOP_SIGNALS:
        signal.signal(number, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    status = _wait(child, patience_s)
    exits.ignore_stop_signals()
    who = f"process {identity.process_id} of {identity.num_processes}"
    if status is None:
        print(f"error: {who} was stopped for distributed.heartbeat_timeout_s={patience_s:g}", file=sys.stderr)
        return exits.PEER
    if -status in asked:  # it came before the child could answer: there was nothing to save
        return exits.STOPPED
    if status == -signal.SIGABRT:
        print(f"error: {who} has lost the others: one of them died, hangs, or cannot be reached", file=sys.stderr)
    elif status < 0:
        print(f"error: {who} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return exits.exit_code(status)


def _wait(child: subprocess.Popen, patience_s: float) -> int | None:
    """Status of the child at its end; None if it had to be ended."""
    moved = time.monotonic()
    while time.monotonic() < moved + patience_s:
        try:
            return child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if not _is_stopped(child.pid):
                moved = time.monotonic()
    child.kill()
    child.wait()
    return None


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; only Linux tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
