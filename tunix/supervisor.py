"""One process of several runs in a child of its own, so that its end has a code of ours whatever ends it.

The runtime aborts a process that has lost the coordinator, and no Python runs after that. Knows no jax.
"""

import ctypes
import os
import signal
import subprocess
import sys

from tunix.cluster import Identity

CHILD = "TUNIX_SUPERVISED"
EXIT_PEER = 76
PR_SET_PDEATHSIG = 1


def is_child() -> bool:
    return CHILD in os.environ


def supervise(identity: Identity) -> int:
    """Run this command line again as a child; its exit code, or 76 where the runtime aborted it."""
    environment = {**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen([sys.executable, *sys.argv], env=environment, preexec_fn=_die_with_parent)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    code = child.wait()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # one that comes now must not change the code
        signal.signal(number, signal.SIG_IGN)
    who = f"process {identity.process_id} of {identity.num_processes}"
    if code == -signal.SIGABRT:
        print(f"error: {who} has lost the others: one of them died, hangs, or cannot be reached", file=sys.stderr)
        return EXIT_PEER
    if code < 0:
        print(f"error: {who} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return 128 - code
    return code


def _die_with_parent() -> None:
    """Nobody is left behind, also when the parent is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
