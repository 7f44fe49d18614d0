"""Roll call: process 0 waits until every process has come, and checks that they belong together. Imports no jax.

It runs before JAX's runtime starts, because that runtime aborts a process whose peers are missing or different, without
a message that names them. Each process sends process 0 one line of JSON and gets one back:

    process k -> 0    {"process": k, "host": ..., "facts": {key: value, ...}, "time": ..., "refused": ...}
    process 0 -> k    {"remarks": [...]}   or {"mistake": ...}   or {"absent": ...}

A process that is refused before, for a file that its host lacks, comes too and says why. They use the port that the
runtime's coordinator takes afterwards.
"""

import hashlib
import json
import os
import platform
import socket
import struct
import time
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tunix.base.config_types import read_version
from tunix.base.dotted_path import hash_modules
from tunix.base.errors import PeerLost, UserError
from tunix.processes.identity import Identity

# Versions of these must be the same on all processes of a run.
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy", "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)  # fmt: skip
READ_S = 5.0  # for one line of another process, from its first byte to its last
MAX_LINE = 1 << 26  # bytes; the config of a run may name a million files
MAX_VALUE = 500  # characters of a value in a message
CLOCKS_S = 5.0  # clocks of hosts that differ by more give a remark
# JAX's runtime agrees on the last step 15 minutes before an end that each process names by its own clock: those whose
# clock is behind wait until then.
STOP_CLOCKS_S = 900.0
LATE_S = 5.0  # after an error, seconds that process 0 waits for the other processes, so that it can tell them too
REFUSED_S = 120.0  # that a refused process waits for the others: it comes before them, which import JAX first
# Kubernetes sets it in every pod. There the name of process 0's pod is unknown until that pod has an address, which may
# be minutes after this one has started; elsewhere an unknown name is a mistake.
IN_POD = "KUBERNETES_SERVICE_HOST"
RESOLVE_S = 1.0  # between two questions for the address of a host
ANSWERS = {"remarks", "mistake", "absent"}
REPORT: dict[str, type | tuple[type, ...]] = {"process": int, "host": str, "facts": dict, "time": (int, float)}


@cache  # the code that this process runs is that of its start
def list_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that a run's numbers depend on, and a hash of tunix's own code.

    Two copies of a development version have the same number, and not the same hash.
    """
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
    by_name = {"python": platform.python_version(), "tunix": read_version(), "code of tunix": code}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            by_name[package] = metadata.version(package)
    return by_name


def roll_call(identity: Identity, info: dict[str, Any], timeout_s: float, refused: str = "") -> list[str]:
    """Wait until all processes have come; return remarks for the log.

    Args:
        info: values that must be the same on all processes, by their names.
        refused: why this process takes no part; the others hear it.

    Raises:
        UserError: the host is unknown, the port is taken, or the processes do not belong together.
        PeerLost: processes, or process 0, have not come after `timeout_s`; the message names them. In a pod of
            Kubernetes also: the host is still unknown.
    """
    host, _, port = identity.coordinator_address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    subject = f"{identity.source}: coordinator {identity.coordinator_address}"  # messages begin with it
    deadline = time.monotonic() + timeout_s
    while not (addresses := _find_addresses(host, int(port))):
        unknown = f"{subject}: host {host[:100]} is unknown here ({socket.gethostname()})"
        if IN_POD not in os.environ:
            raise UserError(unknown)
        if time.monotonic() > deadline:
            limit = f"distributed.init_timeout_s={timeout_s:g}"
            raise PeerLost(f"{unknown} after {limit}; has the pod of process 0 started?")
        time.sleep(RESOLVE_S)
    about = {
        "process": identity.process_id,
        "host": socket.gethostname(),
        "facts": {"the number of processes": identity.num_processes, **hash_modules(), **info},
        "refused": refused,
    }
    if identity.process_id:
        answer = _report(host, int(port), about, deadline)
    else:
        families = {address[0] for address in addresses}
        try:
            server = socket.create_server(("", int(port)), family=min(families))  # IPv4 where there is one
        except OSError as error:
            raise UserError(
                f"{subject}: port {port} cannot be used ({os.strerror(error.errno or 0)}); "
                "set distributed.coordinator_address=HOST:PORT"
            ) from None
        with server:
            answer = _call_roll(server, identity.num_processes, about, deadline)
    if "silent" in answer:
        raise PeerLost(
            f"{subject}: no answer of process 0 within distributed.init_timeout_s={timeout_s:g} ({answer['silent']}); "
            "is it running, is the port open between the hosts?"
        )
    if "absent" in answer:
        raise PeerLost(f"{answer['absent']} within distributed.init_timeout_s={timeout_s:g}")
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    return answer["remarks"]


def tell_refusal(identity: Identity, mistake: str) -> None:
    """Tell the other processes why this one takes no part, if they come within `REFUSED_S`."""
    with suppress(UserError, PeerLost):
        roll_call(identity, {}, REFUSED_S, mistake)


def _find_addresses(host: str, port: int) -> list[Any]:
    """Return what `socket.getaddrinfo` knows about the host; nothing where it is unknown."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []


