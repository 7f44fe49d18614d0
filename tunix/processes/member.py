"""A process of a run is two processes: a parent that watches over its child, and the child, which trains.

    launcher ── parent (`supervise`: waits, passes signals on) ── child (`run_member`: jax, training)

The child may be aborted or killed at any moment; the parent then still reports the end with an exit code of ours.

Imports jax only where the work begins.
"""

import sys
from collections.abc import Callable

from tunix.base.errors import Ending
from tunix.config import Distributed
from tunix.processes import exits, supervisor
from tunix.processes.identity import find_identity


def supervise(distributed: Distributed) -> int | None:
    """Run this command line in a child and return its exit code; None in the child, and for a run of one process."""
    identity = find_identity(distributed)
    if identity is None or supervisor.is_child():
        return None
    return supervisor.supervise(identity, distributed.heartbeat_timeout_s)


def run_member(distributed: Distributed, work: Callable[[], int | None]) -> int:
    """Return the exit code that `work()` returns, 0 for None; where it fails, tell the other processes why."""
    from tunix.processes import peers  # jax starts here, after the config has passed

    try:
        return work() or 0
    except Ending as ending:
        code, why = ending.code, str(ending)
        if not ending.is_failure:
            exits.ignore_stop_signals()
            print(why, flush=True)
            return code
    except Exception as error:
        if not find_identity(distributed):
            raise  # a bug in a run of one process: Python prints its traceback
        code, why = peers.blame(error)
    print(f"error: {why}", file=sys.stderr)
    peers.leave(code, why)
    return code
