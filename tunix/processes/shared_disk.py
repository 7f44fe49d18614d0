"""Whether all processes see a folder."""

import time
from pathlib import Path

from tunix.base.errors import UserError
from tunix.processes import peers

PROBE_S = 5.0


def blind_to(folder: Path) -> list[int]:
    """Processes that do not see a file which process 0 makes in the folder; called by all.

    Raises:
        UserError: process 0 cannot write there.
    """
    probe = folder / peers.agree(f".probe-{time.time_ns()}", "name of the probe file")

    def put() -> None:
        try:
            if peers.is_main():
                probe.touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None

    peers.together(put, "the probe file is there")
    seen = peers.gather("seen" if _comes(probe, PROBE_S) else "", "the probe file")
    if peers.is_main():
        probe.unlink()
    return [rank for rank, said in enumerate(seen) if not said]


def _comes(path: Path, patience_s: float) -> bool:
    """Whether the file is seen soon; a network file system may take its time."""
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True
