"""One process of several runs in a child of its own, so that its end has a code of ours whatever ends it.

The runtime aborts a process that has lost the coordinator, and no Python runs after that. Knows no jax.
"""

import os
import signal
import subprocess
import sys

from tunix import exits
from tunix.cluster import Identity

CHILD = "TUNIX_SUPERVISED"


def is_child() -> bool:
    return CHILD in os.environ


def supervise(identity: Identity) -> int:
    """Run this command line again as a child; its exit code, or 76 where the runtime aborted it."""
    environment = {**os.environ, CHILD: "1", "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen([sys.executable, *sys.argv], env=environment, preexec_fn=exits.end_with_parent())
    for number in exits.STOP_SIGNALS:
        signal.signal(number, lambda number, _: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    status = child.wait()
    exits.ignore_stop_signals()
    who = f"process {identity.process_id} of {identity.num_processes}"
    if status == -signal.SIGABRT:
        print(f"error: {who} has lost the others: one of them died, hangs, or cannot be reached", file=sys.stderr)
    elif status < 0:
        print(f"error: {who} was ended by {signal.Signals(-status).name}", file=sys.stderr)
    return exits.exit_code(status)
