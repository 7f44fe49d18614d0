"""Sinks outside of the run's folder: the real wandb (offline), the real MLflow server, a server for messages.

None of them stops or delays a run.
"""

import json
import socket
import sys
import threading
import time
from collections import namedtuple
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.harness import ONE_LAYER, RUN, metrics
from support.mlflow_server import Door, serve_mlflow
from support.processes import wait_until

import tunix
from tunix.base.errors import Diverged, Stopped, UserError
from tunix.config.compose import compose
from tunix.processes import exits
from tunix.run import remote_sinks
from tunix.run.metrics import Metrics
from tunix.run.remote_sinks import Mlflow, Wandb
from tunix.run.sinks import Background
from tunix.run.table import Start, open_sink

SMALLEST = [
    *RUN, "model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true", *ONE_LAYER,
    "training.micro_batch_size=2", "training.max_steps=2", "checkpoint.save_every_steps=null",
    "evaluation.every_steps=null", "evaluation.sample_tokens=2", "project_name=demo", "run_name=first",
]  # fmt: skip

ENDLESS = 299  # the status of an answer whose head does not end


@pytest.fixture
def server(monkeypatch):
    """A server that takes messages as Slack does: their texts; and the statuses of its next answers, else 200."""
    texts, statuses = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = statuses.pop(0) if statuses else 200
            if status == 200:
                texts.append(body["text"])
            self.send_response(status)
            while status == ENDLESS:  # a header each 50 ms, until the client leaves
                self.send_header("A", "b")
                self.flush_headers()
                time.sleep(0.05)
            if status == 302:  # urllib would ask for it with a GET, which has no message
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self):
            texts.append(f"GET {self.path}")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("TUNIX_WEBHOOK_URL", f"http://127.0.0.1:{server.server_port}/hook")
    yield texts, statuses
    server.shutdown()
    server.server_close()
    thread.join()


