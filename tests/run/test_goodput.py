"""Where the time of a run went: seconds counted by hand, and those of a run that was started again."""

import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest
from support.harness import RUN, metrics

import tunix
from tunix.base.errors import UserError
from tunix.compare import list_results, read_histories
from tunix.config.compose import compose
from tunix.run.goodput import COUNTED, Goodput, describe
from tunix.run.table import Start, open_sink, try_out


def step(number: int, seconds: float, wait: float = 0.0) -> dict:
    return {"step": number, "step_time_s": seconds, "data_wait_s": wait}


def test_seconds_over_two_starts(tmp_path):
    """The first start trained steps 1 to 4 and was killed; the second one goes on behind step 2."""
    began = time.time() - 100
    first = {f"{name}_s": 0.0 for name in ("train", *COUNTED)} | {"start_s": 5.0, "compile_s": 3.0}
    line = {"step": 0, "split": "goodput", **first, "total_s": 8.0, "began_at": began}
    lines = [
        line,
        step(1, 3.0, 1.0),
        step(2, 2.0),
        {"step": 2, "split": "held_out", "loss": 1.0},
        step(3, 4.0),
        step(4, 4.0, 1.0),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "st')
    goodput = Goodput(elapsed_s=10.0)
    goodput.go_on(tmp_path / "metrics.jsonl", step=2)
    goodput.seconds["start"] += 10
    found = goodput.record(2)
    assert found["total_s"] == pytest.approx(100, abs=1)
    assert (found["start_s"], found["compile_s"], found["train_s"], found["data_s"]) == (15, 3, 4, 1)
    assert found["lost_steps_s"] == 8
    assert found["stops_s"] == pytest.approx(90 - 8 - 13, abs=1)  # from the last step's line to the second start
    assert found["goodput"] == pytest.approx(0.04, abs=0.001)
    assert describe(found) == "4% (stops 69%, start 15%, lost steps 8%, compile 3%, data 1%)"
    # A third start finds the second one's line, and no step behind it.
    (tmp_path / "metrics.jsonl").open("a").write("\n" + json.dumps(found) + "\n")
    third = Goodput(elapsed_s=0.0)
    third.go_on(tmp_path / "metrics.jsonl", step=4)
    assert third.record(4)["lost_steps_s"] == 8
    # The second one trained step 3 alone, so a start behind step 2 loses that one, and not again what the first had lost.
    (tmp_path / "metrics.jsonl").open("a").write(json.dumps(step(3, 2.0)) + "\n")
    again = Goodput(elapsed_s=0.0)
    again.go_on(tmp_path / "metrics.jsonl", step=2)
    assert (again.record(2)["lost_steps_s"], again.record(2)["train_s"]) == (10, 4)
    older = Goodput(elapsed_s=0.0)  # behind step 1: it loses step 2, too, which the second start had gone on from
    older.go_on(tmp_path / "metrics.jsonl", step=1)
    assert older.record(1)["lost_steps_s"] == 12


def test_damaged_lines_end_no_resume(tmp_path):
    lines = [
        {"step": 1, "split": "goodput", "train_s": 3.0},
        {"step": 2, "step_time_s": 4.0},
        {"step": 2, "data_wait_s": "1"},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    goodput = Goodput(elapsed_s=0.0)
    goodput.go_on(tmp_path / "metrics.jsonl", step=1)
    assert goodput.record(1)["train_s"] == 0


def test_lines_of_a_long_run_are_read_in_linear_time(tmp_path, monkeypatch):
    """A resume of a run of 320,000 steps, with a line of goodput each 100, took a minute of processor time."""

    class Step(int):
        num_compared = 0

        def compare(self, other: int) -> bool:
            Step.num_compared += 1
            return int(self) > other

        __gt__ = compare

        def __le__(self, other: int) -> bool:
            return not self.compare(other)

    goodput, lines = Goodput(elapsed_s=0.0), []
    for number in range(2000):
        goodput.record_step(step(number, 1.0))
        lines += [step(number, 1.0) | {"step": Step(number)}, goodput.record(Step(number))]
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("tunix.run.goodput.read_json_lines", lambda file: lines)
    second = Goodput(elapsed_s=0.0)
    second.go_on(tmp_path / "metrics.jsonl", step=99)
    assert second.record(99)["lost_steps_s"] == 1900
    assert Step.num_compared <= 3 * len(lines)


def test_a_clock_that_is_set_back(monkeypatch, tmp_path):
    """By an hour while the run trains: NTP sets a clock that was wrong."""
    goodput, now = Goodput(elapsed_s=60.0), time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    goodput.end_start()
    found = goodput.record(2)
    assert (found["start_s"], found["total_s"]) == (pytest.approx(60, abs=1), pytest.approx(60, abs=1))
    assert describe(found) == "0% (start 100%)"
    (tmp_path / "metrics.jsonl").write_text(json.dumps(found) + "\n")
    second = Goodput(elapsed_s=60.0)
    second.go_on(tmp_path / "metrics.jsonl", step=2)
    assert second.record(2)["total_s"] == pytest.approx(120, abs=1)


def test_a_clock_that_is_set_forward(monkeypatch, tmp_path):
    """By three hours while the run trains: they are no stop of the run."""
    goodput, now = Goodput(elapsed_s=60.0), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3 * 3600)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(goodput.record(2)) + "\n")
    monkeypatch.setattr(time, "time", lambda: now() + 3 * 3600 + 100)
    second = Goodput(elapsed_s=60.0)
    second.go_on(tmp_path / "metrics.jsonl", step=2)
    assert second.record(2)["stops_s"] == pytest.approx(40, abs=1)


