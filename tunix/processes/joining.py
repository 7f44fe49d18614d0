"""Joining the other processes of a run, and checking that all see one folder."""

import os
import time
from pathlib import Path
from typing import Any

import jax

from tunix.base.errors import UserError
from tunix.config import Distributed
from tunix.processes import peers
from tunix.processes.identity import find_identity, reject_idle_gpus
from tunix.processes.peers import deadline
from tunix.processes.rollcall import roll_call

# Joining the other processes of a run.


def start(cfg: Distributed, info: dict[str, Any]) -> list[str]:
    """Join the other processes, if there are any; return remarks for the log.

    Args:
        facts: values that must be the same on all of them.

    Raises:
        UserError, PeerLost: as `roll_call` raises them.
    """
    identity = find_identity(cfg)
    if identity is None:
        _check_devices()
    if identity is None or jax.distributed.is_initialized():
        return []
    reject_idle_gpus(identity, cfg)
    # Our own roll call comes first: its messages name who is missing or different. The runtime would abort instead.
    remarks = roll_call(identity, info, cfg.init_timeout_s)
    try:
        with deadline(cfg.init_timeout_s, f"the {identity.num_processes} processes could not join"):
            jax.distributed.initialize(
                identity.coordinator_address,
                identity.num_processes,
                identity.process_id,
                identity.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=cfg.init_timeout_s + 30,  # the runtime aborts; our deadline comes first
                heartbeat_timeout_seconds=cfg.heartbeat_timeout_s,
                shutdown_timeout_seconds=cfg.shutdown_timeout_s,
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{identity.source}: cannot join the run: {str(error).splitlines()[0]}") from None
    _check_devices()
    return remarks


def _check_devices() -> None:
    """Raise `UserError` where JAX finds no device, or none of the platform that JAX_PLATFORMS names."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        reason = str(error).splitlines()[0] if str(error) else "no such platform"
        message = f"JAX finds no device: {reason}"
        if platforms:
            message = (
                f"JAX_PLATFORMS={platforms}: JAX finds no device ({reason}); install jax[cuda13] or unset the variable"
            )
        raise UserError(message) from None


# Check that all processes see a folder: process 0 makes a file, and the others look for it.

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