def read_wandb(folder: Path) -> list:
    """Records of an offline run: messages of protobuf in the log format of LevelDB, blocks of 32 KiB behind a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, found, parts, index = path.read_bytes(), [], b"", 7
    while index + 7 <= len(data):
        if 32768 - index % 32768 < 7:
            index += 32768 - index % 32768
            continue
        size, kind = int.from_bytes(data[index + 4 : index + 6], "little"), data[index + 6]
        parts += data[index + 7 : index + 7 + size]
        index += 7 + size
        if kind in (1, 4):  # all of a message, or its last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def start_of(folder: Path, *words: str) -> Start:
    config = compose(["run_name=first", "project_name=demo", *words]).config.model_dump(mode="json")
    return Start(folder, config, step=0, last_step=9)


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    with serve_mlflow(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


def test_mlflow_gets_every_number_in_batches_and_how_a_run_has_ended(monkeypatch):
    sent: list[tuple[str, Any]] = []
    client = SimpleNamespace(
        log_batch=lambda _, metrics: sent.append(("batch", [(each.key, each.value, each.step) for each in metrics])),
        set_terminated=lambda _, status: sent.append(("end", status)),
    )
    entities = SimpleNamespace(Metric=namedtuple("Metric", "key, value, timestamp, step"))
    for name, module in (("mlflow", SimpleNamespace(MlflowException=OSError)), ("mlflow.entities", entities)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(remote_sinks, "BATCH", 2)
    for error, status in (
        (None, "FINISHED"),
        (Stopped("stopped"), "KILLED"),
        (Diverged("NaN"), "FAILED"),
        (OSError(), "FAILED"),
    ):
        sink = Mlflow.__new__(Mlflow)
        sink.client, sink.run_id, sink.waiting, sink.refused = client, "id", {}, set()
        sink.sent = time.monotonic()
        sink.write({"step": 3, "pass@8": 0.5, "loss": 2, "name": "x"}, "held_out")
        sink.write({"step": 4, "loss": 1.5}, "train")
        sink.close(error)
        assert sent == [
            ("batch", [("held_out/pass_at_8", 0.5, 3), ("held_out/loss", 2.0, 3)]), ("batch", [("train/loss", 1.5, 4)]),
            ("end", status),
        ]  # fmt: skip
        sent.clear()


def test_a_text_is_no_html_of_wandb():
    sink, shown = Wandb.__new__(Wandb), []
    sink.wandb, sink._log = SimpleNamespace(Html=str), lambda values, step: shown.append((values, step))
    sink.text("sample", "<img src=x>", 3)
    assert shown == [({"sample": "<pre>&lt;img src=x&gt;</pre>"}, 3)]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_and_its_resume_are_one_run_of_wandb_and_of_mlflow(tmp_path, corpus, monkeypatch, server, mlflow):
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("WANDB_ERROR_REPORTING", "false"),
    ):
        monkeypatch.setenv(name, value)
    keys = [
        "logging.sinks=[jsonl,wandb,mlflow,webhook]", f"logging.mlflow.tracking_uri={mlflow.url}", "+logging.mlflow.tags.team=a",
        "logging.wandb.mode=offline", "logging.wandb.group=trials", "logging.wandb.tags=[one,two]",
        "logging.wandb.artifacts=[config.yaml]", "hydra.run.dir=run", "logging.close_timeout_s=60",
    ]  # fmt: skip
    run = tunix.train([*SMALLEST, "data=text", f"data.paths=['{corpus}']", *keys]).folder
    assert "logging.sinks=" not in (run / "train.log").read_text()  # no sink failed
    ids = json.loads((run / "run_ids.json").read_text())
    tunix.train([f"resume={run}", "training.max_steps=3"])
    assert json.loads((run / "run_ids.json").read_text()) == ids

    run_id = ids["mlflow"]
    found = mlflow.ask("runs/get", run_id=run_id)["run"]
    assert (found["info"]["run_name"], found["info"]["status"]) == ("first", "FINISHED")
    experiment = mlflow.ask("experiments/get-by-name", experiment_name="demo")["experiment"]
    assert found["info"]["experiment_id"] == experiment["experiment_id"]
    params = {param["key"]: param["value"] for param in found["data"]["params"]}
    assert (params["model.num_layers"], params["training.max_steps"]) == ("1", "2")
    assert {"key": "team", "value": "a"} in found["data"]["tags"]
    losses = {line["step"]: line["loss"] for line in metrics(run)}
    assert mlflow.list_values(run_id, "train/loss") == losses
    assert sorted(mlflow.list_values(run_id, "held_out/bits_per_byte")) == [2, 3]
    folders = {file["path"] for file in mlflow.ask("artifacts/list", run_id=run_id)["files"]}
    assert folders >= {"config", "report", "sample"}
    (sample, *_) = mlflow.ask("artifacts/list", run_id=run_id, path="sample")["files"]
    assert mlflow.fetch("get-artifact", run_uuid=run_id, path=sample["path"])

    first, second = (read_wandb(folder) for folder in sorted((run / "wandb").glob("offline-run-*")))
    (info,) = [record.run for record in first if record.WhichOneof("record_type") == "run"]
    assert (info.run_id, info.project, info.run_group, list(info.tags)) == (
        ids["wandb"],
        "demo",
        "trials",
        ["one", "two"],
    )
    assert "model" in {item.key for item in info.config.update}
    logged = {}
    for record in first + second:
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        if "train/loss" in items:
            logged[items["_step"]] = items["train/loss"]
            assert items["step"] == items["_step"]
    assert logged == losses
    metrics_of_steps = {record.metric.glob_name: record.metric.step_metric for record in first}
    assert metrics_of_steps["*"] == "step"
    kinds = {record.WhichOneof("record_type") for record in first}
    assert "artifact" in kinds or any(record.request.WhichOneof("request_type") == "log_artifact" for record in first)

    starts, ends = server[0][::2], server[0][1::2]
    assert starts[0].startswith(f"demo / first starts: steps 0 to 2, {run} on ")
    assert starts[1].startswith("demo / first goes on: steps 2 to 3")
    assert ends[0].startswith(f"demo / first is done, step 2, train loss {losses[2]:.4f}, held_out loss ")


def test_wandb_has_one_run_and_all_of_its_steps(tmp_path, monkeypatch):
    """W&B drops what comes for a step before its newest. A server that answers too late has begun the run already."""
    rows, ids = [], []

    class Run:
        starting_step = 11  # W&B has steps 0 to 10 of this run
        define_metric = finish = lambda *_, **__: None

        def log(self, values, step):
            rows.append((step, values.pop("step"), *values.values()))

    def init(*, id, **_):
        ids.append(id)
        if len(ids) == 1:
            raise TimeoutError
        return Run()

    stub = SimpleNamespace(
        init=init, Settings=lambda **_: None, Html=len, Table=lambda columns, data: (*columns, *data)
    )
    monkeypatch.setitem(sys.modules, "wandb", stub)
    start = replace(start_of(tmp_path), step=5)
    with pytest.raises(TimeoutError):
        Wandb(start)
    sink = Wandb(start)
    assert ids[0] == ids[1]
    sink.text("config", "", 5)
    sink.write({"step": 6, "loss": 2.5}, "train")
    # Answers that are drawn ahead come before the line of the step before; an episode that failed has a key more.
    sink.table("samples", [{"answer": "a", "problem": "slow"}, {"answer": "b", "tokens": [1]}], "", 8)
    sink.write({"step": 7, "loss": 1.5}, "train")
    sink.write({"step": 8, "loss": 1.0}, "train")
    table = "answer", "problem", ["a", "slow"], ["b", None]
    assert [row[1:] for row in rows] == [(5, 11), (6, 2.5), (8, table), (7, 1.5), (8, 1.0)]
    steps = [row[0] for row in rows]
    assert steps == sorted({*steps})
    assert steps[0] >= 11


def test_a_file_that_a_kill_has_left_half_made_is_named(tmp_path, monkeypatch):
    def open_file(**_) -> None:
        raise ValueError("(sqlite3.OperationalError) duplicate column name: step")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=open_file))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Param=None))
    with pytest.raises(RuntimeError, match="^sqlite:///a.db was left half made, by a kill .*; remove it$"):
        Mlflow(start_of(tmp_path, "logging.mlflow.tracking_uri=sqlite:///a.db"))


def test_a_number_that_mlflow_refuses_holds_back_no_other_one(monkeypatch, caplog):
    pytest.importorskip("mlflow")
    from mlflow import MlflowException
    from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

    kept = []

    def log_batch(run_id: str, metrics: list) -> None:
        if bad := [metric.key for metric in metrics if "//" in metric.key]:
            raise MlflowException(f"Invalid value {bad[0]}", error_code=INVALID_PARAMETER_VALUE)
        kept.extend((metric.key, metric.step) for metric in metrics)

    sink = Mlflow.__new__(Mlflow)
    sink.client, sink.run_id = SimpleNamespace(log_batch=log_batch), "a"
    sink.waiting, sink.refused, sink.sent = {}, set(), time.monotonic()
    for step in range(1, 6):
        sink.write({"step": step, "loss": 1.0, "reward_a//b": 1.0, "reward": 1.0}, "train")
    sink._send()
    assert sorted(kept) == sorted((key, step) for key in ("train/loss", "train/reward") for step in range(1, 6))
    assert caplog.text.count("train/reward_a//b is left out: ") == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_gets_every_number(tmp_path, mlflow, monkeypatch, caplog):
    monkeypatch.setattr("tunix.run.remote_sinks.FLUSH_S", 0.0)
    monkeypatch.setattr("tunix.run.sinks.DELAYS_S", (0.05,) * 1000)
    door = Door(mlflow)
    start = start_of(tmp_path, f"logging.mlflow.tracking_uri={door.url}", "logging.mlflow.experiment=outage")
    sink = open_sink("mlflow", start)
    sink.write({"step": 1, "loss": 1.0}, "train")
    sink.write({"step": 1, "loss": 2.0}, "sets/wiki+de")  # a name that the server refuses as it is, and all with it

    wait_until((tmp_path / "run_ids.json").exists, "the run")
    run_id = json.loads((tmp_path / "run_ids.json").read_text())["mlflow"]
    wait_until(lambda: mlflow.list_values(run_id, "train/loss") == {1: 1.0}, "the first number")
    door.shut()
    for step in range(2, 200):  # the caller goes on without a server
        sink.write({"step": step, "loss": float(step)}, "train")
    wait_until(lambda: sink.failures > 3, "the outage")
    assert mlflow.list_values(run_id, "train/loss") == {1: 1.0}
    door.open()
    sink.close(None)
    sink.wait(time.monotonic() + 120)
    door.shut()
    assert mlflow.list_values(run_id, "train/loss") == {step: float(step) for step in range(1, 200)}
    assert mlflow.list_values(run_id, "sets/wiki_de/loss") == {1: 2.0}
    assert mlflow.ask("runs/get", run_id=run_id)["run"]["info"]["status"] == "FINISHED"
    assert caplog.text.count("logging.sinks=mlflow fails: ") == 1  # said once, counted at the end
    assert "failures; 0 calls are lost" in caplog.text


def test_a_message_says_how_a_run_failed_and_is_sent_again(tmp_path, server, monkeypatch, caplog):
    monkeypatch.setattr("tunix.run.sinks.DELAYS_S", (0.001,) * 3)
    texts, statuses = server
    statuses += [500, 200, 503]  # the second try of each message comes through
    sink = open_sink("webhook", start_of(tmp_path))
    sink.write({"step": 4, "loss": 2.5}, "train")
    sink.close(Diverged("the loss is gone"))
    sink.wait(time.monotonic() + 60)
    assert texts[1] == "demo / first FAILED (Diverged: the loss is gone), step 4, train loss 2.5000, after 0:00:00"
    assert len(texts) == 2
    assert "logging.sinks=webhook fails: HTTPError: HTTP Error 500" in caplog.text
    assert "logging.sinks=webhook: 2 failures; 0 calls are lost" in caplog.text


def test_a_message_says_that_a_run_failed_for_another_sink(tmp_path, server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        start = start_of(tmp_path, f"logging.prometheus.port={taken.getsockname()[1]}")
        with pytest.raises(UserError, match="cannot be listened on"):
            Metrics(["webhook", "prometheus"], start)
    starts, ends = server[0]
    assert starts.startswith("demo / first starts: ")
    assert ends.startswith("demo / first FAILED (UserError: logging.prometheus.port=")


def test_a_message_is_not_lost_behind_a_redirect_or_an_endless_head(tmp_path, server, monkeypatch, caplog):
    monkeypatch.setattr("tunix.run.sinks.DELAYS_S", (0.001,) * 3)
    monkeypatch.setattr("tunix.run.remote_sinks.TIMEOUT_S", 0.3)
    texts, statuses = server
    statuses += [302, 302, ENDLESS]
    sink = open_sink("webhook", start_of(tmp_path))
    sink.close(None)
    sink.wait(time.monotonic() + 20)
    assert [text.partition(":")[0] for text in texts] == [
        "demo / first starts",
        "demo / first is done, no step, after 0",
    ]
    assert "logging.sinks=webhook fails: HTTPError: HTTP Error 302" in caplog.text
    assert "logging.sinks=webhook: 3 failures; 0 calls are lost" in caplog.text


class Slow:
    """A sink that waits for somebody who does not come."""

    waits, came = threading.Event(), threading.Event()

    def __init__(self, start):
        pass

    def write(self, record, group):
        self.waits.set()
        self.came.wait()

    def close(self, error):
        pass


def test_a_sink_that_hangs_delays_nothing_and_ends_in_time(tmp_path, caplog, monkeypatch):
    for name in ("ends_with_leave", "still_works"):
        monkeypatch.setattr(exits, name, threading.Event())
    exits.ends_with_leave.set()
    metrics = Metrics([], start_of(tmp_path))
    metrics.sinks = [sink := Background("slow", Slow, start_of(tmp_path))]
    for step in range(1000):  # the caller goes on although the first call never comes back
        sink.write({"step": step}, "train")
    sink.close(None)
    assert Slow.waits.wait(60)
    metrics._wait(0.0)
    assert "logging.sinks=slow: 0 failures; 1001 calls are lost" in caplog.text  # also the one that is at work
    assert exits.still_works.is_set()  # the command ends without the hooks of its library (`exits.leave`)
    Slow.came.set()
    sink.thread.join(60)


def test_what_is_missing_is_named_before_the_run(tmp_path, monkeypatch):
    def try_out(*words: str) -> None:
        cfg = compose([*words]).config
        cfg.logging.try_out(cfg.model_dump(mode="json"))

    def refused(*words: str) -> str:
        with pytest.raises(UserError) as error:
            try_out(f"logging.sinks=[{words[0]}]", *words[1:])
        return str(error.value)

    for name in ("TUNIX_WEBHOOK_URL", "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert "webhook needs an address: set the environment variable TUNIX_WEBHOOK_URL" in refused("webhook")
    assert "begins with ftp://a.; it must be" in refused("webhook", "logging.webhook.url=ftp://a.b")
    monkeypatch.setattr("tunix.run.remote_sinks.find_spec", lambda name: True)
    assert "there is no key for api.wandb.ai: run `wandb login` once, or set WANDB_API_KEY" in refused("wandb")
    assert "mlflow needs an address: set logging.mlflow.tracking_uri=http://HOST:5000, or" in refused("mlflow")
    address = "logging.mlflow.tracking_uri='localhost:5000'"
    assert "is localhost:5000; a server is http://localhost:5000" in refused("mlflow", address)
    folder = "logging.mlflow.tracking_uri=./mlruns"
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    assert "is ./mlruns, and this MLflow writes into no folders" in refused("mlflow", folder)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    try_out("logging.sinks=[mlflow]", folder)
    monkeypatch.setattr("tunix.run.remote_sinks.find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        assert f"needs the package {name}: pip install 'tunix-trainer[{name}]'" in refused(name)
