"""The watchdog's thread ends before the block that it watches is left, and names a process that is slow."""

import json
import math
import os
import queue
import signal
import threading
import time

import pytest

import tunix
from tunix import trainer
from tunix.base import progress
from tunix.base.errors import UserError
from tunix.base.files import STOP_SIGNALS
from tunix.config.compose import compose
from tunix.processes import peers, watchdog


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_when_the_run_ends(fails, monkeypatch):
    """A thread inside jaxlib at the end of Python aborts the process, with code 134 after a success."""
    inside, leave = threading.Event(), threading.Event()

    def published(folder: str) -> dict[str, str]:
        inside.set()  # stands for the call into jaxlib, which takes its time
        leave.wait(0.3)
        return {}

    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(peers, "published", published)
    dog = watchdog.Watchdog(compose([]).config.distributed)
    try:
        with dog:
            assert inside.wait(10)
            if fails:
                raise OSError("no space left")
    except OSError:
        pass
    assert not dog.thread.is_alive()


def test_a_process_that_has_done_its_work_waits_for_the_others_under_its_watchdog(monkeypatch):
    """The disk of process 0 was full for its last line: the others had no watchdog any more, and ended with 76."""
    waits = []
    monkeypatch.setattr(peers, "gather", lambda text, name: waits.append((name, dog.doing, dog.ended.is_set())))
    dog = watchdog.Watchdog(compose([]).config.distributed)
    with dog:
        pass
    assert waits == [("the end of all processes", "ending", False)]
    dog = watchdog.Watchdog(compose([]).config.distributed)
    with pytest.raises(OSError, match="no space left"), dog:
        raise OSError("no space left")
    assert len(waits) == 1  # the others do not come there


def test_a_run_is_watched_from_its_first_plan_on(monkeypatch):
    """The error of one process, in its choice of a mesh or in a try of its user's code, reached no other process."""
    threads = []

    def fail(_: object) -> None:
        threads.extend(thread.name for thread in threading.enumerate())
        raise UserError("nothing fits")

    monkeypatch.setattr(trainer, "plan_run", fail)
    with pytest.raises(UserError, match="nothing fits"):
        tunix.train([])
    assert "watchdog" in threads


def test_a_deadline_leaves_no_thread():
    before = threading.active_count()
    with peers.deadline(1000, "nothing happened"):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_the_slow_process_is_named(monkeypatch, caplog):
    """Each process publishes its pace; process 0 finds the one that the others wait for, and names it once."""
    board: dict[str, str] = {}
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(watchdog, "PUBLISH_S", 0)
    monkeypatch.setattr(peers, "publish", lambda key, value: board.__setitem__(key, value))

    def published(folder: str) -> dict[str, str]:
        return {key.removeprefix("progress/"): value for key, value in board.items() if key.startswith(f"{folder}/")}

    monkeypatch.setattr(peers, "published", published)
    others = [watchdog.Pace(), watchdog.Pace()]
    for each, host_s in zip(others, (0.9, 0.02), strict=True):
        for step_time_s in (0.5, 1.5):
            each.note(step_time_s, step_time_s - host_s, host_s / 2)
    for rank, each in enumerate(others, 1):
        board[f"progress/{rank}"] = json.dumps({"host": f"node-{rank}", **each.average()})
    with watchdog.Watchdog(compose([]).config.distributed) as dog:
        dog.pace.note(1.0, 0.99, 0.0)
        while len(board) < 3 or not dog.pace.slowest:
            time.sleep(0.01)
        for _ in range(3):
            dog.pace.compare({1: json.loads(board["progress/1"]), 2: json.loads(board["progress/2"])})
    expected = {"slowest_process": 1, "slowest_host_s": 0.9, "slowest_data_wait_s": 0.45}
    assert dog.pace.slowest == pytest.approx(expected)
    assert caplog.text.count("is slow") == 1
    assert "process 1 (node-1) is slow: of a step of 1.000 s it spends 0.900 s beside its devices" in caplog.text


def test_processes_of_one_pace_are_not_named(caplog):
    """Where all are equally busy beside their devices, as on CPUs, nobody waits for one of them."""
    own = watchdog.Pace()
    own.compare({0: {"host": "a"}})
    assert own.slowest == {}
    same = {"step_time_s": 1.0, "host_s": 0.9, "data_wait_s": 0.1}
    own.compare({rank: {"host": "a", **same} for rank in range(4)})
    assert own.slowest["slowest_host_s"] == 0.9
    assert "slow" not in caplog.text


def test_a_phase_that_takes_long_is_announced(monkeypatch, caplog):
    """A step is not: it has a line of its own. Nor is a command that waits for its user."""
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(progress, "find_wait", lambda elapsed_s: 0.01 if elapsed_s == 0 else 30)
    looked = threading.Semaphore(0)
    monkeypatch.setattr(peers, "published", lambda folder: looked.release() or {})
    caplog.set_level("INFO", "tunix")

    def look(count: int = 3) -> None:
        for _ in range(count):
            looked.acquire()
            time.sleep(0.01)

    with watchdog.Watchdog(compose([]).config.distributed) as dog:
        with dog.phase("saving"):
            look()
        dog.step(1)
        look()
        with dog.phase("generate", is_announced=False):
            look()
    assert caplog.text.count("saving: 0 s so far") == 1
    assert "a step" not in caplog.text
    assert "generate" not in caplog.text


def test_work_is_announced_by_its_time(monkeypatch):
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "REPEAT_S", 0.01)
    lines: list[str] = []
    with progress.announcing("compiling", lines.append):
        while len(lines) < 2:
            time.sleep(0.01)
    assert lines[0] == "compiling: 0 s so far"
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count


def test_lines_about_long_work_become_fewer(monkeypatch):
    """At least one in 5 seconds at first, and in the end one in 30."""
    monkeypatch.setattr(progress, "QUIET_S", 4.0)
    monkeypatch.setattr(progress, "REPEAT_S", 30.0)
    times = [0.0]
    while times[-1] < 600:
        times.append(times[-1] + progress.find_wait(times[-1]))
    assert times[1:6] == [4, 8, 12, 16, 20]
    assert times[-1] - times[-2] == 30
    assert len(times) < 40


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_asks_the_run_to_stop(number):
    with watchdog.listening():
        signal.raise_signal(number)
        assert watchdog.stop_requested() == signal.Signals(number).name
    watchdog._stop_signals.clear()


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_request_to_stop_ends_a_phase_without_a_limit(where, monkeypatch, capsys):
    """A run that was asked to stop while it prepared its data went on for hours, and a cluster killed it."""
    codes = queue.Queue[int]()

    def end(code: int) -> None:
        codes.put(code)
        raise SystemExit  # of the thread alone

    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(os, "_exit", end)
    dog = watchdog.Watchdog(compose([]).config.distributed)
    with watchdog.listening(), dog, dog.phase("preparing the data", math.inf):
        if where == "here":
            signal.raise_signal(signal.SIGTERM)
        else:
            monkeypatch.setattr(peers, "is_preempted", lambda: True)
        assert codes.get(timeout=10) == 75
    assert capsys.readouterr().out == "SIGTERM while preparing the data: nothing to save\n"
    watchdog._stop_signals.clear()
