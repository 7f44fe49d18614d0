"""Check that all processes see a folder: process 0 makes a file, and the others look for it."""

import time
from pathlib import Path

from tunix.base.errors import UserError
from tunix.processes import peers

PROBE_S = 5.0  # seconds that a network file system may take to show a new file


def find_blind(folder: Path) -> list[int]:
    """Return the ranks of the processes that do not see a file which process 0 makes in the folder.

    Every process must call this.

    Raises:
        UserError: process 0 cannot write there.
    """
    # A name that no earlier run has used: a file that is left over would be seen on another disk too.
    probe = folder / peers.agree(f".probe-{time.time_ns()}", "name of the probe file")

    def make_probe() -> None:
        try:
            if peers.is_main():
                probe.touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None

    peers.together(make_probe, "the probe file is there")
    answers = peers.gather("seen" if _appears(probe, PROBE_S) else "", "the probe file")
    if peers.is_main():
        probe.unlink()
    return [rank for rank, answer in enumerate(answers) if not answer]


def _appears(path: Path, patience_s: float) -> bool:
    """Wait up to `patience_s` for the file; return whether it is there."""
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
