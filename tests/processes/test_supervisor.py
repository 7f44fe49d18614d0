"""The parent of a process passes signals on, and says with which exit code the child has ended."""

import signal
import sys

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


@pytest.mark.parametrize(("stop_code", "code"), [(exits.STOPPED, 75), (None, 143)])
def test_a_signal_ends_the_child_before_it_handles_signals(stop_code, code, tmp_path, monkeypatch, capsys):
    """A run can be resumed: it had nothing to save. A command ends as one process does."""
    (tmp_path / "child.py").write_text(STOPPED_EARLY)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # of `python -m pytest`
    monkeypatch.delenv(supervisor.CHILD, raising=False)
    monkeypatch.setattr(exits, "end_with_parent", lambda: None)  # Python code in a fork of a process with JAX may hang
    with state_of_process():
        sys.argv = [str(tmp_path / "child.py")]
        assert supervisor.supervise(DISTRIBUTED, stop_code) == code
    assert capsys.readouterr().err == ""


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
