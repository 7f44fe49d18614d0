"""Every process tells process 0 who it is, and hears what does not fit, before JAX's runtime starts, which would abort.

One line of JSON each way, on the port that the runtime's coordinator takes afterwards. Knows no jax.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from tunix.base.errors import PeerLost, UserError
from tunix.processes.identity import Identity

CLOCKS_S = 5.0  # hosts whose clocks differ by more are named
LATE_S = 5.0  # how long process 0 goes on telling the others what is wrong


def roll_call(identity: Identity, facts: dict[str, Any], timeout_s: float) -> list[str]:
    """Wait until all processes are there; remarks for the log.

    Args:
        facts: what must be the same on all of them.

    Raises:
        UserError: an unknown host, a port that is taken, or processes that do not belong together.
        PeerLost: names who has not come after `timeout_s`.
    """
    host, _, port = identity.coordinator_address.rpartition(":")
    host = host.strip("[]")  # of an IPv6 address
    told = f"{identity.source}: coordinator {identity.coordinator_address}"
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        raise UserError(f"{told}: host {host} is unknown here ({socket.gethostname()})") from None
    about = {
        "process": identity.process_id,
        "host": socket.gethostname(),
        "facts": {"the number of processes": identity.num_processes, **facts},
    }
    deadline = time.monotonic() + timeout_s
    if identity.process_id:
        answer = _answer(host, int(port), about, deadline, told)
    else:
        families = {address[0] for address in addresses}
        try:
            server = socket.create_server(("", int(port)), family=min(families))  # IPv4 where there is one
        except OSError as error:
            raise UserError(
                f"{told}: port {port} cannot be used ({os.strerror(error.errno or 0)}); "
                "set distributed.coordinator_address=HOST:PORT"
            ) from None
        with server:
            answer = _call(server, identity.num_processes, about, deadline)
    if "absent" in answer:
        raise PeerLost(f"{answer['absent']} within distributed.init_timeout_s={timeout_s:g}")
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    return answer["remarks"]


def _call(server: socket.socket, num_processes: int, mine: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Process 0: hear everyone, then tell all what came of it."""
    guests: list[socket.socket] = []
    came = {0: mine | {"ahead_s": 0.0}}
    mistake = ""
    while len(came) < num_processes:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            guest, _ = server.accept()
        except TimeoutError:
            break
        guest.settimeout(5)
        theirs = read(guest)
        if theirs is None or not mine.keys() < theirs.keys():  # not one of us
            guest.close()
            continue
        guests.append(guest)
        theirs["ahead_s"] = theirs.pop("time") - time.time()
        if not mistake and (mistake := _mistake(came, theirs)):
            deadline = min(deadline, time.monotonic() + LATE_S)
        came.setdefault(theirs["process"], theirs)
    missing = sorted(set(range(num_processes)) - set(came))
    answer: dict[str, Any] = {"remarks": _clocks(came)}
    if missing:
        present = ", ".join(f"{process} ({about['host']})" for process, about in sorted(came.items()))
        answer = {"absent": f"processes {missing} of {num_processes} did not come, only {present}"}
    if mistake:
        answer = {"mistake": mistake}
    for guest in guests:
        with suppress(OSError):  # it has died since
            write(guest, answer)
    for guest in guests:  # who closes first keeps the port busy
        read(guest)
        guest.close()
    return answer


def _mistake(came: dict[int, dict[str, Any]], theirs: dict[str, Any]) -> str:
    """What is wrong with a process that has come, in words; empty if nothing is."""
    process, host = theirs["process"], theirs["host"]
    ours, facts = came[0]["facts"], theirs["facts"]
    different = [
        f"{key} is {ours.get(key)} on process 0 ({came[0]['host']}) and {facts.get(key)} on process {process} ({host})"
        for key in sorted(ours.keys() | facts.keys())
        if ours.get(key) != facts.get(key)
    ]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        return f"the processes differ: {'; '.join(different[:5])}{more}"
    if process in came:
        return f"two processes have the number {process}: one on {came[process]['host']}, one on {host}"
    return ""


def _clocks(came: dict[int, dict[str, Any]]) -> list[str]:
    """The two hosts whose clocks are furthest apart, if that is far."""
    slow, fast = (end(came.values(), key=lambda about: about["ahead_s"]) for end in (min, max))
    apart = fast["ahead_s"] - slow["ahead_s"]
    if apart < CLOCKS_S:
        return []
    return [f"the clock of {fast['host']} is {apart:.0f} s ahead of that of {slow['host']}; NTP would set them right"]


def _answer(host: str, port: int, mine: dict[str, Any], deadline: float, told: str) -> dict[str, Any]:
    """Any other process: knock until process 0 is there, then wait for what came of it."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as zero:
                write(zero, mine | {"time": time.time()})
                zero.settimeout(max(0.01, deadline + 2 * LATE_S - time.monotonic()))
                if answer := read(zero):
                    return answer
                raise OSError("process 0 went away")
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{told}: no answer ({error}); is process 0 running, is the port open between the hosts? "
                    "distributed.init_timeout_s waits longer"
                ) from None
            time.sleep(0.2)


def write(peer: socket.socket, message: dict[str, Any]) -> None:
    peer.sendall(json.dumps(message).encode() + b"\n")


def read(peer: socket.socket) -> dict[str, Any] | None:
    """One line of JSON, or None if the peer speaks of something else, or no more."""
    try:
        with peer.makefile() as lines:
            message = json.loads(lines.readline(1_000_000))
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
