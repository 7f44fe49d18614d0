"""Processes of one run: joining them, agreement between them, and leaving them so that none is left waiting."""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed as runtime  # its key-value store has no public name
from jax.experimental import multihost_utils

from tunix import exits
from tunix.cluster import who_am_i
from tunix.config import Distributed, UserError
from tunix.rollcall import Absent, roll_call

T = TypeVar("T")
log = logging.getLogger(__name__)
# Words in the runtime's errors that mean a lost peer.
LOST_PEER = ("Gloo", "NCCL", "Connection reset", "Connection closed", "heartbeat", "Barrier timed out")
NO_LIMIT_S = 7 * 24 * 3600.0  # preparing a large corpus takes hours; who dies meanwhile is noticed by other means
_stop_signals: list[str] = []
_polls = count(1)
_gathers = count()  # numbers them, alike on all processes, which call them in one order


class Stopped(Exception):
    """Asked to stop (SIGTERM, SIGUSR1, time limit), and everything is saved; exit code 75."""


def start(cfg: Distributed, facts: dict[str, Any]) -> list[str]:
    """Join the other processes, if there are any; remarks for the log.

    Args:
        facts: what must be the same on all of them.

    Raises:
        UserError, Absent: those of the roll call.
    """
    identity = who_am_i(cfg)
    if identity is None:
        _check_devices()
    if identity is None or jax.distributed.is_initialized():
        return []
    remarks = roll_call(identity, facts, cfg.init_timeout_s)
    try:
        with deadline(cfg.init_timeout_s, f"the {identity.num_processes} processes could not join"):
            jax.distributed.initialize(
                identity.coordinator_address,
                identity.num_processes,
                identity.process_id,
                identity.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=cfg.init_timeout_s + 30,  # the runtime aborts; ours ends first
                heartbeat_timeout_seconds=cfg.heartbeat_timeout_s,
                shutdown_timeout_seconds=cfg.shutdown_timeout_s,
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{identity.source}: cannot join the run: {str(error).splitlines()[0]}") from None
    _check_devices()
    return remarks


def _check_devices() -> None:
    """Raise `UserError` where JAX has none, or none of the platform that it was told to use."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        said = str(error).splitlines()[0] if str(error) else "no such platform"
        raise UserError(
            f"JAX_PLATFORMS={asked}: JAX finds no device ({said}); install jax[cuda13] or unset the variable"
            if asked
            else f"JAX finds no device: {said}"
        ) from None


@contextmanager
def listening() -> Iterator[None]:
    """SIGTERM and SIGUSR1 ask the run to save and stop. After `start`, which would replace the handlers."""
    _stop_signals.clear()
    # With several processes SIGTERM stays with JAX: it makes all of them stop after the same step.
    numbers = [signal.SIGUSR1] if jax.process_count() > 1 else [signal.SIGUSR1, signal.SIGTERM]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may
    before = {n: signal.signal(n, lambda n, _: request_stop(signal.Signals(n).name)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def request_stop(reason: str) -> None:
    """Ask all processes to save and stop; safe in a signal handler."""
    if not _stop_signals and jax.process_count() > 1:
        os.kill(os.getpid(), signal.SIGTERM)
    _stop_signals.append(reason)


def told_to_stop() -> bool:
    """Whether a signal has asked the run to stop, and not its own time limit alone."""
    return any(reason in signal.Signals.__members__ for reason in _stop_signals)


def stop_requested() -> str | None:
    """Why to stop after this step, the same step on every process; None to go on. Ask once a step."""
    if jax.process_count() == 1:
        return _stop_signals[0] if _stop_signals else None
    # JAX stops at a number that has not been asked for yet: a signal before the first step names 1, whatever the step.
    if multihost_utils.reached_preemption_sync_point(next(_polls)):
        return _stop_signals[0] if _stop_signals else "SIGTERM"
    return None


def is_main() -> bool:
    """Whether this process writes what is written once: logs, metrics, the run's folder."""
    return jax.process_index() == 0


def agree(text: str, name: str) -> str:
    """What process 0 says, on every process."""
    return gather(text if is_main() else "", name)[0]


def gather(text: str, name: str, timeout_s: float = 600) -> list[str]:
    """What each process says, in order of processes; `name` stands in the error of one that waits in vain."""
    if jax.process_count() == 1:
        return [text]
    key = f"tunix/gather/{next(_gathers)}"
    _store().key_value_set(f"{key}/{jax.process_index():06}", text)
    barrier(f"{name}, {key}", timeout_s)
    return [said for _, said in sorted(_store().key_value_dir_get(f"{key}/"))]


@cache
def hosts() -> list[str]:
    """The host of each process."""
    return gather(socket.gethostname(), "hosts")


def first_of_host() -> bool:
    """Whether this process writes what each host keeps for itself."""
    return hosts().index(socket.gethostname()) == jax.process_index()


def together(work: Callable[[], T], name: str, timeout_s: float = 600) -> T:
    """`work()` on every process at once; a `UserError` of one is raised on all."""
    result, mistake = None, ""
    try:
        result = work()
    except UserError as error:
        mistake = str(error) or "failed"
    mistakes = [said for said in gather(mistake, name, timeout_s) if said]
    if mistakes:
        raise UserError(mistakes[0])
    return cast(T, result)


def main_first(work: Callable[[], T], name: str) -> T:
    """`work()` on process 0, then on the first process of every other host, then on the rest: what it leaves on a disk
    is written by one of those who share that disk, and found by the others. A `UserError` of one is raised on all."""
    first = first_of_host()
    turn = 0 if is_main() else 1 if first else 2
    result: T | None = None
    for now in range(3 if jax.process_count() > 1 else 1):
        if now == turn:
            result = together(work, name, NO_LIMIT_S)
        else:
            together(lambda: None, name, NO_LIMIT_S)
    return cast(T, result)


def barrier(name: str, timeout_s: float = 600) -> None:
    """Wait for every process to come here; RuntimeError naming the barrier after `timeout_s`."""
    if jax.process_count() > 1:
        _store().wait_at_barrier(f"tunix: {name}", round(1000 * timeout_s))


def publish(key: str, value: str) -> None:
    """Tell the other processes; they read it with `published`. Nothing if the coordinator is gone."""
    if jax.process_count() > 1:
        try:
            _store().key_value_set(f"tunix/{key}", value, allow_overwrite=True)
        except RuntimeError:
            log.warning("the coordinator does not answer")


def published(folder: str) -> dict[str, str]:
    """What processes have published as FOLDER/..., by the rest of the key."""
    if jax.process_count() == 1:
        return {}
    try:
        found = _store().key_value_dir_get(f"tunix/{folder}/")
    except RuntimeError:
        return {}
    return {key.rsplit("/", 1)[1]: value for key, value in found}


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """End this process with exit code 76 if the block takes longer: `what` says what did not happen."""

    def end() -> None:
        print(f"error: {what} within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(exits.PEER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def blame(error: Exception) -> tuple[int, str]:
    """Exit code and reason of an error among several processes: a peer's, or this process's own with its traceback."""
    if isinstance(error, Absent):
        return exits.PEER, str(error)
    time.sleep(2)  # a peer that failed has said so by now
    for rank, text in published("failed").items():
        failure = json.loads(text)
        return exits.PEER, f"process {rank} ({failure['host']}) failed: {failure['why']}"
    line = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if any(word in str(error) for word in LOST_PEER):
        return exits.PEER, f"another process died or cannot be reached: {line}"
    traceback.print_exception(error)
    return 1, line


def leave(code: int, why: str) -> None:
    """End this process with `code` without waiting for the others, after telling them why. Returns if it is alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    if jax.distributed.is_initialized():
        publish(f"failed/{jax.process_index()}", json.dumps({"code": code, "why": why, "host": socket.gethostname()}))
        if is_main():
            time.sleep(3)  # with this process the coordinator goes, and the runtime would abort who has not heard
        os._exit(code)


def _store() -> Any:
    """Small texts that all processes share, kept by process 0."""
    return runtime.global_state.client