@pytest.mark.nightly
def test_a_run_that_goes_on(tmp_path, monkeypatch, corpus):
    monkeypatch.chdir(tmp_path)
    words = [
        *RUN,
        f"data.paths=[{corpus}]",
        "data=text",
        "hydra.run.dir=run",
        "model.mesh_shape=[[1],[fsdp]]",
        "distributed.allow_idle_devices=true",
    ]
    tunix.train([*words, "training.max_steps=4", "checkpoint.save_every_steps=2"])
    first = metrics(Path("run"), "goodput")[-1]
    assert (first["lost_steps_s"], first["stops_s"]) == (0, 0)
    parts = sum(first[f"{name}_s"] for name in ("train", *COUNTED, "other"))
    assert parts == pytest.approx(first["total_s"], abs=0.05)
    assert min(first["train_s"], first["evaluation_s"], first["checkpoint_s"], first["start_s"]) > 0
    tunix.train(["resume=run/checkpoints/2", "training.max_steps=5"])
    last = metrics(Path("run"), "goodput")[-1]
    lost = [line["step_time_s"] for line in metrics(Path("run"))][2:4]
    assert last["lost_steps_s"] == pytest.approx(sum(lost), rel=1e-6)
    assert last["stops_s"] > 0
    assert last["total_s"] > first["total_s"]
    numbers = dict(list_results(read_histories([Path("run")])))
    assert numbers["goodput"] == [describe(last)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_prometheus_fetches_the_newest_numbers(tmp_path):
    config = compose(["logging.sinks=[prometheus]", f"logging.prometheus.port={free_port()}", "run_name=mine"]).config
    keys = config.model_dump(mode="json")
    try_out("prometheus", keys)
    sink = open_sink("prometheus", Start(tmp_path, keys, 0, 9))
    address = f"http://127.0.0.1:{config.logging.prometheus.port}/metrics"
    for number in (1, 2):
        sink.write({"step": number, "loss": 1.5 / number, "mfu": None, "pass@4": 0.5}, "train")
        sink.write({"step": number, "split": "held_out", "loss": 3.0}, "held_out")
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    labels = 'project="tunix",run="mine"'
    for line in (
        f"tunix_train_loss{{{labels}}} 0.75",
        f"tunix_held_out_loss{{{labels}}} 3.0",
        f"tunix_train_pass_4{{{labels}}} 0.5",
    ):
        assert line in text, text
    # A second run finds it out before it reads its data, or, where both begin at the same time, behind that.
    for take in (
        lambda: try_out("prometheus", keys),
        lambda: open_sink("prometheus", Start(tmp_path, keys, 0, 9)),
    ):
        with pytest.raises(
            UserError, match="logging.prometheus.port=.* of host 127.0.0.1 cannot be listened on: .*; take another"
        ):
            take()
    sink.close(None)
    with pytest.raises(UserError, match="logging.sinks=prometheus needs a port: set logging.prometheus.port=9400"):
        try_out("prometheus", compose([]).config.model_dump(mode="json"))
