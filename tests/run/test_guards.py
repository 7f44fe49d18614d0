"""Guards of a whole run: spikes are named, their data are left out by one key, and a run ends when it learns no more."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM, getsignal
from types import SimpleNamespace

import pytest
from support.harness import ONE_LAYER, RUN, metrics

import tunix
from tunix import trainer
from tunix.base.errors import Diverged, RolloutFailed, Stopped, UserError
from tunix.checkpoints.checkpoint import Improvement
from tunix.checkpoints.store import find_parts, find_storage, read_about
from tunix.config.compose import compose
from tunix.data.batches import TrainBatches
from tunix.processes import watchdog
from tunix.run.early_stopping import (
    Moment,
    check_failure,
    check_hard_stop,
    check_patience,
    check_skipped_steps,
    check_spikes,
    find_ending,
    list_unreached,
)
from tunix.run.metrics import remark_on_skipped

SMALLEST = [
    *RUN, "model.mesh_shape=[[2],[fsdp]]", "distributed.allow_idle_devices=true", *ONE_LAYER,
    "training.micro_batch_size=2", "evaluation.every_steps=null",
]  # fmt: skip


@pytest.fixture
def garbage(monkeypatch):
    """Samples 32 to 35, those of step 9, have a target that no other sample has."""
    read = TrainBatches.read

    def spoiled(self, first_sample):
        batch = read(self, first_sample)
        return batch | {"targets": batch["targets"] * 0 + 319} if first_sample == 32 else batch

    monkeypatch.setattr(TrainBatches, "read", spoiled)


@pytest.fixture
def words(tmp_path, corpus, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*SMALLEST, "data=text", f"data.paths=['{corpus}']", "hydra.run.dir=run"]


def test_a_step_without_learnt_tokens_after_a_spike():
    """The number of spikes in a row stays, and no deviation is known."""
    record = {"step": 6, "loss": None, "grad_norm": 0.0, "skipped": 0, "spikes": 1}
    record |= {"loss_deviations": None, "grad_norm_deviations": None}
    reason = remark_on_skipped(record, range(20, 24))
    assert reason == "step 6 changed no weight: its batch has no token that is learnt; its samples are 20 to 23"


def test_a_stop_signal_has_its_usual_effect_until_the_run_has_a_folder(words, monkeypatch):
    """It ends the command at once: data that are tokenized for hours have no step to wait for."""
    handlers = [getsignal(SIGTERM)]

    load = trainer.load_data

    def note_and_load(cfg):
        handlers.append(getsignal(SIGTERM))
        return load(cfg)

    def note_and_refuse(job):
        handlers.append(getsignal(SIGTERM))
        raise UserError("no folder")

    monkeypatch.setattr(trainer, "load_data", note_and_load)
    monkeypatch.setattr(trainer, "open_folder", note_and_refuse)
    with pytest.raises(UserError, match="no folder"):
        tunix.train(words)
    usual, preparing, running = handlers
    assert preparing == usual != running
    assert getsignal(SIGTERM) == usual


@pytest.mark.parametrize("signal", [None, "SIGTERM", "SIGTERM while it is evaluated"])
def test_a_hard_stop_comes_after_the_evaluation_of_its_step(signal, monkeypatch):
    """A resumed run is past that step. A signal ends the run without the evaluation, and ends held-out answers that are
    being drawn: there may be no time for them.

    The run that goes on makes up for it once, also where only `evaluation.sets` are measured.
    """
    happened, signals = [], ["SIGTERM"] if signal == "SIGTERM" else []

    def evaluate(step):
        happened.append("evaluation")
        if signal and not signals:
            signals.append("SIGTERM")
            raise Stopped("SIGTERM: given up while held-out prompts were answered")

    for name in ("save", "write_goodput"):
        monkeypatch.setattr(trainer.Loop, name, lambda *_, name=name: happened.append(name))
    monkeypatch.setattr("tunix.processes.watchdog.stop_requested", lambda: signals[0] if signals else None)
    cfg = compose(["training.hard_stop=4", "training.max_steps=8", "evaluation.every_steps=2"]).config
    parts = dict.fromkeys(trainer.Loop.__dataclass_fields__) | {
        "setup": SimpleNamespace(cfg=cfg),
        "folder": Path("run"),
        "start_time": 0.0,
        "progress": SimpleNamespace(
            last=8, improvement=Improvement(), is_new=False, failure=None, start=SimpleNamespace(step=4)
        ),
        "source": SimpleNamespace(can_stop=lambda _: True, after=lambda _, waits=True: None),
        "step_log": SimpleNamespace(
            finish=lambda: None, restart_clock=lambda: None, leave_out=lambda begin: None, last={}
        ),
        "compiled": SimpleNamespace(at=lambda _: None),
        "evaluations": SimpleNamespace(run=evaluate, cost=lambda _: 1.0),
        "checkpoints": SimpleNamespace(
            store=SimpleNamespace(finish=lambda: None, add_loss=lambda step, loss: happened.append((step, loss)))
        ),
        "watchdog": SimpleNamespace(phase=lambda _: nullcontext()),
        "goodput": SimpleNamespace(count=lambda _: nullcontext(), end_start=lambda: None),
    }
    said = "SIGTERM: saved after step 4" if signal else "training.hard_stop=4: saved"
    with pytest.raises(Stopped, match=said):
        trainer.Loop(**parts)._is_over(4)
    assert happened == [*([] if signal == "SIGTERM" else ["evaluation"]), "save", "write_goodput"]
    assert parts["progress"].improvement.is_due == bool(signal)
    happened.clear()
    trainer.Loop(**parts).begin(trainer.StartClock())
    assert happened == [*(["evaluation", (4, 1.0)] if signal else []), "write_goodput"]
    assert not parts["progress"].improvement.is_due


def test_no_rollout_is_drawn_behind_a_stop(monkeypatch):
    """Its answers would stand in samples.jsonl, and `resume` would draw them again: none is begun behind
    training.hard_stop, and behind training.time_limit_s a source hears of the stop, also while it draws answers: that
    may take an hour. The first ones are drawn: each start makes a step.
    """
    clock, heard = [0.0], []

    def draw(_: dict) -> tuple[dict, None]:
        heard.append(watchdog.stop_requested())
        clock[0] += 60.0
        heard.append(watchdog.stop_requested())
        return {}, None

    monkeypatch.setattr(trainer.Loop, "_is_over", lambda _, step: step == 5)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    cfg = compose(["training.hard_stop=5", "training.max_steps=8", "training.time_limit_s=100"]).config
    parts = dict.fromkeys(trainer.Loop.__dataclass_fields__) | {
        "setup": SimpleNamespace(cfg=cfg, compiler=SimpleNamespace()),
        "start_time": 0.0,
        "progress": SimpleNamespace(last=8, failure=None, start=SimpleNamespace(step=2), state={}),
        "source": SimpleNamespace(phase="", waits_for_state=False, next=draw),
        "step_log": SimpleNamespace(record_start=lambda *_: None),
        "compiled": SimpleNamespace(changes=(), is_ready=lambda *_: True, for_batch=lambda *_: lambda *old: old),
        "watchdog": SimpleNamespace(phase=lambda _: nullcontext(), step=lambda _: None),
        "trace": SimpleNamespace(edges=()),
    }
    reason = "training.time_limit_s=100"
    watchdog.forget_requests()
    assert trainer.Loop(**parts).run() == 5
    assert heard == [None, None, None, reason, reason, reason]  # of steps 3, 4 and 5
    watchdog.forget_requests()


def numbers(folder: Path) -> list[dict]:
    """Lines of training without what depends on time."""
    return [
        {name: line[name] for name in ("step", "loss", "grad_norm", "tokens", *(n for n in line if "spikes" in n or "deviations" in n))}
        for line in metrics(folder)
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_spike_is_named_and_its_data_are_left_out_by_one_key(words, garbage):
    guard = ["training.spike_deviations=25", "training.spike_window=4"]
    norms = "logging.layer_norms_every=5"
    run = tunix.train([*words, *guard, norms, "training.max_steps=10", "checkpoint.save_every_steps=8"]).folder
    with_norms = [
        line["step"]
        for line in metrics(run)
        if {"gradient/blocks.attention.q.w/0", "change/embedding.table"} <= line.keys()
    ]
    assert with_norms == [5, 10]
    assert [line["spikes"] for line in numbers(run)] == [0] * 8 + [1, 0]
    assert [line["loss_deviations"] is None for line in numbers(run)][:4] == [True, True, False, False]
    log = (run / "train.log").read_text()
    assert "step 9 changed no weight: a spike: loss " in log
    assert "standard deviations above the steps before; its samples are 32 to 35" in log
    assert find_parts(*find_storage(run / "checkpoints" / "8"))["spike_window"] == 4

    shutil.copytree(run, "again", symlinks=True)  # the window is in the checkpoint: a resumed run has the same digits
    shutil.rmtree("again/checkpoints/10")
    tunix.train(["resume=again"])
    assert numbers(Path("again"))[10:] == numbers(run)[8:]

    shutil.copytree(run, "strict", symlinks=True)
    with pytest.raises(
        Diverged, match=r"1 spikes in a row \(training.max_spikes=0\), to step 9: .*training.skip_steps=\[9:9\] goes on"
    ):
        tunix.train(["resume=strict/checkpoints/8", "training.max_spikes=0", "training.max_steps=12"])

    with pytest.raises(
        UserError, match=r"training.skip_steps=9:12 begins before step 11.*before step 9 .*skip_steps=\[11:12\]"
    ):
        tunix.train([f"resume={run}", "training.skip_steps=[9:12]", "training.max_steps=12"])
    tunix.train([f"resume={run}/checkpoints/8", "training.skip_steps=[9:9]"])
    again = numbers(run)[10:]
    assert [line["spikes"] for line in again] == [0, 0]
    assert [line["tokens"] for line in again] == [9 * 128, 10 * 128]  # what was left out does not count
    position = read_about(*find_storage((run / "checkpoints" / "10").absolute()))["position"]
    assert (position["next_sample"], position["left_out"]) == (44, [[32, 36]])
    assert "data of 1 steps: 9 to 9" in (run / "train.log").read_text()


@pytest.mark.parametrize(
    ("task", "best", "said"),
    [
        ("grpo", -0.25, "reward did not rise above 0.2500"), ("pretrain", 0.5, "loss did not fall below 0.5000"),
        ("pretrain", None, "loss was no number"), ("grpo", None, "reward was no number"),
    ],
)  # fmt: skip
def test_the_end_of_patience_names_the_number_that_counts(task, best, said):
    cfg = compose([f"task={task}", "evaluation.patience=2", "sampling.max_new_tokens=8"]).config
    source = SimpleNamespace(can_stop=lambda step: True)
    ending = check_patience(SimpleNamespace(cfg=cfg, improvement=Improvement(best, 2), source=source, step=3))
    assert f"evaluation.patience=2: the held-out {said} in 2 evaluations" in str(ending)


@pytest.mark.parametrize(
    ("words", "has_held_out", "remarks"),
    [
        ("training.hard_stop=6 checkpoint.save_at_steps=[2,6] evaluation.patience=2", True, []),
        ("training.hard_stop=7", True, ["training.hard_stop=7 does nothing: the last step of the run is 6"]),
        ("checkpoint.save_at_steps=[2,9]", True, ["checkpoint.save_at_steps=9 does nothing: the last step of the run is 6"]),
        ("evaluation.patience=2", False, ["evaluation.patience=2 never ends this run: nothing is held out"]),
        ("evaluation.patience=2 evaluation.every_steps=null", True, ["evaluation.patience=2 never ends this run: evaluation.every_steps=null"]),
    ],
)  # fmt: skip
def test_an_end_that_a_run_never_comes_to_is_said(words, has_held_out, remarks):
    assert list_unreached(compose(words.split()).config, 6, has_held_out) == remarks


def test_what_counts_as_an_improvement():
    """A cost that is lower by more than evaluation.min_improvement; a number that is none is none."""
    keys = compose(["evaluation.min_improvement=0.25", "evaluation.patience=2"]).config.evaluation
    found, without = Improvement(), []
    for cost in (1.0, 0.75, float("nan"), 0.625, 0.5):
        found = found.after(cost, keys)
        without.append((found.best, found.without, found.is_over(keys)))
    assert without == [(1.0, 0, False), (1.0, 1, False), (1.0, 2, True), (0.625, 0, False), (0.625, 1, False)]
    assert Improvement(float("nan"), 1).after(2.0, keys) == Improvement(2.0)  # as earlier versions may have saved it


def test_a_run_ends_behind_as_many_spikes_as_it_allows():
    """The message has the steps to leave out; what ends the run as a failure comes before a stop that saves."""
    cfg = compose(["training.max_spikes=1"]).config

    def find(spikes, *reasons):
        source = SimpleNamespace(can_stop=lambda step: True)
        moment = Moment(cfg, Path("run"), 8, {"step": 7, "spikes": spikes}, Improvement(), source)
        return find_ending(moment, [*reasons, check_spikes])

    assert find(1) is None
    assert "training.skip_steps=[6:7] goes on" in str(find(2))
    assert isinstance(find(2, lambda _: Stopped("saved")), Diverged)


def test_a_run_ends_behind_more_skipped_steps_than_it_allows():
    """The parameters are those before the first of them."""
    cfg = compose(["training.max_skipped_steps=2"]).config
    source = SimpleNamespace(samples=lambda step: range(4 * step, 4 * step + 4))
    ends = [
        check_skipped_steps(Moment(cfg, Path("run"), 8, {"step": 7, "skipped": row}, Improvement(), source))
        for row in (0, 2, 3)
    ]
    assert ends[:2] == [None, None]
    assert "in 3 steps in a row" in str(ends[2])
    assert "step 7 had samples 28 to 31. The parameters are those of step 4" in str(ends[2])


def test_a_run_that_is_resumed_is_past_its_hard_stop():
    cfg = compose(["training.hard_stop=8"]).config
    ends = [check_hard_stop(Moment(cfg, Path("run"), step, {}, Improvement(), None)) for step in (7, 8, 9)]
    assert [end and str(end) for end in ends] == [None, "training.hard_stop=8: saved; go on with resume=run", None]


@pytest.mark.parametrize("check", [check_failure, check_patience])
def test_within_a_rollout_no_run_ends(check):
    """The answers that are under way are not saved."""
    cfg, failure = compose(["evaluation.patience=2"]).config, RolloutFailed("the judge is away")
    for can_stop in (False, True):
        source = SimpleNamespace(can_stop=lambda step, can_stop=can_stop: can_stop)
        found = check(Moment(cfg, Path("run"), 8, {}, Improvement(0.5, 2), source, failure))
        assert (found is not None) == can_stop


@pytest.mark.nightly
def test_a_run_ends_when_the_held_out_loss_stays(words):
    keys = ["evaluation.every_steps=1", "evaluation.patience=2", "evaluation.min_improvement=100"]
    result = tunix.train([*words, *keys])
    assert (result.train["step"], result.held_out["step"]) == (3, 3)
    assert "evaluation.patience=2: the held-out loss did not fall below " in (result.folder / "train.log").read_text()
    saved = read_about(*find_storage((result.folder / "checkpoints" / "3").absolute()))["improvement"]
    assert saved == {"best": metrics(result.folder, "held_out")[0]["loss"], "without": 2, "is_due": False}
    again = tunix.train([f"resume={result.folder}"])
    assert again.train == {}
    assert "nothing is left to train after step 3: evaluation.patience=2" in (result.folder / "train.log").read_text()
    more = ["evaluation.patience=3", "training.spike_deviations=9"]  # a guard may begin with a resume
    assert tunix.train([f"resume={result.folder}", *more]).train["step"] == 4
    assert "has no window of 128 steps for spikes: it starts empty" in (result.folder / "train.log").read_text()
    assert metrics(Path("run"), "held_out")[-1]["step"] == 4
