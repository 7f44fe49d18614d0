"""The other processes of a run: join them, agree with them, wait for them, and leave them so that none waits in vain.

Everything here goes through the key-value store of JAX's runtime, which process 0 keeps, and not through collectives of
the devices. So it works while the devices compute, in any thread, and before the first program is compiled.

    gather     every process sets tunix/gather/N/RANK, waits at a barrier, and reads all of tunix/gather/N/; process 0
               deletes tunix/gather/N-1/
    publish    one process sets tunix/KEY; the others read it whenever they like, and wait for nothing
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
from jax._src import distributed as runtime

from tunix.base import progress
from tunix.base.errors import UserError, first_line, name_error
from tunix.config import Distributed
from tunix.processes import exits
from tunix.processes.identity import find_identity, reject_idle_gpus
from tunix.processes.rollcall import roll_call, tell_refusal

log = logging.getLogger(__name__)

T = TypeVar("T")
# Words in the runtime's errors that mean a lost peer.
LOST_PEER = ("Gloo", "NCCL", "Connection reset", "Connection closed", "heartbeat", "Barrier timed out")
OWN_CODES = (exits.USER_ERROR, exits.STOPPED, exits.DIVERGED)  # codes of a peer that this process ends with too
PROBE_S = 5.0  # seconds that a network file system may take to show a new file
# Preparing a large corpus or digesting a large export takes hours. Heartbeats detect a process that dies meanwhile, and
# the phases of a run have deadlines of their own (`watchdog`).
NO_LIMIT_S = 7 * 24 * 3600.0
_gathers = count()  # gives each gather a number
# Waits at barriers for the main thread, which then handles signals: inside jaxlib it would do so hours later.
_waiter = ThreadPoolExecutor(1, "barrier")


def join(cfg: Distributed, info: dict[str, Any]) -> list[str]:
    """Join the other processes, if there are any; return remarks for the log.

    Args:
        info: values that must be the same on all of them.

    Raises:
        UserError, PeerLost: as `roll_call` raises them.
    """
    identity = find_identity(cfg)
    if identity is None:
        _check_devices()
    if identity is None or jax.distributed.is_initialized():
        return []
    try:
        reject_idle_gpus(identity, cfg)
    except UserError as error:
        tell_refusal(identity, str(error))
        raise
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
        raise UserError(f"{identity.source}: cannot join the run: {first_line(error)}") from None
    atexit.register(disconnect)  # before that of JAX, which was there first
    with following_failures():
        _check_devices()
    return remarks


@contextmanager
def following_failures() -> Iterator[None]:
    """End this process where another one fails, in a block that waits inside JAX for the devices of all."""

    def follow() -> None:
        for rank, failure in published("failed").items():
            code, reason = describe_failure(int(rank), failure)
            print(f"error: {reason}", file=sys.stderr, flush=True)
            leave(code, reason)

    with progress.repeating(follow, lambda elapsed_s: min(elapsed_s, 1.0)):
        yield


def disconnect() -> None:
    """Leave the other processes when all have come here; process 0, which has the store of small texts, after them.

    JAX's runtime aborts a process that sees the store end, and on a busy machine one may still be leaving.
    """
    service, runtime.global_state.service = runtime.global_state.service, None
    jax.distributed.shutdown()
    if service is not None:
        time.sleep(1)
        service.shutdown()


def _check_devices() -> None:
    """Raise `UserError` where JAX finds no device, or none of the platform that JAX_PLATFORMS names."""
    try:
        jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        reason = str(error).splitlines()[0] if str(error) else "no such platform"
        if "gloo" in reason:
            raise UserError(
                f"JAX cannot connect the CPUs of several processes ({reason}): does this host know its own name, "
                f"{socket.gethostname()}? /etc/hosts may say its address"
            ) from None
        if not platforms:
            raise UserError(f"JAX finds no device: {reason}") from None
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX finds no device ({reason}); install jax[cuda13] or unset the variable"
        ) from None


def is_main() -> bool:
    """Return True on process 0, which writes what is written once: logs, metrics, the run's folder."""
    return jax.process_index() == 0


def agree(value: Any, name: str, timeout_s: float = NO_LIMIT_S) -> Any:
    """Return the value of process 0 on every process, as JSON has it."""
    return gather(value if is_main() else None, name, timeout_s)[0]


