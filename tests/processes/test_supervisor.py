"""The parent of a process passes signals on, and says with which exit code the child has ended."""

import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.harness import state_of_process

from tunix.config import command_line
from tunix.config.compose import compose
from tunix.processes import exits, peers, supervisor

DISTRIBUTED = compose(
    ["distributed.coordinator_address=localhost:1", "distributed.num_processes=2", "distributed.process_id=0"]
).config.distributed
STOPPED_EARLY = """
import os, signal, time
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""


ENDED = "import os, signal; os.kill(os.getpid(), signal.{})"
LOST = "error: process 0 of 2 has lost the others: one of them died, hangs, or cannot be reached\n"


@pytest.mark.parametrize(
    ("program", "stop_code", "code", "said"),
    [
        (STOPPED_EARLY, exits.STOPPED, 75, ""),
        (STOPPED_EARLY, None, 143, ""),
        (ENDED.format("SIGABRT"), exits.STOPPED, 76, LOST),
        (ENDED.format("SIGKILL"), exits.STOPPED, 137, "error: process 0 of 2 was ended by SIGKILL\n"),
        ("raise SystemExit(77)", exits.STOPPED, 77, ""),
    ],
    ids=["a run is stopped", "a command is stopped", "JAX aborts", "killed", "own code"],
)
def test_how_a_child_has_ended(program, stop_code, code, said, tmp_path, monkeypatch, capsys):
    """A signal before it handles signals: a run had nothing to save; a command ends as one process does."""
    (tmp_path / "child.py").write_text(program)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # of `python -m pytest`
    monkeypatch.delenv(supervisor.CHILD, raising=False)
    monkeypatch.setattr(exits, "end_with_parent", lambda: None)  # Python code in a fork of a process with JAX may hang
    with state_of_process():
        sys.argv = [str(tmp_path / "child.py")]
        assert supervisor.supervise(DISTRIBUTED, stop_code) == code
    assert capsys.readouterr().err == said


def test_a_child_that_is_stopped_for_long_is_killed(monkeypatch):
    """The others end without it. A debugger may stop it now and then."""
    clock, killed = [0.0], []

    class Child(SimpleNamespace):
        def wait(self, timeout=None):
            if not killed:
                clock[0] += timeout
                raise subprocess.TimeoutExpired("child", timeout)

    states = iter([False] * 9 + [True] * 4 + [False] + [True] * 9)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(supervisor, "_is_stopped", lambda pid: next(states))
    assert supervisor._wait(Child(pid=1, kill=lambda: killed.append(clock[0])), 5) is None
    assert killed == [9 + 4 + 1 + 5]


def test_a_process_that_a_signal_has_stopped(tmp_path):
    """Its name may look like a state."""
    shutil.copy(shutil.which("sleep"), tmp_path / "x) T y")
    with subprocess.Popen([tmp_path / "x) T y", "60"]) as child:
        before = supervisor._is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        after = supervisor._is_stopped(child.pid)
        child.kill()
    assert (before, after, supervisor._is_stopped(child.pid)) == (False, True, False)


def test_a_stop_signal_ends_a_command_that_has_joined(monkeypatch, capsys):
    """JAX's runtime takes SIGTERM when processes join, and would only note it. A key that is given twice is named."""
    monkeypatch.setattr(supervisor, "supervise", lambda *_, **__: None)
    with state_of_process():
        monkeypatch.setattr(peers, "join", lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        handlers = []
        work = lambda: handlers.append(signal.getsignal(signal.SIGTERM))  # noqa: E731
        assert command_line.run_joined("prepare", compose([]).config.distributed, {}, work, ["seed=1", "seed=2"]) == 0
    assert handlers == [signal.SIG_DFL]
    assert capsys.readouterr().err == "seed is given 2 times: the last value counts, 2\n"


def test_an_interrupted_process_tells_the_others(monkeypatch, capsys):
    """Ctrl-C on one host: JAX's end waited half a minute there for the others, which then had "lost" one another."""
    told = []
    monkeypatch.setattr(peers, "is_joined", lambda: True)
    monkeypatch.setattr(peers, "leave", lambda *why: told.append(why))

    def work() -> None:
        raise KeyboardInterrupt

    with state_of_process():
        assert supervisor.run_member(DISTRIBUTED, work) == 130
    assert told == [(130, "interrupted")]
    assert capsys.readouterr().err == "error: interrupted\n"
