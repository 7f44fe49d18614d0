"""Joining the other processes of a run."""

import os
from typing import Any

import jax

from tunix.base.errors import UserError
from tunix.config import Distributed
from tunix.processes.identity import find_identity, refuse_idle_gpus
from tunix.processes.peers import deadline
from tunix.processes.rollcall import roll_call


def start(cfg: Distributed, facts: dict[str, Any]) -> list[str]:
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
    refuse_idle_gpus(identity, cfg)
    # Our own roll call comes first: its messages name who is missing or different. The runtime would abort instead.
    remarks = roll_call(identity, facts, cfg.init_timeout_s)
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
        asked = os.environ.get("JAX_PLATFORMS")
        reason = str(error).splitlines()[0] if str(error) else "no such platform"
        message = f"JAX finds no device: {reason}"
        if asked:
            message = (
                f"JAX_PLATFORMS={asked}: JAX finds no device ({reason}); install jax[cuda13] or unset the variable"
            )
        raise UserError(message) from None
