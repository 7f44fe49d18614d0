"""Stopping early: signals and time limits, after the same step on every process.

A signal reaches processes at different moments, and perhaps only one of them. A process that stopped at once would
leave the others inside the next step. So a process only notes a signal. After each step all processes ask whether one
of them has noted one, and JAX's runtime gives all of them the same answer:

    process 0   step 7 | ask: no | step 8        | ask: no | step 9 | ask: yes -> save, stop
    process 1   step 7 | ask: no | step 8 SIGTERM| ask: no | step 9 | ask: yes -> save, stop
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import jax
from jax.experimental import multihost_utils

_stop_signals: list[str] = []
_agreed: list[str] = []  # why all processes stop, once they know that they do
_polls = count(1)


@contextmanager
def listening() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 ask the run to save and stop; after `joining.start`, which replaces the handlers."""
    _stop_signals.clear()
    _agreed.clear()
    # With several processes JAX's own handler of SIGTERM stays: it tells the other processes.
    numbers = [signal.SIGUSR1] if jax.process_count() > 1 else [signal.SIGUSR1, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # Python allows handlers of signals in the main thread alone
    before = {n: signal.signal(n, lambda n, _: request_stop(signal.Signals(n).name)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def request_stop(reason: str) -> None:
    """Ask all processes to save and stop; safe in a signal handler."""
    # JAX's own handler of SIGTERM starts the agreement with the other processes.
    if not _stop_signals and jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)
    _stop_signals.append(reason)


def stopped_by_signal() -> bool:
    """Return True if a signal has asked the run to stop, and not its own time limit alone."""
    return any(reason in signal.Signals.__members__ for reason in _stop_signals)


def stop_requested() -> str | None:
    """Return why to stop now, the same call on every process; None to go on.

    Every process calls it at the same places of the program: after each step, and while answers are drawn. Once there
    is a reason, each later call returns it too.
    """
    if jax.process_count() == 1:
        return _stop_signals[0] if _stop_signals else None
    # JAX answers yes for one number: the largest that any process has asked for when the signal comes, plus 1. So the
    # numbers count the calls, from 1. Numbers of steps would not do: in a run that is resumed at step 1000, a signal
    # before the first call would choose the number 1, which nobody asks for.
    if not _agreed and multihost_utils.reached_preemption_sync_point(next(_polls)):
        _agreed.append(_stop_signals[0] if _stop_signals else "SIGTERM")
    return _agreed[0] if _agreed else None
