"""What does not fit is said before JAX's runtime starts, on every process, in words."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tunix.base import dotted_path
from tunix.base.errors import PeerLost, UserError
from tunix.launch.nodes import find_free_port
from tunix.processes import rollcall
from tunix.processes.identity import Identity
from tunix.processes.rollcall import roll_call


def called(*who: tuple[int, int, dict], timeout_s: float = 5) -> list[object]:
    """What each of these processes (number, of how many, its facts) hears."""
    address = f"127.0.0.1:{find_free_port()}"

    def come(process: int, count: int, info: dict) -> object:
        try:
            return roll_call(Identity("torchrun", address, count, process), info, timeout_s)
        except (UserError, PeerLost) as error:
            return error

    with ThreadPoolExecutor(len(who)) as threads:
        return list(threads.map(come, *zip(*who, strict=True)))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rollcall, "LATE_S", 0.5)
    monkeypatch.setattr(dotted_path, "_modules", {})  # other tests may have imported some
    monkeypatch.delenv(rollcall.IN_POD, raising=False)  # the tests may run in a pod


def test_all_come():
    assert called(*((n, 3, {"seed": 1}) for n in (2, 0, 1))) == [[], [], []]


def test_who_differs_is_named_with_every_key():
    """Also to a process that is itself like process 0."""
    same = {"seed": 0, "jax": "0.10.2", "code of tunix": "a"}
    heard = called((0, 3, same), (1, 3, same), (2, 3, same | {"jax": "0.11.2", "code of tunix": "b"}))
    assert {type(error) for error in heard} == {UserError}
    assert len(set(map(str, heard))) == 1
    assert "code of tunix is a on process 0 (" in str(heard[0])
    assert "jax is 0.10.2 on process 0 (" in str(heard[0])
    assert "and 0.11.2 on process 2 (" in str(heard[0])
    assert "seed" not in str(heard[0])


def test_own_code_is_compared(tmp_path, monkeypatch):
    """An old copy of a loss on one host: each device learnt by the one of its host."""
    file = tmp_path / "loss_of_a_host.py"
    file.write_text("def loss(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    dotted_path.import_object("tunix.base.errors:UserError")
    dotted_path.import_object("loss_of_a_host:loss")
    assert called((0, 2, {}), (1, 2, {})) == [[], []]
    old = dotted_path.hash_modules()
    assert old.keys() == {"code of loss_of_a_host"}
    file.write_text("def loss(): return 0\n")
    copies = iter((old, dotted_path.hash_modules()))
    monkeypatch.setattr(rollcall, "hash_modules", lambda: next(copies))
    assert "the processes differ: code of loss_of_a_host is " in str(called((0, 2, {}), (1, 2, {}))[1])


def test_a_long_config_is_compared():
    """With 32,000 files in data.paths the other processes were not counted: they "did not come" within 5 minutes."""
    paths = {"data.paths": [f"/corpus/{number:090}.jsonl" for number in range(20_000)]}
    assert called((0, 2, paths), (1, 2, paths)) == [[], []]
    heard = called((0, 2, paths), (1, 2, {"data.paths": paths["data.paths"][1:]}))
    assert "data.paths is ['/corpus/000" in str(heard[1])
    assert len(str(heard[1])) < 2000


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ([(0, 2), (1, 2), (1, 2)], None),  # all are there: the third finds nobody, or is told
        ([(0, 3), (1, 3), (1, 3)], "two processes have the number 1: one on "),
        ([(0, 2), (1, 3), (2, 3)], "the number of processes is 2 on process 0 ("),
        ([(0, 3), (1, 2)], "the number of processes is 3 on process 0 ("),
    ],
)
def test_numbers_that_do_not_fit(who, said):
    heard = called(*((process, count, {}) for process, count in who), timeout_s=2)
    if said is None:
        assert sorted(isinstance(label, list) for label in heard) == [False, True, True], heard
        return
    # One that comes after process 0 has told the others finds nobody (PeerLost).
    assert all(isinstance(label, UserError | PeerLost) for label in heard), heard
    assert sum(said in str(label) and isinstance(label, UserError) for label in heard) >= 2


@pytest.mark.parametrize("refused", [0, 1])
def test_a_process_that_is_refused_before_tells_the_others(refused):
    """They waited for it in vain, five minutes long."""
    port = find_free_port()

    def come(process: int) -> str:
        identity = Identity("torchrun", f"127.0.0.1:{port}", 3, process)
        with pytest.raises(UserError) as error:
            roll_call(identity, {"seed": 1}, 60, "there is no file b" if process == refused else "")
        return str(error.value)

    with ThreadPoolExecutor(3) as threads:
        said = f"process {refused} ({socket.gethostname()}): there is no file b"
        assert list(threads.map(come, range(3))) == [said] * 3


def test_two_of_number_0():
    heard = called((0, 2, {}), (0, 2, {}), timeout_s=1)
    assert {type(label) for label in heard} == {UserError, PeerLost}
    assert any("cannot be used (Address already in use); set distributed." in str(label) for label in heard)


def test_who_did_not_come_is_named():
    heard = called((0, 4, {}), (2, 4, {}), timeout_s=1)
    assert {type(label) for label in heard} == {PeerLost}
    host = socket.gethostname()
    assert f"processes [1, 3] of 4 did not come, only 0 ({host}), 2 ({host})" in str(heard[1])


@pytest.mark.parametrize(
    ("ahead", "said"),
    [(90, "is 90 s ahead of that of"), (3600, "; a stop signal or time limit ends the run without a save; NTP")],
)
def test_clocks_that_are_apart(ahead, said, monkeypatch):
    here = iter([1000.0, 1000.0 + ahead])  # of process 1 when it comes, then of process 0
    monkeypatch.setattr(
        rollcall, "time", type("", (), {"time": lambda: next(here), "monotonic": time.monotonic, "sleep": time.sleep})
    )
    heard = called((0, 2, {}), (1, 2, {}))
    assert heard[0] == heard[1]
    assert said in heard[0][0]
    assert ("without a save" in heard[0][0]) == (ahead > 900)


def test_a_stranger_on_the_port():
    port = find_free_port()
    with ThreadPoolExecutor(1) as threads:
        zero = threads.submit(roll_call, Identity("torchrun", f"127.0.0.1:{port}", 2, 0), {}, 5)
        for _ in range(50):
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b'{"GET": 1}\n')
                break
            except OSError:
                time.sleep(0.05)
        assert roll_call(Identity("torchrun", f"127.0.0.1:{port}", 2, 1), {}, 5) == zero.result() == []


def test_a_process_that_reaches_itself_tries_again(monkeypatch):
    """Where nobody listens yet, Linux may give a socket the port that it connects to."""
    port, connect, reached = find_free_port(), socket.create_connection, []

    def connect_to_itself(address, timeout):
        if reached:
            return connect(address, timeout)
        peer = connect(address, timeout, source_address=("127.0.0.1", port))
        reached.append(peer.getsockname() == peer.getpeername())
        return peer

    monkeypatch.setattr(socket, "create_connection", connect_to_itself)
    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(roll_call, Identity("torchrun", f"127.0.0.1:{port}", 2, 1), {}, 5)
        while not reached and not one.done():
            time.sleep(0.01)
        assert roll_call(Identity("torchrun", f"127.0.0.1:{port}", 2, 0), {}, 5) == one.result() == []
    assert reached == [True]


def test_something_else_answers_on_the_port():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        who = Identity("torchrun", f"127.0.0.1:{server.getsockname()[1]}", 2, 1)
        one = threads.submit(roll_call, who, {}, 0.5)
        with suppress(TimeoutError):
            server.settimeout(1)
            while True:
                peer = server.accept()[0]
                with peer, peer.makefile("rb") as lines:
                    peer.sendall(lines.readline())
        with pytest.raises(PeerLost, match=r"no answer of process 0 .* \(something else answers\)"):
            one.result()


def test_an_unknown_host_is_named_at_once():
    start_time = time.monotonic()
    with pytest.raises(UserError, match="host no-such-host.invalid is unknown here"):
        roll_call(Identity("torchrun", "no-such-host.invalid:1234", 2, 1), {}, 60)
    assert time.monotonic() - start_time < 20


def test_a_pod_waits_until_the_name_of_process_0_is_known(monkeypatch):
    """Kubernetes knows the name of a pod when the pod has an address; the other pods may start minutes earlier."""
    asked, resolve = [], socket.getaddrinfo

    def resolve_late(host: str, *args: object, **words: object) -> object:
        if not host:  # of a server
            return resolve(host, *args, **words)
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror
        return resolve("localhost", *args, **words)

    monkeypatch.setattr(rollcall, "RESOLVE_S", 0.01)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    zero = Identity("RANK and WORLD_SIZE", f"run-workers-0-0.run:{find_free_port()}", 1, 0)
    monkeypatch.setattr(socket, "getaddrinfo", resolve_late)
    assert (roll_call(zero, {}, 60), len(asked)) == ([], 3)
    asked[:] = []
    with pytest.raises(PeerLost, match=r"host run-workers-0-0.run is unknown .* has the pod of process 0 started\?"):
        roll_call(zero, {}, 0)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used"):
            roll_call(Identity("torchrun", f"localhost:{port}", 2, 0), {}, 60)


def test_process_0_never_comes():
    """Its host may have died while it started: a job is queued again (76), and its config is not to blame."""
    with pytest.raises(PeerLost, match=r"no answer of process 0 within distributed.init_timeout_s=1 \(.*is it running"):
        roll_call(Identity("torchrun", f"localhost:{find_free_port()}", 2, 1), {}, 1)


def speak(port: int, *chunks: bytes, pause_s: float = 0.0) -> threading.Thread:
    """A stranger who connects to the port and sends these pieces, until the other side closes."""

    def work() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            for piece in chunks:
                peer.sendall(piece)
                time.sleep(pause_s)
            peer.recv(1)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


STRANGERS = {
    "a byte at a time": lambda port: speak(port, *[b"x"] * 200, pause_s=0.1),
    "a time that is no float": lambda port: speak(
        port, b'{"process": 1, "host": "x", "facts": {}, "time": 1' + b"0" * 400 + b"}\n"
    ),
    "a number of no process": lambda port: speak(
        port, b'{"process": -7, "host": "x", "facts": {"the number of processes": 2}, "time": 1}\n'
    ),
    "a long line": lambda port: speak(port, b"x" * 2_000_000),
    "nested": lambda port: speak(port, b"[" * 100_000 + b"\n"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_keeps_nobody_beyond_the_deadline(name):
    port = find_free_port()
    with ThreadPoolExecutor(1) as threads:
        start_time = time.monotonic()
        zero = threads.submit(roll_call, Identity("torchrun", f"127.0.0.1:{port}", 2, 0), {}, 3)
        time.sleep(0.3)
        stranger = STRANGERS[name](port)
        with pytest.raises(PeerLost, match=r"processes \[1\] of 2 did not come"):
            zero.result(timeout=30)
        assert time.monotonic() - start_time < 20
        stranger.join(30)


@pytest.mark.parametrize("address", ["a..b:29500", "x" * 5000 + ":29500"])
def test_a_name_that_is_no_host(address):
    with pytest.raises(UserError, match="is unknown here"):
        roll_call(Identity("torchrun", address, 2, 1), {}, 1)
