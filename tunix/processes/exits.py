"""Exit codes, and how a process ends: with one of them, and not after its parent. Knows no jax."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from tunix.base.errors import Diverged, Ending, PeerLost, Stopped, UserError

# Schedulers act on these codes: start again after STOPPED and PEER, and not after the others. Any other is a bug.
USER_ERROR, STOPPED, PEER, DIVERGED = UserError.code, Stopped.code, PeerLost.code, Diverged.code
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # prctl(2)


def report_errors(work: Callable[[], int | None]) -> int:
    """Return the exit code of `work()`, 0 if it returns none; the message of an `Ending` goes to stderr."""
    try:
        return work() or 0
    except Ending as ending:
        print(f"error: {ending}", file=sys.stderr)
        return ending.code


def exit_code(status: int) -> int:
    """Return the exit code for the `Popen.returncode` of a child; JAX's runtime aborts one that has lost its peers."""
    if status == -signal.SIGABRT:
        return PEER
    return status if status >= 0 else 128 - status  # as a shell reports a signal: 137 for SIGKILL


def stop_before_it_began() -> None:
    """Let stop signals end this process with 75 until the run handles them itself: there is nothing to save yet."""

    def stop(number: int, _frame: object) -> None:
        print(f"{signal.Signals(number).name} before the run began: nothing to save", flush=True)
        os._exit(STOPPED)  # an exception would be lost where a library ignores those of its callbacks

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def end_on_stop_signals() -> None:
    """Give stop signals their default effect again: they end this process, with 143 or 138."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on: this process is ending, and one that comes now must not change its exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` for `Popen`: the child is killed when this process ends (Linux)."""
    parent = os.getpid()

    def ask_kernel() -> None:
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died in between
                os._exit(1)

    return ask_kernel