def gather(value: Any, name: str, timeout_s: float = NO_LIMIT_S) -> list[Any]:
    """Return the values of all processes, in their order and as JSON has them; `name` stands in the error of one that
    waits in vain."""
    text = json.dumps(value)
    if jax.process_count() == 1:
        return [json.loads(text)]
    # A new number for each gather, because others may still read the texts of the one before. It is the same on all
    # processes, because they call gathers in the same order: only the main thread may call them. Six digits of the
    # rank, so that the alphabetical order of the keys is the order of ranks.
    number = next(_gathers)
    key = f"tunix/gather/{number}"
    _find_store().key_value_set(f"{key}/{jax.process_index():06}", text)
    barrier(name, timeout_s)  # without the number: the runtime keeps every name of a barrier for ever
    if is_main() and number:  # every process has read the texts before it came to this barrier
        _find_store().key_value_delete(f"tunix/gather/{number - 1}")
    return [json.loads(each) for _, each in sorted(_find_store().key_value_dir_get(f"{key}/"))]


def reject_others(key: str, name: str, label: str) -> None:
    """Raise `UserError` on every process where one of them has another `key` than process 0: it sees other `label`.

    `name` is what the message begins with. It is the same on every process, and so is `label`.
    """
    keys = gather(key, label)
    other = next((rank for rank, each in enumerate(keys) if each != keys[0]), None)
    if other is not None:
        raise UserError(
            f"{name}: process 0 ({hosts()[0]}) and process {other} ({hosts()[other]}) see different {label}; read them "
            "from a disk that all hosts share, and start again when no file changes any more"
        )


@cache
def hosts() -> list[str]:
    """Return the host of each process, in their order."""
    return gather(socket.gethostname(), "hosts")


def num_on_host() -> int:
    """Return the number of processes of the run on this host, which share its cores and its memory."""
    return hosts().count(socket.gethostname())


def first_of_host() -> bool:
    """Return True on the process that writes what each host keeps for itself."""
    return hosts().index(socket.gethostname()) == jax.process_index()


def together(work: Callable[[], T], name: str, timeout_s: float = NO_LIMIT_S) -> T:
    """Call `work()` on every process at once; a `UserError` on one process is raised on all."""
    result, mistake = None, ""
    # If one process alone raised its error, the others would wait for it at the next barrier.
    try:
        result = work()
    except UserError as error:
        mistake = str(error) or "failed"
    mistakes = [text for text in gather(mistake, name, timeout_s) if text]
    if mistakes:
        raise UserError(mistakes[0])
    return cast(T, result)


def on_main(work: Callable[[], T], name: str) -> T | None:
    """Call `work()` on process 0 and return its result there, None elsewhere; a `UserError` is raised on all."""
    return together(lambda: work() if is_main() else None, name)


def decide(work: Callable[[], Any], name: str) -> Any:
    """Return on every process what `work()` returns on process 0, as JSON has it; its `UserError` is raised on all."""
    return agree(on_main(work, name), name)


def print_progress(line: str) -> None:
    """Print a line on stderr of process 0."""
    if is_main():
        progress.print_progress(line)


