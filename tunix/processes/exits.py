"""Exit codes, and how processes end: with one of them, and no later than their parent. Knows no jax."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from tunix.base.errors import UserError

USER_ERROR, STOPPED, PEER, NOT_FINITE = 2, 75, 76, 77  # anything else but 0 is a bug
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # prctl(2)


def reported(work: Callable[[], int | None]) -> int:
    """Exit code of `work()`, 0 if it gives none; a mistake of the user's is told in a line on stderr."""
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


def exit_code(status: int) -> int:
    """What `Popen.returncode` of a child means; the JAX runtime aborts a process that has lost its peers."""
    if status == -signal.SIGABRT:
        return PEER
    return status if status >= 0 else 128 - status


def stop_before_it_began() -> None:
    """Until the run listens for stop signals itself, they end this process: there is nothing to save yet."""

    def stop(number: int, _frame: object) -> None:
        print(f"{signal.Signals(number).name} before the run began: nothing to save", flush=True)
        os._exit(STOPPED)  # an exception would be lost where a library ignores those of its callbacks

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def ignore_stop_signals() -> None:
    """This process is ending: one that comes now must not change its exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> Callable[[], None]:
    """A `preexec_fn` with which a child is killed when this process is (Linux): nobody is left behind."""
    parent = os.getpid()

    def ask() -> None:
        if sys.platform == "linux":
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

    return ask
