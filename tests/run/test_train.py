"""A whole run, in this process: its files, its numbers, its ends."""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support.harness import ONE_LAYER, ROOT, RUN, TWO_DEVICES, metrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tunix
from tunix.base.errors import Diverged, UserError
from tunix.config import Evaluate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.batches import TrainBatches
from tunix.data.dataset import load_corpus
from tunix.evaluate import evaluate
from tunix.feeds import make_feed
from tunix.processes.watchdog import Watchdog
from tunix.run import folder as lock
from tunix.run.folder import _write_environment, describe_environment
from tunix.trainer import run
from tunix.training.choices import build_mesh
from tunix.training.loss import RESERVED
from tunix.training.train_spec import assemble

sys.path.insert(0, str(ROOT))

MESH = "model.mesh_shape=[[4,2],[fsdp,tp]]"


@pytest.fixture
def words(tmp_path, corpus, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [*RUN, *TWO_DEVICES, "data=text", f"data.paths=['{corpus}']"]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The folder of a run, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("finished"))
        Path("outputs/demo").mkdir(parents=True)
        Path(f"outputs/demo/.latest-{os.getpid()}").symlink_to("x")  # a process of this number was killed
        names = ["project_name=demo", "run_name=first", "evaluation.sample_tokens=3", "scheduler=constant"]
        return tunix.train([*RUN, "data=text", f"data.paths=['{corpus}']", MESH, *names]).folder


def test_a_home_of_checkpoints_that_cannot_be_made_is_refused_first(words, monkeypatch):
    """Before the program and the data are made; what was made to try is taken away again."""
    monkeypatch.setattr("tunix.trainer.set_up", lambda *_: pytest.fail("the program is made"))
    Path("file").touch()
    for root, reason in (("file", "File exists"), ("file/run", "Not a directory")):
        with pytest.raises(
            UserError, match=f"^checkpoint.folder={Path(root).absolute()} cannot be written: {reason}"
        ) as error:
            tunix.train([*words, f"checkpoint.folder={root}"])
        assert "\n" not in str(error.value)
    with pytest.raises(pytest.fail.Exception, match="the program is made"):
        tunix.train([*words, "checkpoint.folder=new/home"])
    assert os.listdir() == ["file"]


def test_a_runs_folder(finished):
    folder = finished
    assert folder.parts[-4:-2] == ("outputs", "demo")
    assert (folder.parents[1] / "latest").resolve() == folder
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", ".hydra", "train.log", "metrics.jsonl", "checkpoints", "environment.json"} <= names
    assert {path.name for path in (folder / ".hydra").iterdir()} == {"config.yaml", "hydra.yaml", "overrides.yaml"}
    environment = json.loads((folder / "environment.json").read_text())
    assert {"versions", "devices", "git_commit", "command", "processes"} <= environment.keys()
    assert {"python", "jax", "flax"} <= environment["versions"].keys()
    assert len(environment["devices"]) == 8
    log = (folder / "train.log").read_text()
    for text in ("38,352 parameters", "demo / first", "fsdp=", "tokens per step", "bytes per device", "FLOPs per token",
                 "step 6/6", "held out:", "unigram entropy of the corpus", "after >>>"):  # fmt: skip
        assert text in log or text.replace("fsdp=", '"fsdp"') in log, text


def test_metrics(finished):
    folder = finished
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    first = lines[0]
    for name in ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "tokens_per_s_per_device", "step_time_s", "data_wait_s",
                 "mfu", "tflops_per_device", "peak_memory_gib", "skipped"):  # fmt: skip
        assert name in first
    assert first.keys() - RESERVED == {"loss", "z_loss"}  # every other number is reserved
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name in {**first, **metrics(folder, "held_out")[0]}:
        assert f"`{name}`" in page, name
    assert first["mfu"] is None  # nobody knows a CPU's peak
    assert np.float32(first["loss"]) == first["loss"]  # every digit
    assert [line["tokens"] for line in lines] == [128 * n for n in range(1, 7)]
    assert lines[-1]["loss"] < first["loss"]
    held_out = metrics(folder, "held_out")
    assert [line["step"] for line in held_out] == [3, 6]
    assert held_out[0]["perplexity"] == pytest.approx(math.exp(held_out[0]["loss"]))


