"""A process of a run is two processes: a parent that watches over its child, and the child, which trains.

    launcher ── parent (`supervise`: waits, passes signals on) ── child (`run_member`: jax, training)

The JAX runtime aborts a process that has lost the coordinator, and no Python code runs after that in the process
itself. The parent then still reports the end with an exit code of ours. Imports jax only where the work begins.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunix.base.errors import Ending, UserError
from tunix.base.files import STOP_SIGNALS, is_whole_number
from tunix.base.progress import announcing
from tunix.config import Distributed
from tunix.processes import exits, rollcall
from tunix.processes.identity import find_identity

CHILD = "TUNIX_SUPERVISED"


def is_child() -> bool:
    return CHILD in os.environ


def supervise(distributed: Distributed, stop_code: int | None = exits.STOPPED) -> int | None:
    """Run this command line in a child and return its exit code; None in the child, and for a run of one process.

    The command line is `sys.argv`: a sweep sets it to that of each point.

    The code is 76 where the runtime aborted the child. It is `stop_code` where a stop signal ended it: at its start a
    run does not handle them yet, and has nothing to save. None stands for the code of the signal, 143 for SIGTERM. If
    somebody stops the child (SIGSTOP) for longer than distributed.heartbeat_timeout_s, it is killed: the other
    processes no longer wait for it.
    """
    identity, patience_s = find_identity(distributed), distributed.heartbeat_timeout_s
    if identity is None or is_child():
        return None
    spec = sys.modules["__main__"].__spec__  # of `python -m NAME`; None for a script
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    environment = {**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *program, *sys.argv[1:]]
    child = subprocess.Popen(command, env=environment, preexec_fn=exits.end_with_parent())
    signals_sent: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        signals_sent.append(number)
        child.send_signal(number)

    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    # A terminal sends Ctrl-C to the child too. The parent must live on: its death would kill the child at once.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _wait(child, patience_s)
    exits.ignore_stop_signals()
    signal.signal(signal.SIGINT, interrupt)  # a child of the next point of a sweep would else ignore it too
    who = f"process {identity.process_id} of {identity.num_processes}"
    if status is None:
        print(f"error: {who} was stopped for distributed.heartbeat_timeout_s={patience_s:g}", file=sys.stderr)
        return exits.PEER
    if -status in signals_sent:
        return exits.find_exit_code(status) if stop_code is None else stop_code
    if status == -signal.SIGABRT:
        print(f"error: {who} has lost the others: one of them died, hangs, or cannot be reached", file=sys.stderr)
    elif status < 0:
        print(f"error: {who} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return exits.find_exit_code(status)


def _wait(child: subprocess.Popen, patience_s: float) -> int | None:
    """Wait for the end of the child and return its status; None if it was stopped for too long and had to be killed."""
    # A process that is stopped (SIGSTOP, a debugger) sends no heartbeat, so the others end without it. If it went on
    # hours later, it would write into a run that somebody has resumed since.
    last_running = time.monotonic()
    while time.monotonic() < last_running + patience_s:
        try:
            return child.wait(timeout=1)
        except subprocess.TimeoutExpired:
            if not _is_stopped(child.pid):
                last_running = time.monotonic()
    child.kill()
    child.wait()
    return None


def _is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process. Only Linux shows it; elsewhere this is False."""
    try:
        # "4711 (name) T ...": the state stands behind the name, and the name may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def tell_refusal(mistake: str) -> None:
    """Tell the other processes of this run why this one is refused before all join; they would wait for it in vain.

    The config may be what is wrong. So the launcher, or the words of the command line, say which process this is.
    """
    words = [word.partition("=") for word in sys.argv[1:]]
    typed = {key: int(value) if is_whole_number(value) else value for key, _, value in words}
    values: dict[str, Any] = {key: typed.get(f"distributed.{key}") for key in Distributed.model_fields}
    with suppress(UserError):
        if identity := find_identity(Distributed.model_construct(**values)):
            for number in STOP_SIGNALS:  # of a launcher that stops the processes because another one has ended
                signal.signal(number, lambda *_: os._exit(exits.USER_ERROR))
            rollcall.tell_refusal(identity, mistake)


def run_member(distributed: Distributed, work: Callable[[], int | None]) -> int:
    """Return the exit code that `work()` returns, 0 for None; where it fails, tell the other processes why."""
    with announcing("importing JAX"):
        from tunix.processes import peers  # after the config has passed

    try:
        return work() or 0
    except Ending as ending:
        code, reason = ending.code, str(ending)
        if not ending.is_failure:
            exits.ignore_stop_signals()
            print(reason, flush=True)
            return code
    except KeyboardInterrupt:
        if not peers.is_joined():
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the others hear of it first
        code, reason = 128 + signal.SIGINT, "interrupted"
    except Exception as error:
        if not find_identity(distributed):
            raise  # a bug in a run of one process: Python prints its traceback
        code, reason = peers.blame(error)
    print(f"error: {reason}", file=sys.stderr)
    peers.leave(code, reason)
    return code
