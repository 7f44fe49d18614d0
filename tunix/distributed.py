"""Processes of one run: who am I, and agreement between them."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tunix.config import Distributed, UserError

T = TypeVar("T")


def start(cfg: Distributed) -> None:
    """Join the other processes, where the config names them; one process needs nothing."""
    if cfg.num_processes is None or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            cfg.coordinator_address,
            cfg.num_processes,
            cfg.process_id,
            local_device_ids=cfg.local_device_ids,
            initialization_timeout=cfg.init_timeout_s,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"distributed.coordinator_address={cfg.coordinator_address}: {str(error).splitlines()[0]}"
        ) from None


def is_main() -> bool:
    """Whether this process writes what is written once: logs, metrics, the run's folder."""
    return jax.process_index() == 0


def agree(text: str) -> str:
    """What process 0 says, on every process."""
    if jax.process_count() == 1:
        return text
    data = np.frombuffer(text.encode().ljust(4096, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes()).rstrip(b"\0").decode()


def main_first(work: Callable[[], T]) -> T:
    """`work()` on process 0, then on the others, who find what it left on a shared disk; its mistakes are everyone's."""
    if jax.process_count() == 1:
        return work()
    result, mistake = None, ""
    if is_main():
        try:
            result = work()
        except UserError as error:
            mistake = str(error) or "failed"
    mistake = agree(mistake)
    if mistake:
        raise UserError(mistake)
    return result if result is not None else work()


def barrier(name: str) -> None:
    """Wait for every process to come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
