"""Stages of the batch: sizes that change within a run, on the same data, exact after resume and on another mesh."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.test_packing import batches, sequences
from support.harness import ONE_LAYER, ROOT, RUN, SMALL, metrics

import tunix
from tunix.base.errors import UserError
from tunix.checkpoints.store import find_storage, read_about
from tunix.config import Config
from tunix.config.compose import build, compose
from tunix.costs.devices import read_topology
from tunix.data.batches import (
    BEGINNING,
    DataSchedule,
    Position,
    PrefetchReader,
    make_data_schedule,
    schedule_after,
    split_rows,
)
from tunix.plan.ranking import rank
from tunix.plan.report import format_text
from tunix.processes.watchdog import Watchdog
from tunix.run.trace import check_window
from tunix.sharding.table import axis_names
from tunix.training.optimizer import count_phase_steps
from tunix.training.train_spec import last_step

FOUR = dict.fromkeys(axis_names(), 1) | {"fsdp": 4}
ONE = dict.fromkeys(axis_names(), 1)
# 4 samples of 32 tokens for 3 steps, 8 samples until 1,000 tokens, then 16.
STAGES = [
    *ONE_LAYER, "training.global_batch_size=16", "training.micro_batch_size=2",
    "training.batch_stages=[{until_step: 3, global_batch_size: 16, seq_len: 8}, {until_tokens: 1000, global_batch_size: 8}]",
]  # fmt: skip
SAMPLES = [4, 4, 4, 8, 8, 8, 16, 16, 16, 16]  # 384 tokens after step 3, and 256 in each step behind it


def staged(**keys: Any) -> Config:
    """The config with these stages, and with other keys of `training`."""
    cfg = compose([*SMALL, *STAGES]).config
    values = cfg.model_dump(mode="json", by_alias=True)
    values["training"] |= keys
    return build(values)


def course_on(mesh_sizes: dict[str, int], cfg: Config, start: Position) -> DataSchedule:
    return make_data_schedule(cfg, schedule_after(start, cfg.training, mesh_sizes), start)


def test_a_course_goes_through_the_stages_and_on_from_any_step():
    cfg = staged(skip_steps=["2", "4:7"])
    data_schedule = course_on(FOUR, cfg, BEGINNING)
    firsts, left_out, index = [], [], 0
    for step, size in enumerate(SAMPLES, 1):
        skipped = {2: SAMPLES[1], 4: sum(SAMPLES[3:7])}.get(step, 0)
        left_out += range(index, index + skipped)
        firsts.append(index + skipped)
        index += skipped + size
    assert [data_schedule.samples(step).start for step in range(1, 11)] == firsts
    assert [len(data_schedule.samples(step)) for step in range(1, 11)] == SAMPLES
    for step in range(11):
        position = Position(step, data_schedule.next_sample(step), "", "", left_out=data_schedule.left_out(step))
        assert position.num_samples == sum(SAMPLES[:step]) == data_schedule.taken(step)
        again = course_on(ONE, cfg, position)  # on another mesh
        assert [again.samples(later) for later in range(step + 1, 11)] == [
            data_schedule.samples(later) for later in range(step + 1, 11)
        ]
        assert [n for first, end in again.left_out(10) for n in range(first, end)] == left_out
    # A run whose steps so far had another batch: the stage ends by the tokens that it has really seen.
    assert schedule_after(Position(3, 24, "", ""), cfg.training, FOUR).periods[0].last_step == 4


def test_the_length_of_a_run_and_of_its_schedule_count_the_tokens_of_each_stage():
    def length(**keys: int) -> int | None:
        cfg = staged(max_steps=None, **keys)
        return last_step(cfg.training, course_on(FOUR, cfg, BEGINNING), 512, 100)

    for tokens, steps in ((383, 2), (384, 3), (1152, 6), (1663, 6), (1664, 7)):
        assert length(max_tokens=tokens) == steps
    assert length(num_epochs=1) == 10  # 36 samples in 6 steps, then 16 a step: 4 of them fit into 100
    spans = staged().training.batch_schedule(FOUR).spans(8)
    assert spans == [(3, 128), (3, 256), (2, 512)]
    for phase, tokens, steps in (("warmup", 640, 4), ("warmup", 5000, 14), ("decay", 1280, 3), ("decay", 512, 1)):
        scheduler = staged().scheduler.model_copy(update={f"{phase}_tokens": tokens})
        assert count_phase_steps(scheduler, phase, spans) == steps


@pytest.mark.parametrize(("num_sequences", "shape"), [(24, (3, 8, 32)), (10, (5, 2, 32)), (4, (1, 4, 32))])
def test_a_microbatch_of_a_stage_is_no_larger_than_that_of_the_run(num_sequences, shape):
    stages = f"training.batch_stages=[{{until_step: 3, global_batch_size: {num_sequences}}}]"
    keys = compose([*SMALL, "training.micro_batch_size=4", "training.global_batch_size=32", stages]).config.training
    first, _ = keys.batch_schedule(dict.fromkeys(axis_names(), 1) | {"fsdp": 2}).periods
    assert first.shape == shape


def test_a_sequence_becomes_rows():
    """Documents are numbered anew in each row, padding is none; what is not one number a token is of each row."""
    fields = {
        "tokens": [1, 2, 3, 4, 5, 6, 7, 0],
        "segment_ids": [1, 1, 1, 2, 2, 2, 2, 0],
        "positions": [0, 1, 2, 0, 1, 2, 3, 0],
    }
    example = {name: np.array([[row, row]], np.int32) for name, row in fields.items()}
    found = split_rows(example | {"image_grids": np.arange(4).reshape(1, 2, 1, 2)}, 2)
    assert found["tokens"].tolist() == [[[1, 2, 3, 4], [5, 6, 7, 0]] * 2]
    assert found["segment_ids"].tolist() == [[[1, 1, 1, 2], [1, 1, 1, 0]] * 2]
    assert found["positions"].tolist() == [[[0, 1, 2, 0], [0, 1, 2, 0]] * 2]
    assert found["image_grids"].tolist() == [[[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]]


def test_the_data_are_those_of_a_run_without_stages(cache_dir, monkeypatch):
    """All tokens in the order of the samples; shorter rows are what packing makes of their tokens alone."""
    monkeypatch.setattr("tunix.data.batches.to_global", lambda batch, mesh: batch)
    packed = sequences([50, 7, 90] * 20, 32, "concat", cache_dir)
    cfg = staged()
    data = batches(packed, cfg)
    monkeypatch.setattr("tunix.data.batches.local_rows", lambda mesh, n: list(range(n)))
    source = PrefetchReader(data, BEGINNING, 8)
    seen = [source.next({}) for _ in range(8)]
    source.close()
    shapes = [batch["tokens"].shape for batch, _ in seen]
    assert shapes == [(1, 16, 8)] * 3 + [(1, 8, 32)] * 3 + [(2, 8, 32)] * 2
    assert [numbers["tokens"] for _, numbers in seen] == (np.cumsum(SAMPLES[:8]) * 32).tolist()
    together = np.concatenate([batch["tokens"].reshape(-1) for batch, _ in seen])
    assert (together == np.concatenate([data[number]["tokens"] for number in range(sum(SAMPLES[:8]))])).all()

    halves = []  # of two processes
    for process in range(2):
        monkeypatch.setattr(
            "tunix.data.batches.local_rows", lambda mesh, n, p=process: list(range(p * n // 2, (p + 1) * n // 2))
        )
        part = PrefetchReader(data, BEGINNING, 4)
        halves.append([part.next({})[0]["tokens"] for _ in range(4)])
        part.close()
    for (whole, _), *parts in zip(seen[:4], *halves, strict=True):
        assert (np.concatenate(parts, axis=1) == whole["tokens"]).all()

    short = sequences([50, 7, 90] * 20, 8, "concat", cache_dir)
    first, _ = seen[0]
    for row in range(16):
        index = int(first["tokens"][0, row, 0]) // 8  # token k of this stream is k
        assert all((first[name][0, row] == field).all() for name, field in short[index].items())


STEP = {"until_step": 3}


@pytest.mark.parametrize(
    ("stages", "keys", "message"),
    [
        ([STEP], {}, "training.batch_stages: a stage needs global_batch_size or seq_len"),
        ([{"seq_len": 8}], {}, "training.batch_stages: a stage needs one of until_step and until_tokens"),
        ([STEP | {"seq_len": 12}], {}, r"0.seq_len=12 does not divide training.seq_len=32.*nearest: 8 or 16 or 32"),
        ([STEP | {"seq_len": 8, "global_batch_size": 6}], {}, r"0.global_batch_size=6 .* nearest: 4 or 8"),
        ([STEP | {"global_batch_size": 6}], {}, r"0.global_batch_size=6 is not divisible by 4 = 4 data shards; nearest: 4 or 8"),
        ([STEP | {"seq_len": 8}, {"until_tokens": 1536, "seq_len": 8}], {}, "1 ends with step 3, not after the stage before it"),
        ([STEP | {"seq_len": 8}], {"global_batch_size": None}, "needs the batch that follows its stages"),
        ([STEP | {"global_batch_size": 8}], {"sync_gradients_every": 2}, "0: training.sync_gradients_every=2 does not divide the 1"),
    ],
)  # fmt: skip
def test_stages_that_do_not_fit_are_refused(stages, keys, message):
    with pytest.raises(UserError, match=message):
        staged(batch_stages=stages, **keys).training.batch_shape(FOUR)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("task=sft", "0.seq_len=8 would cut a conversation of task=sft in parts"),
        ("task=grpo sampling.max_new_tokens=8", "batch_stages does not go with task=grpo"),
    ],
)
def test_tasks_that_stages_do_not_fit_are_refused(task, message):
    with pytest.raises(UserError, match=message):
        compose([*SMALL, *STAGES, *task.split()])


def test_a_row_that_devices_share_is_divisible_by_them():
    two = ONE | {"cp": 2}
    with pytest.raises(UserError, match="0.seq_len=1 is not divisible by the 2 devices that share a sequence"):
        staged(batch_stages=[STEP | {"seq_len": 1}]).training.batch_shape(two)


def test_a_trace_keeps_within_a_stage():
    cfg = staged(profile_communication=True)

    def check(after_step: int) -> None:
        profile = cfg.profile.model_copy(update={"after_step": after_step, "steps": 2})
        check_window(cfg.model_copy(update={"profile": profile}), 9)

    with pytest.raises(UserError, match=r"the batch changes after step 3 .* set profile.after_step=3 or more"):
        check(2)
    check(1)
    check(3)


def test_a_step_of_another_batch_has_the_deadline_of_a_phase():
    distributed = staged().distributed
    watchdog = Watchdog(distributed)
    for step in (1, 2, 3):
        watchdog.step(step)
        # The call of step 1 has returned before the devices were done: how long a step takes is known after step 2.
        assert watchdog.limit == (distributed.step_deadline_s if step == 3 else distributed.phase_deadline_s)
    watchdog.start_over()
    for step in (4, 5):
        assert watchdog.limit == distributed.phase_deadline_s
        watchdog.step(step)
    assert watchdog.limit == distributed.phase_deadline_s


def test_a_plan_shows_each_stage():
    cfg = staged()
    model, plan = {"mesh_shape": ((4,), ("fsdp",))}, {"num_compiled": 0}
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update=model), "plan": cfg.plan.model_copy(update=plan)})
    cluster = read_topology("h100:4", None)
    ranking = rank(cfg, cluster)
    text = format_text(ranking, cluster, [])
    rows = re.findall(r"│ (\d+ to [^│]+?) *│ +(\d+) │ +(\d+) │ +(\d+) │ derived", text)
    assert rows == [
        ("1 to 3", "16", "8", "128"), ("4 to 6", "8", "32", "256"), ("7 to the end", "16", "32", "512"),
    ]  # fmt: skip
    assert len(ranking.fit[0].stages) == 2


def test_the_example_of_the_page():
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (block,) = (text for text in blocks if "batch_stages" in text)
    _, _, *words = shlex.split(block.replace("\\\n", " "))
    periods = compose(words).config.training.batch_schedule(ONE).periods
    found = [(each.to_text, each.shape.num_sequences, each.shape.seq_len, each.num_samples) for each in periods]
    assert found == [("1 to 50", 64, 32, 16), ("51 to 123", 32, 128, 32), ("124 to the end", 64, 128, 64)]


def lines(folder: Path) -> list[tuple]:
    """Numbers of the steps that do not depend on time."""
    return [(line["step"], line["tokens"], line["loss"], line["grad_norm"]) for line in metrics(folder)]


@pytest.mark.nightly
def test_a_run_changes_its_batch_and_goes_on_with_the_same_digits(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        *RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']",
        "data.held_out_fraction=0", "distributed.allow_idle_devices=true", "training.max_steps=4",
        "training.global_batch_size=4", "training.micro_batch_size=2", "checkpoint.save_every_steps=1", "checkpoint.max_to_keep=9",
        "training.batch_stages=[{until_step: 2, global_batch_size: 4, seq_len: 16}]",
    ]  # fmt: skip
    two = ["model.mesh_shape=[[2],[fsdp]]", "hydra.run.dir=run"]
    run = tunix.train([*words, *two]).folder
    assert [line[1] for line in lines(run)] == [64, 128, 256, 384]
    for line, tokens in zip(metrics(run), (64, 64, 128, 128), strict=True):
        assert line["tokens_per_s"] * line["step_time_s"] == pytest.approx(tokens)
    log = (run / "train.log").read_text()
    assert "from step 3 on: 4 sequences of 32 tokens a step, 128 tokens" in log
    assert "batch stages" in log
    assert log.count("collectives of a step") == 2
    assert read_about(*find_storage((run / "checkpoints" / "4").absolute()))["position"]["next_sample"] == 12

    shutil.copytree(run, "again", symlinks=True)
    tunix.train(["resume=again/checkpoints/1"])  # within the first stage
    assert lines(Path("again"))[4:] == lines(run)[1:]
    shutil.copytree(run, "other", symlinks=True)
    tunix.train(["resume=other/checkpoints/2", "model.mesh_shape=[[1],[fsdp]]"])  # at its end
    np.testing.assert_allclose(lines(Path("other"))[4:], lines(run)[2:], rtol=1e-5)
