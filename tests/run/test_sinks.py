"""Numbers go to the sinks that the config names; a new sink is one entry of a table."""

import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from PIL import Image
from support.harness import ONE_LAYER, RUN
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

import tunix
from tunix.base.errors import UserError
from tunix.config.batch import BatchShape
from tunix.config.compose import compose
from tunix.processes.watchdog import Pace, Watchdog
from tunix.run.goodput import Goodput
from tunix.run.metrics import Metrics, StartedStep, StepLog, make_record
from tunix.run.remote_sinks import keep_id, read_id
from tunix.run.sinks import TensorBoard, Terminal
from tunix.run.table import SINKS, Start
from tunix.training.step import NORMS


@pytest.fixture
def words(tmp_path, corpus, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    one = ["model.mesh_shape=[[1],[fsdp]]", "distributed.allow_idle_devices=true"]
    # At a constant rate the step does not know the length of the run: a longer one shares its compiled program.
    return [*RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']", *one, "scheduler=constant", "hydra.run.dir=run"]


class Memory:
    """Keeps everything in lists of the class."""

    def __init__(self, start):
        self.start, self.records, self.texts, self.ends = start, [], [], []
        Memory.last = self

    def write(self, record, group):
        self.records.append((group, record))

    def text(self, name, text, step):
        self.texts.append(name)

    def image(self, name, png, step):
        raise AssertionError("nothing was traced")

    def close(self, error):
        self.ends.append(error)


@pytest.mark.nightly
def test_a_new_sink_gets_every_line_and_is_told_how_the_run_ends(words, monkeypatch):
    monkeypatch.setitem(SINKS, "memory", Memory)
    tunix.train([*words, "logging.sinks=[jsonl,memory]", "evaluation.sample_tokens=2"])
    sink, lines = Memory.last, [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [record for _, record in sink.records] == lines
    assert [group for group, _ in sink.records].count("held_out") == 2
    assert sink.texts == ["config", "report", "sample"]
    assert (sink.start.step, sink.start.last_step, sink.start.config["model"]["num_layers"]) == (0, 6, 1)
    assert sink.ends == [None]
    tunix.train(["resume=run", "training.max_steps=7"])
    assert (Memory.last.start.step, Memory.last.start.last_step) == (6, 7)

    def fail(self, state, position, *args):
        raise RuntimeError("the disk caught fire")

    monkeypatch.setattr("tunix.checkpoints.checkpoint.Checkpoints.save", fail)
    with pytest.raises(RuntimeError, match="caught fire"):
        tunix.train(["resume=run", "training.max_steps=8"])
    assert [str(error) for error in Memory.last.ends] == ["the disk caught fire"]


def test_sinks_in_the_background_are_told_that_a_run_hangs(tmp_path, monkeypatch):
    monkeypatch.setitem(SINKS, "memory", Memory)
    monkeypatch.setattr(Memory, "in_background", True, raising=False)
    monkeypatch.setattr("os._exit", lambda code: None)
    config = compose([]).config
    dog, metrics = Watchdog(config.distributed), Metrics(["memory"], Start(tmp_path, config.model_dump(), 0, 10))
    dog.tell = metrics.abandon
    dog._end(76, "step 7 has taken 60 s")
    assert [(end.code, str(end)) for end in Memory.last.ends] == [(76, "step 7 has taken 60 s")]


def test_only_what_is_named_is_written(words):
    tunix.train([*words, "logging.sinks=[]", "training.max_steps=1"])
    assert not list(Path("run").glob("events.*"))
    assert not Path("run/metrics.jsonl").exists()
    assert "step 1/1" in Path("run/train.log").read_text()  # the console is always there


def test_a_sink_that_does_not_exist_is_named():
    with pytest.raises(
        UserError, match=r"logging.sinks.0=tensorbord: expected one of jsonl, tensorboard.*did you mean"
    ):
        compose(["logging.sinks=[tensorbord]"])


def test_the_old_key_is_answered_with_its_new_form(tmp_path):
    with pytest.raises(UserError, match=r"^logging.tensorboard is gone: logging.sinks=\[jsonl,tensorboard\] names"):
        compose(["logging.tensorboard=false"])


@pytest.mark.parametrize(("flag", "sinks"), [("true", ("jsonl", "tensorboard")), ("false", ("jsonl",))])
def test_a_saved_config_with_the_old_key_is_understood(flag, sinks, tmp_path):
    tree = compose([]).config.model_dump(mode="json", by_alias=True)
    tree["logging"] = {"every_steps": 1, "tensorboard": flag == "true"}
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    assert compose([f"resume={tmp_path}"]).config.logging.sinks == sinks
    assert compose([f"resume={tmp_path}", "logging.sinks=[jsonl]"]).config.logging.sinks == ("jsonl",)


def test_a_run_whose_folder_is_full_saves_its_steps_elsewhere(words):
    """The numbers of a run fill a disk first; what is still in a buffer does not hide the message."""
    Path("run").mkdir()
    Path("run/metrics.jsonl").symlink_to("/dev/full")
    message = "^the run's folder cannot be written: No space left on device; make room. Saved after step 1; go on with"
    with pytest.raises(UserError, match=message):
        tunix.train([*words, "checkpoint.folder=elsewhere"])
    assert Path("elsewhere/checkpoints/1").is_dir()


def test_events_are_refused_by_the_call_that_writes_them(tmp_path, monkeypatch):
    """And not in a thread, which shows a traceback."""
    asked: list[str] = []
    monkeypatch.setattr("tunix.processes.watchdog.request_stop", lambda reason, fails: asked.append(reason))
    metrics = Metrics(["tensorboard"], Start(tmp_path, compose([]).config.model_dump(mode="json"), 0, 10))
    (file,) = tmp_path.glob("events.*")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, usual[1]))
    try:
        metrics.write({"step": 1, "loss": 1.0})
        assert len(asked) == 1
        with pytest.raises(UserError, match="^the run's folder cannot be written: File too large"):
            metrics.__exit__(None, None, None)  # the last step has no other that ends the run
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


@pytest.mark.parametrize("set_back_s", [0, 3600], ids=["", "by a clock that is an hour behind"])
def test_tensorboard_shows_a_step_that_is_trained_again_once(set_back_s, tmp_path, monkeypatch):
    config, clock = compose([]).config.model_dump(mode="json"), time.time_ns
    for first, scale in ((1, 1.0), (3, 10.0)):  # the second start goes on after step 2
        if first > 1:
            monkeypatch.setattr(time, "time_ns", lambda: clock() - set_back_s * 10**9)
        with Metrics(["tensorboard"], Start(tmp_path, config, first - 1, 4)) as metrics:
            for step in range(first, 5):
                metrics.write({"step": step, "split": "held_out", "loss": scale * step}, "held_out")
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("held_out/loss")
    assert [(event.step, event.value) for event in shown] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_tensorboard_fetches_nothing_that_a_text_names(tmp_path):
    """It reads texts as Markdown, in which each kind of end of a line begins another."""
    text = "".join(
        f"{end}{end}![x](http://stranger/x.png)" for end in ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028")
    )
    sink = TensorBoard(Start(tmp_path, {}, 0, 1))
    sink.text("sample", text, 1)
    sink.close(None)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("sample")
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert (shown.count("http://stranger"), shown.count("<img"), shown.count("<code>")) == (8, 0, 1)


def test_an_image_of_tensorboard_has_its_sizes(tmp_path):
    png = BytesIO()
    Image.new("RGB", (5, 3)).save(png, "PNG")
    sink = TensorBoard(Start(tmp_path, {}, 0, 1))
    sink.image("seen", png.getvalue(), 1)
    sink.close(None)
    (event,) = EventAccumulator(str(tmp_path)).Reload().Images("seen")
    assert (event.width, event.height, event.encoded_image_string) == (5, 3, png.getvalue())


def test_events_of_a_start_stand_behind_all_that_are_there(tmp_path):
    (tmp_path / "events.out.tfevents.9000000000.zzz.99999.999999999").touch()  # of a host whose clock is ahead
    TensorBoard(Start(tmp_path, {}, 0, 1)).close(None)
    assert len({*tmp_path.iterdir()}) == 2
    assert max(tmp_path.iterdir()).name.startswith("events.out.tfevents.9000000001.")


@pytest.mark.parametrize(("begin", "steps"), [(0, [1, 3, 5]), (1, [2, 3, 5]), (4, [5])])
def test_the_first_and_the_last_step_have_a_line_too(caplog, begin, steps):
    """A run whose steps take a minute said nothing for ten minutes."""
    caplog.set_level("INFO")
    sink = Terminal(Start(Path(), {"logging": {"every_steps": 3}}, begin, 5))
    for step in range(begin + 1, 6):
        numbers = {
            "loss": 2.0,
            "tokens_per_s": 100.0,
            "mfu": None,
            "step_time_s": 0.5,
            "grad_norm": 1.0,
            "learning_rate": 0.1,
        }
        sink.write({"step": step, **numbers}, "train")
    assert [each.message.split("  ")[0] for each in caplog.records] == [f"step {step}/5" for step in steps]


def test_ids_of_sinks_in_several_threads(tmp_path):
    names = [f"sink{number}" for number in range(16)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: keep_id(tmp_path, name, f"id of {name}"), names))
    assert {name: read_id(tmp_path, name) for name in names} == {name: f"id of {name}" for name in names}
    (tmp_path / "run_ids.json").write_text("[]")
    with pytest.raises(UserError, match="run_ids.json is not a JSON object"):
        read_id(tmp_path, "wandb")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    start = Start(tmp_path, compose([]).config.model_dump(mode="json"), 0, 10)
    with Metrics(["jsonl"], start) as metrics:
        metrics.write({"step": 1, "split": "held_out", "loss": float("nan"), "perplexity": float("inf")}, "held_out")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "split": "held_out", "loss": None, "perplexity": None}


