"""A process that computes rewards: started, asked, killed when it is late, and started again."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe

from tunix.base.errors import UserError

log = logging.getLogger(__name__)

START_S = 120.0  # to import a reward, and to score one row for the first time: libraries are imported, files are read
PROGRAM = (  # of a worker: it finds the modules that this process finds
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tunix.rewards.worker import serve;"
    " serve(int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))"
)


class LostProcess(Exception):
    """A process that is gone or was killed before it answered; the text says why, and begins with a verb."""


class LateProcess(LostProcess):
    """A process that was killed because it took too long."""


class ScoringProcess:
    """A process of `tunix.rewards.worker`, which is started again after it was killed or has died."""

    def __init__(self, functions: list[str], start_s: float):
        self.functions, self.start_s = functions, start_s
        self.sample: tuple | None = None  # prompts, completions and columns that a new process scores before others
        self.closed = False
        self._start()

    def wait_until_ready(self) -> None:
        """Wait until the process has imported the rewards.

        Raises:
            UserError: it ends, or takes too long.
        """
        try:
            if self.connection.poll(self.start_s):
                self.connection.recv()
                return
            what = f"has not imported them after {self.start_s:g} s"
        except (EOFError, OSError):
            what = f"{self._describe_end()} while it imported them; its error is on stderr"
        raise UserError(f"rewards: the process that scores with {', '.join(self.functions)} {what}")

    def ask(self, request: tuple, timeout_s: float) -> list[float | str]:
        """Return for each answer of the request its score, or why it has none. The process is replaced if it is lost.

        `request` is what `tunix.rewards.worker.serve` reads.
        """
        try:
            return self._exchange(request, timeout_s)
        except LateProcess as late:
            self._replace()
            return [str(late)] * len(request[2])
        except LostProcess as lost:
            if self.closed:  # by another thread, because another process found that a reward fails
                return [str(lost)] * len(request[2])
            log.warning("a process that scores answers %s; it is started again, and asked once more", lost)
            self._replace()
        # Once more, because the kernel (out of memory) or an operator may have killed the process. A reward that ends
        # its process does so again, and then its answers have no score.
        try:
            return self._exchange(request, timeout_s)
        except LostProcess as lost:
            self._replace()
            return [str(lost)] * len(request[2])

    def close(self) -> None:
        """End the process for good, and what it has started."""
        self.closed = True
        self._kill()

    def _start(self) -> None:
        self.connection, child = Pipe()
        words = json.dumps(sys.path), str(child.fileno()), str(os.getpid()), json.dumps(self.functions)
        # A session of its own: Ctrl-C does not reach it, and what a reward has started is killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child.close()

    def _replace(self) -> None:
        self._kill()
        if self.closed:
            return
        self.connection.close()
        self._start()
        self.wait_until_ready()
        if self.sample is not None:
            try:
                for function in self.functions:
                    self._exchange((function, *self.sample, 1), self.start_s)
            except LostProcess as lost:  # a reward that fails here fails for the next batch too, which counts it
                log.warning("a process that scores answers %s at its start", lost)

    def _exchange(self, request: tuple, timeout_s: float) -> list[float | str]:
        """Send a request and return the answer to it; after `timeout_s` the process is killed."""
        # A reward that hangs cannot be interrupted from within: a timer kills its process, and the read below ends. A
        # timeout of `poll` would not do: `send` waits too, when the process does not read and the pipe is full.
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            self.connection.send(request)
            return self.connection.recv()
        except (EOFError, OSError):
            if late.is_set():
                raise LateProcess(f"takes longer than {timeout_s:g} s") from None
            raise LostProcess(self._describe_end()) from None
        finally:
            timer.cancel()
            timer.join()

    def _describe_end(self) -> str:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
