"""Lock of a run's folder: one run at a time writes into it.

The lock is one of the operating system (`flock`) on the file FOLDER/.running. The kernel gives it back when the process
ends, also by kill -9, so no lock outlives its run; a file whose existence is the lock would have to be removed by hand.
The file's text says who has the lock, for the message to the other.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tunix.base.errors import UserError
from tunix.processes import peers

log = logging.getLogger(__name__)
LOCK = ".running"
# Seconds to wait for a run of this host that has the lock, and of another host. A run that was killed a moment ago may
# still be ending. A file server gives the lock of a host that died to others only when that host's lease has run out.
HOLDER_S, LEASE_S = 5.0, 300.0


@contextmanager
def hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder: process 0 locks a file in it until the block or the process ends.

    Raises:
        UserError: another run still holds the lock after a while, and is named; or the disk is full.
    """
    with ExitStack() as stack:
        try:
            peers.together(lambda: _lock(folder / LOCK, stack) if peers.is_main() else None, "the run's lock")
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise UserError(
                f"the run's folder {folder} cannot be written ({error.strerror}); make room and go on with "
                f"resume={folder}"
            ) from None


def _lock(path: Path, stack: ExitStack) -> None:
    """Lock the file until the stack closes. Where the file system has no locks, log a warning and go on."""
    try:
        # "a+" and not "w": as long as another run has the lock, the file has that run's text.
        file = stack.enter_context(path.open("a+"))
    except OSError as error:
        raise UserError(f"the run's folder {path.parent} cannot be written ({error.strerror})") from None
    here, begun = socket.gethostname(), None
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = path.read_text().strip()
            patience = HOLDER_S if holder.endswith(f" on {here}") else LEASE_S
            if begun is None:
                begun = time.monotonic()
                log.warning("%s is being written by %s; waiting %.0f s for its end", path.parent, holder, patience)
            if time.monotonic() - begun > patience:
                raise UserError(
                    f"{path.parent} is being written by {holder}; wait for its end, or start a run of its own"
                ) from None
            time.sleep(0.5)
        except OSError as error:
            log.warning("%s cannot be locked (%s): nothing keeps a second run out", path, error.strerror)
            return
    # Written past Python's buffer, so that a full disk is an error here, and not when the file is closed.
    os.truncate(file.fileno(), 0)
    os.write(file.fileno(), f"process {os.getpid()} on {here}".encode())
