"""Processes that run code of the user: started, asked, killed when they are late, and started again. Imports no jax.

    parent   ChildProcess("tunix.rl.scoring:serve", ...)   -- request -->   child   serve(descriptor, parent, ...)
                                                                <-- reply --

The processes are started here and not by `multiprocessing`: its processes import the main program again, and with it
jax, or run a user's script a second time. A child works in its main thread, so that the user's code may set alarms
(math-verify does). When the parent is gone, the socket ends and so does the child; a thread watches the parent while
the user's code runs.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

START_S = 120.0  # to import the user's code, and to call it for the first time: libraries are imported, files are read
PR_SET_PDEATHSIG = 1  # prctl(2): a signal for this process when its parent ends
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
        self.connection, child = Pipe()
        ends = str(child.fileno()), str(os.getpid())
        words = json.dumps(sys.path), self.function, *ends, json.dumps(self.arguments)
        # A session of its own: Ctrl-C does not reach it, and what the user's code has started is killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child.close()

    def wait_until_ready(self, start_s: float) -> None:
        """Wait until the process has imported the user's code.

        Raises:
            LostProcess: it ends, or takes longer than `start_s`.
        """
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

        timer = threading.Timer(timeout_s, end)
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
        """End the process, and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End the process for good."""
        self.closed = True
        self.kill()


# The child's side.


def connect(descriptor: int, parent: int) -> Connection:
    """Return the connection to the parent, with which this process ends."""
    # The parent decides when a child ends. A handler that does nothing is not passed on to what the user's code starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    if sys.platform == "linux":  # also ends code that lets no other thread run, like a regular expression
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def describe_error(error: BaseException, own_files: Collection[str]) -> str:
    """Return one line about an error: its type, its text, and where the user's code raised it.

    An error that tunix raises in `own_files`, like that of a missing column, has no place.
    """
    try:
        text = (str(error).splitlines() or [""])[0][:300]
    except Exception:  # the user's class of errors may fail here too
        text = ""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in {__file__, *own_files}]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: the kernel then gives it another parent."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
