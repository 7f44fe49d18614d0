"""Two processes, one of which dies, fails, hangs or is told to stop: all end in bounded time, and say why."""

import os
import re
import signal
import time

import pytest
from support.harness import PAIR, cli_here, metrics
from support.processes import Processes, is_alive

import tunix

pytestmark = pytest.mark.slow
NOTICED_S = 20  # in this test; benchmarks/faults.py measures


@pytest.fixture
def words(corpus) -> list[str]:
    return [*PAIR, "data=text", f"data.paths=['{corpus}']", "training.max_steps=100000", "evaluation.every_steps=null",
            "checkpoint.save_every_steps=1000", "distributed.heartbeat_timeout_s=6", "scheduler.warmup_steps=0"]  # fmt: skip


def seconds_to_end(run: Processes) -> float:
    start_time = time.monotonic()
    run.ends(60)
    return time.monotonic() - start_time


@pytest.mark.nightly(but=["0"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_is_killed(rank, words, tmp_path):
    with Processes(*words, folder=tmp_path, count=2, fork=False) as run:  # as users start them
        run.wait_for_step(tmp_path / "run", 5)
        child = run.child(rank)
        run.started[rank].kill()
        assert seconds_to_end(run) < NOTICED_S
        other = run.ends()[1 - rank]
        assert other.code == 76, other.stderr
        assert "error: " in other.stderr
        assert not is_alive(child)  # it died with its parent


@pytest.mark.nightly(but=["1"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_raises(rank, words, tmp_path):
    with Processes(
        *words, folder=tmp_path, count=2, script="tests/support/faulty.py", FAULT=f"{rank} exception step 8"
    ) as run:
        run.wait_for_step(tmp_path / "run", 5)
        assert seconds_to_end(run) < NOTICED_S
        ends = run.ends()
        assert ends[rank].code == 1
        assert ends[rank].stderr.count("the disk caught fire") >= 1
        assert "Traceback" in ends[rank].stderr
        assert ends[1 - rank].code == 76, ends[1 - rank].stderr
        assert f"process {rank}" in ends[1 - rank].stderr
        assert "RuntimeError: the disk caught fire" in ends[1 - rank].stderr
        assert "Traceback" not in ends[1 - rank].stderr


@pytest.mark.nightly  # faults of a step are above and below; they end in the same way
@pytest.mark.parametrize("label", ["exception", "SIGTERM"])
def test_a_fault_during_an_evaluation(label, words, tmp_path):
    fault = {"script": "tests/support/faulty.py", "FAULT": f"1 {label} evaluation 4"}
    with Processes(*words, "evaluation.every_steps=4", folder=tmp_path, count=2, **fault) as run:
        run.wait_for_file(tmp_path / "happened")
        assert seconds_to_end(run) < NOTICED_S
        ends = run.ends()
    errors = ends[0].stderr + ends[1].stderr
    if label == "SIGTERM":
        assert [end.code for end in ends] == [75, 75], errors
        assert metrics(tmp_path / "run", "held_out")[0]["step"] == 4  # the evaluation came to its end
    else:
        assert [end.code for end in ends] == [76, 1], errors
        assert "RuntimeError: the disk caught fire" in ends[0].stderr


def test_a_process_hangs(words, tmp_path):
    deadline = 12  # no step takes as long, also where the machine has other work
    words = [*words, f"distributed.step_deadline_s={deadline}", "distributed.step_deadline_factor=2"]
    with Processes(*words, folder=tmp_path, count=2, script="tests/support/faulty.py", FAULT="1 hang step 8") as run:
        run.wait_for_step(tmp_path / "run", 5)
        assert seconds_to_end(run) < deadline + NOTICED_S
        ends = run.ends()
        assert [end.code for end in ends] == [76, 76]
        assert "process 1 is late" in ends[0].stderr
        assert re.search(r"process 1 .*: step \d+, reading a batch", (tmp_path / "run" / "train.log").read_text())
        assert "in happen" in (tmp_path / "run" / "train.1.log").read_text()  # its stacks


@pytest.mark.nightly
def test_a_process_is_stopped(words, tmp_path):
    """SIGSTOP: it answers nothing, heartbeats included."""
    with Processes(*words, folder=tmp_path, count=2) as run:
        run.wait_for_step(tmp_path / "run", 5)
        os.kill(run.child(1), signal.SIGSTOP)
        start_time = time.monotonic()
        assert [end.code for end in run.ends(60)] == [76, 76]  # its parent ends it
        assert time.monotonic() - start_time < NOTICED_S
        assert "process 1 of 2 was stopped for distributed.heartbeat_timeout_s=6" in run.ends()[1].stderr


@pytest.mark.nightly(but=["0-15"])
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGTERM), (1, signal.SIGUSR1)])
def test_asked_to_stop(rank, number, words, tmp_path, monkeypatch):
    """All save the same step and end with 75, and the run goes on from there to the losses of one never stopped."""
    with Processes(*words, folder=tmp_path, count=2) as run:
        run.wait_for_step(tmp_path / "run", 5)
        run.started[rank].send_signal(number)
        assert seconds_to_end(run) < NOTICED_S
        ends = run.ends()
    assert [end.code for end in ends] == [75, 75], ends
    last = metrics(tmp_path / "run")[-1]["step"]
    assert f"saved after step {last}" in ends[0].stdout
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()
    if number == signal.SIGUSR1:
        length = f"training.max_steps={last + 3}"
        assert cli_here("resume=run", length, cwd=tmp_path, devices=2).returncode == 0
        monkeypatch.chdir(tmp_path)
        tunix.train([*words, length, "hydra.run.dir=whole", "distributed.allow_idle_devices=true"])
        losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "whole")]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_asked_to_stop_while_process_0_prepares_the_data(number, words, tmp_path):
    """Process 1 waits for it, and no step comes at which all could stop."""
    with Processes(*words, folder=tmp_path, count=2, script="tests/support/faulty.py", FAULT="0 hang start 0") as run:
        run.wait_for_file(tmp_path / "happened")
        run.started[1].send_signal(number)
        assert seconds_to_end(run) < NOTICED_S
        ends = run.ends()
    assert [end.code for end in ends] == [75, 75], ends
    assert f"{signal.Signals(number).name} while preparing the data: nothing to save" in ends[1].stdout