def share(size: int) -> range:
    """Return this process's part of `size` pieces of work; the parts of all processes, in order, are all of it."""
    rank, count = jax.process_index(), jax.process_count()
    return range(rank * size // count, (rank + 1) * size // count)


def main_first(work: Callable[[], T], name: str) -> T:
    """Call `work()` on process 0, then on the first process of every other host, then on the rest.

    Of the processes that share a disk, one writes what `work` leaves there, and the others find it. A `UserError` on
    one process is raised on all.
    """
    first = first_of_host()
    # Every process takes part in all three turns, and works in its own.
    turn = 0 if is_main() else 1 if first else 2
    result: T | None = None
    for now in range(3 if jax.process_count() > 1 else 1):
        if now == turn:
            result = together(work, name)
        else:
            together(lambda: None, name)
    return cast(T, result)


def barrier(name: str, timeout_s: float = NO_LIMIT_S) -> None:
    """Wait for every process to come here; RuntimeError naming the barrier after `timeout_s`."""
    if jax.process_count() > 1:
        _waiter.submit(_find_store().wait_at_barrier, f"tunix: {name}", round(1000 * timeout_s)).result()


def publish(key: str, value: str) -> None:
    """Set a value that the other processes read with `published`. Does nothing once the coordinator is gone."""
    if (store := _find_store()) is not None:
        try:
            store.key_value_set(f"tunix/{key}", value, allow_overwrite=True)
        except RuntimeError:
            log.warning("the coordinator does not answer")


def published(folder: str) -> dict[str, str]:
    """Return what processes have published as FOLDER/KEY, by KEY."""
    if (store := _find_store()) is None:
        return {}
    try:
        entries = store.key_value_dir_get(f"tunix/{folder}/")
    except RuntimeError:
        return {}
    return {key.rsplit("/", 1)[1]: value for key, value in entries}


def is_preempted() -> bool:
    """Return whether JAX's handler of SIGTERM has told the processes that one of them is to stop."""
    try:
        return jax.process_count() > 1 and bool(_find_store().key_value_try_get("RECEIVED_PREEMPTION_NOTICE"))
    except RuntimeError:  # nobody has set it
        return False


def find_blind(folder: Path) -> list[int]:
    """Return the ranks of the processes that do not see a file which process 0 makes in the folder.

    Every process must call this.

    Raises:
        UserError: process 0 cannot write there.
    """
    # A name that no earlier run has used: a file that is left over would be seen on another disk too.
    probe = folder / agree(f".probe-{time.time_ns()}", "name of the probe file")

    def make_probe() -> None:
        try:
            if is_main():
                probe.touch()
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None

    together(make_probe, "the probe file is there")
    latest = time.monotonic() + PROBE_S
    while not (is_there := probe.exists()) and time.monotonic() < latest:
        time.sleep(0.2)
    answers = gather("seen" if is_there else "", "the probe file")
    if is_main():
        probe.unlink()
    return [rank for rank, answer in enumerate(answers) if not answer]


def is_seen_by_all(folder: Path, requested: bool | str, label: str, key: str) -> bool:
    """Return True if all processes see a folder of process 0; False where no other host does, or nobody is to ask.

    `requested` is distributed.shared_filesystem. Every process must call this.

    Raises:
        UserError: a host does not see it that should; `label` and `key` name the folder.
    """
    if jax.process_count() == 1:
        return True
    if requested is False:
        return False
    blind = {hosts()[rank] for rank in find_blind(folder)}
    if not blind:
        return True
    # Where every other host lacks the folder, no disk is shared, and the run knows how to do without. Where only some
    # hosts lack it, a disk is meant to be shared, and is not mounted there.
    if requested is True or blind != set(hosts()) - {hosts()[0]}:
        raise UserError(
            f"{label} {folder} is not seen by {', '.join(sorted(blind))}; choose one on a disk that all processes "
            f"share: {key}=DIR"
        )
    return False


@contextmanager
def deadline(seconds: float, label: str) -> Iterator[None]:
    """End this process with exit code 76 if the block takes longer; `label` says what did not happen in time."""

    # An exception in this thread would not end the main thread, which waits inside the runtime.
    def end() -> None:
        print(f"error: {label} within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(exits.PEER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def blame(error: Exception) -> tuple[int, str]:
    """Return exit code and reason of an unexpected error in a run of several processes.

    The cause is a lost peer, or a bug here: then its traceback is printed and the code is 1.
    """
    # The cause may be on another process: then the error here is only that its connection broke. Give it the time to
    # publish its reason.
    time.sleep(2)
    for rank, failure in published("failed").items():
        return describe_failure(int(rank), failure)
    line = name_error(error)
    if any(word in str(error) for word in LOST_PEER):
        return exits.PEER, f"another process died or cannot be reached: {line}"
    traceback.print_exception(error)
    return 1, line


def describe_failure(rank: int, text: str) -> tuple[int, str]:
    """Return the exit code and the reason of a process whose peer has published `text`: that it failed."""
    failure = json.loads(text)
    code = failure["code"] if failure["code"] in OWN_CODES else exits.PEER
    return code, f"process {rank} ({failure['host']}) failed: {failure['why']}"


def is_joined() -> bool:
    """Return True where this process is one of several that have joined."""
    return jax.distributed.is_initialized()


def leave(code: int, reason: str) -> None:
    """Tell the other processes why, and end this one with `code` without waiting for them. Returns if it is alone."""
    if is_joined():
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        rank = runtime.global_state.process_id  # `jax.process_index` fails where JAX finds no device
        publish(f"failed/{rank}", json.dumps({"code": code, "why": reason, "host": socket.gethostname()}))
        if rank == 0:
            # The store ends with this process, and then the runtime aborts the others. So give their watchdogs the time
            # to read why: they look every `watchdog.POLL_S`.
            time.sleep(3)
        # Not sys.exit: at its end Python would call the shutdown of JAX's runtime, which waits for all processes.
        os._exit(code)


def _find_store() -> Any:
    """Return JAX's client of the store of small texts, which runs on process 0; None for a run of one process."""
    return runtime.global_state.client
