"""run_training.py, but something happens to one process: FAULT="RANK WHAT PLACE STEP".

WHAT is `exception`, `hang`, `clock` (it jumps by an hour), or the name of a signal; PLACE is a key of PHASES, and STEP
the number of the step (0 at the start). The moment is left in the file `happened`, in seconds since the epoch.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from run_training import main
from tunix.processes import supervisor

PHASES = {  # the watchdog's name of what a process does there
    "start": "preparing the data",
    "compile": "compiling",
    "step": "reading a batch",
    "evaluation": "evaluation",
    "save": "saving",
}
STOP_REQUESTS = ("SIGTERM", "SIGUSR1")  # a launcher sends them to the process that it has started


def happen(label: str) -> None:
    Path("happened").write_text(str(time.time()))
    if label == "exception":
        raise RuntimeError("the disk caught fire")
    if label == "clock":
        real, jump = time.time, random.choice((-3600, 3600))
        time.time = lambda: real() + jump  # what Python sees of the clock
        return
    if label == "hang":
        time.sleep(10_000)
    os.kill(os.getppid() if label in STOP_REQUESTS else os.getpid(), getattr(signal, label))


def install(rank: int, label: str, index: str, step: int) -> None:
    """Let the fault happen inside a phase of the trainer: every phase passes through `Watchdog.phase`."""
    import jax

    from tunix.processes.watchdog import Watchdog

    phase = Watchdog.phase

    @contextmanager
    def faulty_phase(self: Watchdog, name: str, limit_s: float | None = None) -> Iterator[None]:
        with phase(self, name, limit_s):
            due = name == PHASES[index] and self.number == step and jax.process_index() == rank
            if due and index != "save":
                happen(label)
            yield
            if due and index == "save":  # now the checkpoint is being written in the background
                happen(label)

    Watchdog.phase = faulty_phase


if __name__ == "__main__":
    if supervisor.is_child():
        rank, label, index, step = os.environ["FAULT"].split()
        install(int(rank), label, index, int(step))
    sys.exit(main())