def _call_roll(server: socket.socket, num_processes: int, about: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Run the roll call on process 0: hear every process, then send all of them the result, which is returned too."""
    peers: list[socket.socket] = []
    present = {0: about | {"ahead_s": 0.0}}  # by process
    mistake = _describe_refusal(about)
    while len(present) < num_processes and time.monotonic() < deadline:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            break
        other = read(peer, min(READ_S, deadline - time.monotonic()))
        # Everybody can connect to the port. Whoever sends something else than a report is not counted.
        if other is None or not is_report(other):
            peer.close()
            continue
        peers.append(peer)
        other["ahead_s"] = other.pop("time") - time.time()
        # The first mistake ends the run. Wait a little for processes that come later: they should hear of it too, and
        # not try for minutes to reach a process 0 that has ended.
        if not mistake and (mistake := _find_mistake(present, other)):
            deadline = min(deadline, time.monotonic() + LATE_S)
        if 0 <= other["process"] < num_processes:
            del other["facts"]  # of thousands of processes they may be gigabytes
            present.setdefault(other["process"], other)
    missing = sorted(set(range(num_processes)) - set(present))
    answer: dict[str, Any] = {"remarks": _compare_clocks(present)}
    if missing:
        names = ", ".join(f"{process} ({about['host']})" for process, about in sorted(present.items()))
        answer = {"absent": f"processes {missing} of {num_processes} did not come, only {names}"}
    if mistake:
        answer = {"mistake": mistake}
    for peer in peers:
        with suppress(OSError):  # the peer has died since
            peer.settimeout(READ_S)
            write(peer, answer)
    # TCP keeps the port of the side that closes first busy for a while, and the coordinator needs this port. So wait
    # until the other side has closed.
    for peer in peers:
        read(peer, READ_S)
        peer.close()
    return answer


def _find_mistake(present: dict[int, dict[str, Any]], other: dict[str, Any]) -> str:
    """Compare a process that has come with process 0; return what is wrong, or nothing."""
    if refused := _describe_refusal(other):
        return refused
    process, host = other["process"], other["host"]
    ours, info, first_host = present[0]["facts"], other["facts"], present[0]["host"]
    different = [
        f"{key} is {_show(ours.get(key))} on process 0 ({first_host}) and {_show(info.get(key))} on process {process} "
        f"({host})"
        for key in sorted(ours.keys() | info.keys())
        if ours.get(key) != info.get(key)
    ]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        return f"the processes differ: {'; '.join(different[:5])}{more}"
    if process in present:
        return f"two processes have the number {process}: one on {present[process]['host']}, one on {host}"
    return ""


def _describe_refusal(about: dict[str, Any]) -> str:
    return f"process {about['process']} ({about['host']}): {about['refused']}" if about.get("refused") else ""


def _show(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


def _compare_clocks(present: dict[int, dict[str, Any]]) -> list[str]:
    """Return a remark about the two hosts whose clocks differ most, if they differ by more than `CLOCKS_S`."""
    slow, fast = (end(present.values(), key=lambda about: about["ahead_s"]) for end in (min, max))
    apart = fast["ahead_s"] - slow["ahead_s"]
    if apart < CLOCKS_S:
        return []
    lost = "a stop signal or time limit ends the run without a save; " if apart > STOP_CLOCKS_S else ""
    return [
        f"the clock of {fast['host']} is {apart:.0f} s ahead of that of {slow['host']}; {lost}NTP would set them right"
    ]


def _report(host: str, port: int, about: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Report to process 0 from any other process: try until it listens, then wait for the result and return it.

    Where process 0 has not answered by the deadline, the result is {"silent": the last error}.
    """
    while True:
        try:
            with connect(host, port) as zero:
                write(zero, about | {"time": time.time()})
                # Process 0 answers when all have come, or when its own time is over. Its time began later than ours if
                # it started later, so give it some seconds more: its answer names who is missing.
                answer = read(zero, deadline + 2 * LATE_S - time.monotonic())
                if answer is None:
                    raise OSError("process 0 went away")
                if not ANSWERS & answer.keys():
                    raise OSError("something else answers")
                return answer
        except OSError as error:
            if time.monotonic() > deadline:
                return {"silent": str(error)}
            time.sleep(0.2)


def connect(host: str, port: int) -> socket.socket:
    """Connect to a process that may not listen yet; raises `OSError`."""
    peer = socket.create_connection((host, port), timeout=5)
    if peer.getsockname() == peer.getpeername():
        # Nobody listens, and Linux has given the new socket this very port. The port must be free at once, so no close
        # in order: it would be taken for a minute.
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()
        raise OSError("nobody listens")
    return peer


def write(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def read(peer: socket.socket, limit_s: float) -> dict[str, Any] | None:
    """Read one line of JSON within `limit_s`, however slowly its bytes come.

    None if the peer is late, sends something else, or has closed the connection.
    """
    line, deadline = bytearray(), time.monotonic() + limit_s
    try:
        while not line.endswith(b"\n"):
            peer.settimeout(max(0.01, deadline - time.monotonic()))
            more = peer.recv(65536)
            if not more or len(line) > MAX_LINE or time.monotonic() > deadline:
                return None
            line += more
        message = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def is_report(message: dict[str, Any] | None) -> bool:
    """Return True for the line that a process of a run sends; another program, like a port scanner, sends others."""
    if message is None or not all(isinstance(message.get(key), kind) for key, kind in REPORT.items()):
        return False
    return abs(message["time"]) < 1e12  # seconds; no clock is there yet, and larger numbers are no floats