def test_one_run_at_a_time_writes_into_a_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(finished, tmp_path / "copied", symlinks=True)
    monkeypatch.setattr(lock, "HOLDER_S", 0.0)
    before = (folder / "metrics.jsonl").read_text()
    being_written = folder / "checkpoints" / "9.orbax-checkpoint-tmp"
    being_written.mkdir()
    with lock.hold_lock(folder), pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on "):
        tunix.train([f"resume={folder}", "training.max_steps=8"])
    assert (folder / "metrics.jsonl").read_text() == before
    assert being_written.is_dir()  # it may be a checkpoint that the other run is writing
    assert tunix.train([f"resume={folder}", "training.max_steps=7"]).train["step"] == 7  # a lock ends with its process
    assert not being_written.exists()


def test_one_run_at_a_time_writes_into_a_home_of_checkpoints(tmp_path, monkeypatch):
    """`resume=HOME` works in HOME, whose lock a run of another folder holds too."""
    monkeypatch.setattr(lock, "HOLDER_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    home = tmp_path / "new" / "home"
    said = f"{home} is being written by process"
    with lock.hold_lock(tmp_path / "run", str(home)), pytest.raises(UserError, match=said), lock.hold_lock(home):
        pass
    for same in ("run", "link", "s3://bucket/home"):
        with lock.hold_lock(tmp_path / "run", same if ":" in same else str(tmp_path / same)):
            pass


@pytest.mark.nightly
def test_one_sequence_of_one_chunk(words):
    """[B, T] with B = 1, whose logits are made at one time."""
    more = ["training.micro_batch_size=1", "training.seq_len=16", "training.loss_chunk_size=16", "training.max_steps=2"]
    first, second = (
        tunix.train([*words, *more, f"training.micro_batch_size={size}", "training.global_batch_size=2",
                     "model.mesh_shape=[[1],[tp]]", "distributed.allow_idle_devices=true"]).train["loss"]
        for size in (1, 2)
    )  # fmt: skip
    assert first == pytest.approx(second, rel=1e-6)


def test_tensorboard_reads_the_events(finished):
    folder = finished
    events = EventAccumulator(str(folder)).Reload()
    tags = events.Tags()
    assert {"train/loss", "train/tokens_per_s", "train/learning_rate", "held_out/bits_per_byte"} <= set(tags["scalars"])
    scalars = events.Scalars("train/loss")
    assert [(s.step, s.value) for s in scalars] == [
        (line["step"], pytest.approx(line["loss"])) for line in metrics(folder)
    ]
    assert {"config", "report", "sample"} <= set(tags["tensors"])
    (config,) = events.Tensors("config")
    assert "mesh_shape" in config.tensor_proto.string_val[0].decode()


def test_a_config_made_in_python_without_events(words):
    result = tunix.train(compose([*words, *ONE_LAYER, "logging.sinks=[jsonl]", "training.max_steps=1"]).config)
    assert result.train["step"] == 1
    assert not list(result.folder.glob("events.*"))


@pytest.mark.nightly
def test_held_out_numbers_are_the_same_on_every_mesh(words):
    """The same steps on each mesh, and the last one filled up with masked rows."""
    base = [
        *words,
        *ONE_LAYER,
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
        "evaluation.num_sequences=13",
        "training.max_steps=2",
    ]
    more = [word.replace("data.paths", "evaluation.sets.more.paths") for word in words if word.startswith("data.paths")]
    labelled = ["evaluation.sets.more=text", *more]
    found = []
    for mesh in ("[[8],[fsdp]]", "[[2,2,2],[dp,fsdp,tp]]"):
        result = tunix.train([*base, *labelled, f"model.mesh_shape={mesh}"])
        (line,) = metrics(result.folder, "more")
        found.append([result.held_out["loss"], result.held_out["bits_per_byte"], result.train["loss"], line["loss"]])
        assert result.held_out["eval_tokens"] > 300
        assert line["step"] == 2
        assert line["loss"] != result.held_out["loss"]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    # The command measures the run's sets, and one that is named now: here the same documents under another name. Its rows
    # at a time need not divide the global batch of the run, here 8.
    others = [word.replace("sets.more", "sets.again") for word in labelled]
    others += ["training.micro_batch_size=4", "model.mesh_shape=auto"]
    evaluate(read_settings(Evaluate, [f"checkpoint={result.folder}", "output=results.json"], {"overrides": others}))
    measured = json.loads(Path("results.json").read_text())
    assert measured["loss"] == pytest.approx(result.held_out["loss"], rel=1e-6)
    assert [measured["sets"][name]["bits_per_byte"] for name in ("more", "again")] == pytest.approx(
        [line["bits_per_byte"]] * 2, rel=1e-6
    )


def test_held_out_sets_of_one_size_share_a_program(words):
    """Each set was compiled anew: the first evaluation of 100 sets took a minute where later ones took 0.2 s."""
    more = [word.replace("data.paths", "evaluation.sets.more.paths") for word in words if word.startswith("data.paths")]
    cfg = compose([*words, *ONE_LAYER, "evaluation.sets.more=text", *more, "evaluation.num_sequences=2"]).config
    mesh = build_mesh(cfg)
    with jax.set_mesh(mesh):
        train_spec = assemble(cfg, mesh)
        params = train_spec.new_params(cfg.seed)
        feed = make_feed(cfg, load_corpus(cfg), train_spec, mesh, Watchdog(cfg.distributed))
        losses = [held_out.evaluate(params)["loss"] for held_out in (feed.held_out, feed.sets["more"])]
    assert losses[0] != losses[1]
    assert feed.held_out.totals is feed.sets["more"].totals
    assert feed.held_out.totals._cache_size() == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.sets.code=pyton"], "evaluation.sets.code=pyton: takes a file of conf/data"),
        (["evaluation.sets.held_out=python_stdlib"], "evaluation.sets.held_out: this name is taken"),
        (["evaluation.sets.code=text"], "evaluation.sets.code.paths"),
        (
            ["evaluation.sets.a=python_stdlib", "task=dpo", "data=pairs", "data.paths=[x]"],
            "task=dpo has no loss on other",
        ),
    ],
)
def test_sets_that_cannot_be_measured_are_named(words, message):
    with pytest.raises(UserError, match=message):
        compose(words)


