"""run_training.py, but something happens to one process: FAULT="RANK WHAT PLACE STEP".

WHAT is `exception`, `hang`, or the name of a signal; PLACE `start`, or `step`, `save`, `evaluation` with the number of
the step. The moment is left in the file `happened`, in seconds since the epoch.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from run_training import main
from tunix.processes import supervisor

ASKS = ("SIGTERM", "SIGUSR1")  # as a launcher sends them: to the process that it has started


def happen(what: str) -> None:
    Path("happened").write_text(str(time.time()))
    if what == "exception":
        raise RuntimeError("the disk caught fire")
    if what == "hang":
        time.sleep(10_000)
    os.kill(os.getppid() if what in ASKS else os.getpid(), getattr(signal, what))


def prepare(rank: int, what: str, place: str, number: int) -> None:
    """Let it happen at its place in `tunix.train`."""
    import jax

    from tunix import trainer

    def hurt(step: int) -> None:
        if jax.process_index() == rank and step == number:
            happen(what)

    assemble, next_batch, evaluate, save = (
        trainer.assemble,
        trainer.next_batch,
        trainer.evaluate,
        trainer.Checkpoints.save,
    )
    read = iter(range(number + 1))  # the first batch is read before the first step

    def faulty_assemble(*args):
        hurt(0)
        return assemble(*args)

    def faulty_next_batch(*args):
        hurt(next(read, -1))
        return next_batch(*args)

    def faulty_evaluate(held_out, state, step, metrics):
        hurt(step)
        return evaluate(held_out, state, step, metrics)

    def faulty_save(self, state, position, *args):
        save(self, state, position, *args)  # and now it is being written
        hurt(position.step)

    match place:
        case "start":
            trainer.assemble = faulty_assemble
        case "step":
            trainer.next_batch = faulty_next_batch
        case "save":
            trainer.Checkpoints.save = faulty_save
        case "evaluation":
            trainer.evaluate = faulty_evaluate


if __name__ == "__main__":
    if supervisor.is_child():
        rank, what, place, number = os.environ["FAULT"].split()
        prepare(int(rank), what, place, int(number))
    sys.exit(main())
