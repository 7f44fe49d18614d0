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
from tunix.training.loss import RESERVED


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
    assert dog.pace.slowest.keys() <= RESERVED  # no loss of a user takes these names
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


def test_two_slow_processes_do_not_hide_each_other(caplog):
    """The mean of the others would be that of the second one, nearly. Three times what they spend is not slow yet."""
    pace = watchdog.Pace()

    def compare(*host_s: float) -> str:
        caplog.clear()
        pace.compare({
            rank: {"host": "a", "step_time_s": 1.0, "host_s": each, "data_wait_s": 0.0}
            for rank, each in enumerate(host_s)
        })  # fmt: skip
        return caplog.text

    assert "process 1 (a) is slow" in compare(0.1, 0.9, 0.85, 0.2, 0.2)
    assert compare(0.3, 0.3, 0.89, 0.3) == ""


def test_how_long_a_step_may_take(monkeypatch):
    """20 times the median of the steps behind the first, at least 60 s, and no more than a phase."""
    clock = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    words = ["step_deadline_s=60", "step_deadline_factor=20", "phase_deadline_s=1800"]
    dog = watchdog.Watchdog(compose([f"distributed.{word}" for word in words]).config.distributed)
    limits = []
    for number, step_time_s in enumerate((900, 8, 2, 1, 1, 200, 300, 400), 1):
        dog.step(number)
        limits.append(dog.limit)
        clock[0] += step_time_s
    assert limits == [1800, 1800, 160, 100, 60, 60, 60, 100]
    clock[0] += 50
    with dog.phase("saving"):
        assert (dog.doing, dog.limit, dog.since) == ("saving", 1800, clock[0])
        clock[0] += 90
    assert (dog.doing, dog.limit, dog.since) == ("a step", 100, clock[0])  # all of its time again


def state(step: int, doing: str) -> str:
    return json.dumps({"host": "a", "step": step, "doing": doing, "for_s": 70.0})


def test_a_deadline_names_the_process_that_is_late(monkeypatch, caplog):
    """The one in the earliest step, and there the one that does something else: the others wait for it in the step."""
    ends = []
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(peers, "publish", lambda *_: None)
    states = {"0": state(8, "a step"), "1": state(7, "a step"), "2": state(7, "reading data"), "3": state(7, "a step")}
    monkeypatch.setattr(peers, "published", lambda _: states)
    dog = watchdog.Watchdog(compose([]).config.distributed)
    monkeypatch.setattr(dog, "_end", lambda code, reason: ends.append((code, reason)))
    dog.step(8)
    dog._expire(70)
    ((code, reason),) = ends
    assert code == 76
    assert "a step at step 8 has taken 70 s, its deadline was 1800 s; process 2 is late; stacks are in" in reason
    assert "process 1 (a): step 7, a step, 70 s" in caplog.text


def test_work_that_ends_late_is_no_reason_to_end(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    dog = watchdog.Watchdog(compose([]).config.distributed)
    monkeypatch.setattr(dog, "_end", lambda *why: pytest.fail(str(why)))
    monkeypatch.setattr(peers, "publish", lambda *_: dog.step(2))  # while the process tells the others
    dog.step(1)
    dog._expire(70)
    assert "step 2 took 70 s, more than its deadline of 1800 s" in caplog.text


def test_a_process_does_not_follow_itself(monkeypatch):
    """Its own failure is among those that it reads."""
    looked, followed = threading.Semaphore(0), []
    failures = {"0": "own", "1": "theirs"}
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(peers, "published", lambda folder: looked.release() or (failures if folder == "failed" else {}))
    monkeypatch.setattr(watchdog.Watchdog, "_follow", lambda _, rank, failure: followed.append((rank, failure)))
    with watchdog.Watchdog(compose([]).config.distributed):
        for _ in range(6):
            looked.acquire()
    assert set(followed) == {(1, "theirs")}


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
    watchdog.forget_requests()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of `end`
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
    watchdog.forget_requests()


def test_a_request_to_stop_says_nothing_about_the_next_run(monkeypatch):
    """Behind a point that had ended by its own time limit, the next one of a sweep ended while it read its data."""
    monkeypatch.setattr(watchdog, "POLL_S", 0)
    monkeypatch.setattr(os, "_exit", pytest.fail)
    looked, find = threading.Event(), watchdog.find_request
    monkeypatch.setattr(watchdog, "find_request", lambda: looked.set() or find())
    watchdog.limit_time(100, -1e9)
    assert watchdog.stop_requested() == "training.time_limit_s=100"
    dog = watchdog.Watchdog(compose([]).config.distributed)
    with dog, dog.phase("preparing the data", math.inf):
        assert looked.wait(10)
        assert (find(), watchdog.stop_requested()) == (None, None)


def test_a_failure_says_nothing_about_the_next_run():
    """A sweep has its runs in one process: the next one would end with the failure of the one before."""
    with watchdog.listening():
        watchdog.request_stop("the disk is full", fails=True)
        assert watchdog.failure_of_stop() == "the disk is full"
    watchdog.forget_requests()
    with watchdog.listening():
        assert (watchdog.stop_requested(), watchdog.failure_of_stop()) == (None, None)