def test_runs_of_the_same_second_have_folders_of_their_own(words, monkeypatch):
    jobs: list = []
    while len(jobs) < 2 or jobs[-2].run_dir != jobs[-1].run_dir:  # the clock may tick between two
        assert len(jobs) < 10
        jobs.append(compose([*words, "training.max_steps=1"]))
    jobs = jobs[-2:]
    folders = [run(job).folder for job in jobs]
    assert folders[1].name == f"{folders[0].name}_1"


def test_a_folder_given_by_hand_is_not_shared(words, finished):
    shutil.copytree(finished, "mine", symlinks=True)
    before = Path("mine/metrics.jsonl").read_text()
    with pytest.raises(UserError, match=r"hydra.run.dir=mine holds another run; resume=mine goes on with it"):
        tunix.train([*words, "hydra.run.dir=mine"])
    assert Path("mine/metrics.jsonl").read_text() == before


def test_dry_run_prints_and_writes_nothing(words, capsys):
    more = ["model=gemma3_1b", "model.num_heads=4", "model.vocab_size=262144", MESH, "training.micro_batch_size=1"]
    result = tunix.train([*words, *more, "dry_run=true"])
    assert result.folder is None
    assert not Path("outputs").exists()
    printed = capsys.readouterr().out
    for text in ("parameters", "GiB = weights", "tokens per step", "GFLOP", "tp=1"):
        assert text in printed


