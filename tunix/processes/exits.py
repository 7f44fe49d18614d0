"""Exit codes, and how a process ends: with one of them, and not after its parent.

Imports little, and no jax: the command sets its handlers of signals by this file before it imports the rest.
"""

import atexit
import codecs
import ctypes
import errno
import gc
import io
import locale
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

from tunix.base.errors import Diverged, Ending, PeerLost, Stopped, UserError
from tunix.base.files import STOP_SIGNALS, end_by_signal, is_whole_number, remove_unfinished
from tunix.base.progress import announcing

# Schedulers act on these codes: start again after STOPPED and PEER, and not after the others. Any other is a bug.
USER_ERROR, STOPPED, PEER, DIVERGED = UserError.code, Stopped.code, PeerLost.code, Diverged.code
# Loaded here and not in the child: between fork and exec a child must not wait for locks of its parent's threads.
LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1  # prctl(2)

# Some threads cannot be interrupted: that of the compiler may need minutes, and those of a sink's library may wait for
# ever for a server that hangs. A command that ends does not wait: `ends_with_leave` is set while a command runs whose
# last act is `leave`, `still_works` where such a thread may work on.
ends_with_leave, still_works = threading.Event(), threading.Event()


def leave(code: int) -> NoReturn:
    """End the process with this code: as Python ends, or at once where a thread still works for nobody."""
    ignore_stop_signals()
    if still_works.is_set():
        if peers := sys.modules.get("tunix.processes.peers"):  # the other processes wait for this one there
            peers.disconnect()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def report_interrupts() -> None:
    """Let Ctrl-C be one line, after which Python ends by the signal (130); everything else keeps its traceback."""

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("; ".join(["interrupted", *getattr(error, "__notes__", [])]), file=sys.stderr, flush=True)
            # What Python does at its end, up to taking itself apart, which crashes beside a compilation. Where a
            # thread works on, Python would wait for it.
            if not still_works.is_set():
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
            sys.stdout.flush()
            end_by_signal(signal.SIGINT, None)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report


@contextmanager
def ending_at_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process in this block, which imports: extensions make another error of Python's exception."""

    def end(number: int, frame: object) -> None:
        print("interrupted", file=sys.stderr, flush=True)  # the signal ends the process without that
        end_by_signal(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def reads_utf8() -> bool:
    """Return whether Python takes the bytes of texts for UTF-8, which all files of models and of runs are.

    With LANG=en_US it takes them for Latin-1: chat templates have other tokens then, and some answers no bytes.
    """
    return bool(sys.flags.utf8_mode) or codecs.lookup(locale.getencoding()).name == "utf-8"


_imports = ExitStack()
# For a program that ends before `report_errors`, as after --steps=many, or never calls it. At Python's own end it would
# wait for the thread when no thread runs any more: Python 3.13 waits forever.
atexit.register(_imports.close)


def announce_imports() -> None:
    """Begin the imports of a command: say where they take long, until `report_errors` begins its work.

    Where Python would not take texts for UTF-8, the command begins anew, as the same process, so that it does.
    """
    if not reads_utf8() and os.environ.get("PYTHONUTF8") != "1":  # it is: python -E does not look at it
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # Imports and tracing make millions of objects that live on. At Python's own thresholds the garbage collector looks
    # at them again and again, a tenth of the time until the first step.
    gc.set_threshold(50_000, 50, 50)
    _imports.close()  # of `python -m tunix`, which says so twice
    _imports.enter_context(ending_at_interrupts())
    _imports.enter_context(announcing("importing tunix"))


def report_errors(work: Callable[[], int | None], tell: Callable[[str], object] = lambda mistake: None) -> int:
    """Return the exit code of `work()`, 0 if it returns none; the message of an `Ending` goes to stderr.

    `tell` is called with that of a `UserError`, behind it.

    The work goes on, and keeps its exit code, when the reader of a pipe leaves early, as `head` does, when the output
    cannot be written, and when stdout or stderr is closed from the start.
    """
    _imports.close()
    drop_unread_output()
    for name in ("COLUMNS", "LINES"):  # libraries take any text of digits for a number
        if not is_whole_number(os.environ.get(name, "0")):
            del os.environ[name]
    report_interrupts()
    sys.unraisablehook = _send_again
    try:
        try:
            os.getcwd()
        except FileNotFoundError:
            raise UserError("the current folder was deleted; change to one that exists (cd)") from None
        return work() or 0
    except Ending as ending:
        print(f"error: {ending}", file=sys.stderr)
        if isinstance(ending, UserError):
            tell(str(ending))
        return ending.code
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        name = str(error.filename or "a file")
        print(f"error: {name[:200]}{'...' * (len(name) > 200)}: {error.strerror}", file=sys.stderr)
        return UserError.code


def _send_again(unraisable: Any) -> None:
    """Send Ctrl-C once more where it came inside a callback of a library, in which Python drops exceptions."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        # Not here, where it is dropped as well: when this function has ended.
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


class _Output(io.FileIO):
    """A file that takes every byte, also a pipe whose reader has left, a closed terminal, a file on a full disk."""

    def write(self, data: Any, /) -> int:
        try:
            # None: it is full and does not block, as a terminal that ssh has changed. Python would give up.
            while (size := super().write(data)) is None:
                select.select((), (self,), ())
            return size
        except OSError:
            return len(data)


def drop_unread_output() -> None:
    """Let stdout and stderr take every byte, also where nobody reads them any more, or they are closed (`>&-`)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # the next file that is opened would get this number, and the output of libraries
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    for name in ("stdout", "stderr"):
        out = getattr(sys, f"__{name}__")
        if out is None or getattr(sys, name) is not out:
            continue
        file = io.BufferedWriter(_Output(out.fileno(), "w", closefd=False))
        # Python -u (PYTHONUNBUFFERED) writes through to a file without a buffer, and this one has one.
        at_once = out.line_buffering or out.write_through
        setattr(sys, name, io.TextIOWrapper(file, out.encoding, out.errors, line_buffering=at_once))


def find_exit_code(status: int) -> int:
    """Return the exit code for the `Popen.returncode` of a child: a negative number is the signal that ended it."""
    if status == -signal.SIGABRT:  # JAX's runtime aborts a process that has lost its peers
        return PEER
    return status if status >= 0 else 128 - status  # as a shell reports a signal: 137 for SIGKILL


def exit_on_stop_signals() -> None:
    """Make stop signals end this process with exit code 75, until the run handles them: nothing is there to save."""

    def stop(number: int, _frame: object) -> None:
        print(f"{signal.Signals(number).name} before the run began: nothing to save", flush=True)
        remove_unfinished()
        # No exception (`sys.exit`): the signal may come inside a callback of a library, where exceptions are ignored.
        os._exit(STOPPED)

    for number in STOP_SIGNALS:
        signal.signal(number, stop)


def restore_stop_signals() -> None:
    """Give stop signals their default effect again: they end this process, with 143 (SIGTERM) or 138 (SIGUSR1), say."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """Ignore stop signals: this process is ending, and a signal that comes now must not change its exit code."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` for `Popen`: the child is killed when this process ends, by kill -9 too (Linux).

    More exactly, when the thread ends that starts the child. So a thread that calls `Popen` must outlive the child.
    """
    return partial(end_with, os.getpid())


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends (Linux); at once, if it has ended already."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # A parent that died before the kernel was asked sends no signal any more. Its child has another parent now.
        if os.getppid() != parent:
            os._exit(1)