def test_a_loss_may_not_report_a_number_of_the_batch():
    """The reward of a rollout stood in the place of the loss's own number."""
    sizes: Any = None  # not read before
    with pytest.raises(UserError, match="task.loss: its sums have reward, which the line of step 2 has already"):
        make_record(StartedStep(2, {}, {"reward": 0.25}), {"loss": 1.0, "reward": 7.0}, 1.0, sizes, None)


def test_the_speed_of_a_step_is_that_of_the_rows_in_use():
    """On all devices together; MFU compares one of them with its peak."""
    schedule = SimpleNamespace(at=lambda step: SimpleNamespace(shape=BatchShape(2, 4, 10)))
    sizes: Any = SimpleNamespace(schedule=schedule, flops_by_length={10: 1e12}, num_devices=4)
    names = ("tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu")
    for numbers, expected in (({}, (40, 10, 10, 0.5)), ({"rows_used": 4}, (20, 5, 5, 0.25))):
        line = make_record(StartedStep(3, {}, numbers), {"loss": float("nan"), "skipped": 1.0}, 2.0, sizes, 20.0)
        assert tuple(line[name] for name in names) == expected
        assert (line["loss"], line["skipped"]) == (None, 1)


def test_the_line_of_a_step_comes_while_the_next_one_runs(monkeypatch):
    """Its time is that from line to line, less what the loop did beside steps. Norms of layers have steps of their own."""
    lines, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr("tunix.run.metrics.time.perf_counter", lambda: clock.now)
    schedule = SimpleNamespace(at=lambda step: SimpleNamespace(shape=BatchShape(2, 4, 10)))
    sizes: Any = SimpleNamespace(schedule=schedule, flops_by_length={10: 1e12}, num_devices=4)
    metrics: Any = SimpleNamespace(write=lines.append)
    step_log = StepLog(metrics, sizes, None, lambda step: range(step), 2, Pace(), Goodput(0.0), clock=0.0)
    for step in (1, 2, 3):
        clock.now += 5
        scalars = {"loss": jnp.float32(step), "expert_load": jnp.array([0.5, 1.5]), NORMS: {"norm": jnp.float32(9)}}
        step_log.record_start(step, scalars | {"skipped": jnp.int32(0)}, {"data_wait_s": 0.0})
        assert len(lines) == step - 1
        if step == 2:
            clock.now += 1
            with step_log.pause():  # writes step 2
                assert len(lines) == 2
                clock.now += 100
    step_log.finish()
    assert [line["step_time_s"] for line in lines] == [10, 1, 5]
    assert [(line["loss"], line["expert_load/1"], line.get("norm")) for line in lines] == [
        (1, 1.5, None), (2, 1.5, 9), (3, 1.5, None)
    ]  # fmt: skip