def poison(monkeypatch, first_bad: int, last_bad: int) -> None:
    """NaN in the loss mask of samples in a range."""
    read = TrainBatches.read

    def poisoned(self, first_sample):
        batch = read(self, first_sample)
        if first_bad <= first_sample <= last_bad:
            batch["loss_mask"][0, 0, 0] = np.nan
        return batch

    monkeypatch.setattr(TrainBatches, "read", poisoned)


def test_a_bad_batch_is_skipped_and_counted(words, monkeypatch):
    poison(monkeypatch, 8, 8)  # step 3 of 4 sequences each
    folder = tunix.train(words).folder
    lines = metrics(folder)
    assert [line["skipped"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False, False]


def test_too_many_bad_batches_stop_the_run_and_name_the_samples(words, monkeypatch):
    poison(monkeypatch, 8, 10**6)
    with pytest.raises(
        Diverged,
        match=r"not finite in 2 steps in a row .*; step 4 had samples 12 to 15. The parameters are those of step 2",
    ):
        tunix.train([*words, "training.max_skipped_steps=1", "hydra.run.dir=bad"])
    assert (Path("bad/checkpoints/3")).is_dir()


def test_unknown_compiler_options_are_named(words):
    with pytest.raises(UserError, match=r"training.compiler_options: .*xla_not_an_option"):
        tunix.train([*words, "+training.compiler_options.xla_not_an_option=true"])
    assert not Path("outputs").exists()
    assert tunix.train(
        [
            *words,
            "+training.compiler_options.xla_cpu_enable_fast_math=false",
            "training.max_steps=1",
            *ONE_LAYER,
        ]
    ).folder


@pytest.mark.nightly(but=["training.max_tokens=400-3"])
@pytest.mark.parametrize(
    ("limit", "steps"), [("training.max_tokens=400", 3), ("training.num_epochs=0.01", 1), ("training.max_steps=2", 2)]
)
def test_the_first_limit_reached_ends_the_run(words, limit, steps):
    result = tunix.train([*words, limit])
    assert result.train["step"] == steps


def test_a_dry_run_names_all_limits_and_a_schedule_that_does_not_fit(words, capsys):
    tunix.train([*words, "dry_run=true", "training.num_epochs=3", "scheduler.warmup_steps=100"])
    said = " ".join(capsys.readouterr().out.split())
    assert "(the first of training.max_steps=6 and training.num_epochs=3.0 ends the run)" in said
    assert "the schedule does not fit into the run: warmup of 100 steps, of 6 in all" in said


def test_without_held_out_documents_there_is_no_evaluation(words):
    result = tunix.train([*words, "data.held_out_fraction=0"])
    assert result.held_out == {}
    assert result.train["step"] == 6


def test_a_change_that_is_no_utf8_a_repository_without_tunix_and_a_machine_without_git(tmp_path, monkeypatch):
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\n[ $1 = ls-files ] && { test -f $3; exit; }\nprintf '+gr\\366\\337e'\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_environment()["git_diff"] == "+gr\ufffd\ufffde"
    # A run that is resumed a thousand times keeps a difference once.
    for change in ("e", "e", "e", "u", "u", "e"):
        git.write_text(git.read_text().replace("\\337" + ("u" if change == "e" else "e"), "\\337" + change))
        _write_environment(tmp_path)
    found = json.loads((tmp_path / "environment.json").read_text())
    assert [start["git_diff"] and start["git_diff"][-1] for start in [found, *found["resumed"]]] == [
        "e", None, None, "u", None, "e",
    ]  # fmt: skip
    # Installed in a folder of another repository, as in its .venv: that one's commit and changes are not tunix's.
    git.write_text("#!/bin/sh\n[ $1 != ls-files ] && echo of another\n")
    for _ in range(2):
        found = describe_environment()
        assert (found["git_commit"], found["git_changes"], found["git_diff"]) == (None, [], "")
        git.unlink(missing_ok=True)
