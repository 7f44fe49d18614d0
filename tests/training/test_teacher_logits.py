"""Teachers on disk (task.teacher_top_k): TRL's divergence of the likeliest tokens, the teacher beside the model, resume,
meshes, and folders that are not what a run reads."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.harness import metrics
from support.processes import Processes
from support.rollouts import ONE, WIDE
from training.test_distillation import EXPECTED, NOTHING_ELSE, OTHERS, TEMPLATE, Student, norm

import tunix
from tunix.base.errors import UserError
from tunix.base.forms import CACHE_FORMS
from tunix.config.compose import compose
from tunix.config.pretrained_config import LogitsInfo, read_teacher
from tunix.costs.devices import read_topology
from tunix.data import teacher_logits
from tunix.data.teacher_logits import IDS, LOG_PROBS, REST, LogitFiles, TopK
from tunix.plan.ranking import describe_no_fit, rank
from tunix.plan.report import format_text
from tunix.prepare import prepare
from tunix.training.loss import next_token_loss
from tunix.training.teacher import OfflineTeacher, compute_top_k_divergence


class OfflineStudent(Student):
    """TRL's student, which learns the k likeliest tokens of its teacher."""

    def learn(self, top_k, beta, temperature):
        """Mean of the objective, and its gradient."""
        teacher = OfflineTeacher("gpt2", top_k, 97, beta, temperature, self.describe(beta, temperature))
        with jax.set_mesh(self.model.mesh):
            found = jax.jit(teacher.compute_top_k, static_argnums=2)(self.teacher.params, self.batch, 4)
            shape = len(self.batch["tokens"]), -1
            fields = {IDS: found.ids.reshape(shape), LOG_PROBS: found.log_probs.reshape(shape), REST: found.rest}

            def loss(params):
                model = self.model.arch.module(params)
                loss = next_token_loss(
                    model, self.batch | fields, chunk_size=4, z_loss=0.0, teacher=teacher, teacher_weight=1.0
                )
                return loss.objective / loss.weight

            value, gradient = jax.jit(jax.value_and_grad(loss))(self.params)
        return float(value), gradient


@pytest.fixture(scope="module")
def student() -> OfflineStudent:
    return OfflineStudent()


@pytest.mark.parametrize("expected", EXPECTED["sparse"][1::2], ids=lambda each: f"{each['beta']}")
def test_the_divergence_of_the_likeliest_tokens_is_that_of_trl(student, expected):
    value, gradient = student.learn(EXPECTED["top_k"], expected["beta"], expected["temperature"])
    assert value == pytest.approx(expected["loss"], rel=2e-5)
    assert norm(gradient) == pytest.approx(expected["grad_norm"], rel=2e-5)


def test_all_tokens_are_the_whole_divergence(student):
    expected = EXPECTED["losses"][2]
    assert expected["beta"] == 0.3
    value, gradient = student.learn(97, 0.3, expected["temperature"])
    assert value == pytest.approx(expected["loss"], rel=2e-5)
    assert norm(gradient) == pytest.approx(expected["grad_norm"], rel=2e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_sure_teacher_has_a_divergence(student, beta):
    """Its likeliest token has all of the probability that float32 can tell: the rest of it is 0, and no loss is 1e29."""
    with jax.set_mesh(student.model.mesh):
        logits = jnp.zeros((1, 1, 4), out_sharding=jax.P(None, None, None))
        sure = TopK(jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros((1, 1, 1)), jnp.zeros((1, 1)))
        measure = jax.jit(jax.value_and_grad(lambda x: compute_top_k_divergence(x, sure, beta).sum()))
        value, gradient = measure(logits)
    others = 0.75 * np.log(0.75 / 2.0**-24) + 0.25 * np.log(0.25)
    middle = 0.5 * np.log(1 / 0.625) + 0.5 * (0.25 * np.log(0.25 / 0.625) + 0.75 * np.log(2))
    assert float(value) == pytest.approx({0.0: np.log(4), 0.5: middle, 1.0: others}[beta], rel=1e-5)
    assert np.abs(gradient).max() < 10


# Runs.

TALK = [*OTHERS, "task=sft", TEMPLATE, "loading.packing=pad", "evaluation.num_sequences=4", "training.max_steps=2"]
NUMBERS = ("loss", "grad_norm", "teacher_kl")
ROWS = 320  # of the vocabulary


def numbers(folder) -> list:
    return [[line.get(name) for name in NUMBERS] for line in metrics(folder)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the run `teacher`, and the numbers of `beside`, a run with that teacher in memory."""
    place = tmp_path_factory.mktemp("teachers")
    folder = f"hydra.run.dir={place}/teacher"
    tunix.train([*TALK, *ONE, *NOTHING_ELSE, "seed=5", "training.max_steps=1", folder])
    return place


def run(place, name, *words) -> Path:
    folder = place / name
    everything = [*TALK, f"loading.cache_dir={place}/cache", "checkpoint.save_every_steps=1", *words]
    tunix.train([*everything, *(() if WIDE in words else ONE), f"hydra.run.dir={folder}"])
    return folder


def find_folder(place) -> Path:
    """The folder of the newest logits."""
    return max(
        (path.parent for path in place.glob("cache/teacher/*/teacher_logits.json")),
        key=lambda each: each.stat().st_ctime,
    )


@pytest.fixture(scope="module")
def whole(place):
    """A run with the logits of all tokens on disk."""
    return run(place, "whole", f"task.teacher={place}/teacher", f"task.teacher_top_k={ROWS}")


@pytest.mark.nightly
def test_all_tokens_on_disk_teach_as_a_teacher_beside(place, whole):
    beside = run(place, "beside", f"task.teacher={place}/teacher")
    assert np.array(numbers(whole)) == pytest.approx(np.array(numbers(beside)), rel=1e-5)
    (own,), (other,) = metrics(whole, "held_out"), metrics(beside, "held_out")
    assert own["teacher_kl"] == pytest.approx(other["teacher_kl"], rel=1e-5)
    log = " ".join((whole / "train.log").read_text().split())
    assert re.search(
        r"teacher +/\S+: \w+, [\d,]+ parameters, .* alone, before the state is made in float32; its 320", log
    )
    about, size = re.search(
        r"of 96 rows: about ([\d,]+) bytes in .* teacher: 96 rows in .* has ([\d,]+) bytes", log
    ).groups()
    about, size = (int(number.replace(",", "")) for number in (about, size))
    assert size == sum(path.stat().st_size for path in find_folder(place).rglob("*") if path.is_file())
    assert about == pytest.approx(size, rel=0.05)


@pytest.mark.nightly
def test_another_mesh_reads_the_same_files(place, whole, monkeypatch):
    """The run names the folder: no model is there."""
    monkeypatch.setattr("tunix.inference.teacher.load_teacher", None)
    other = run(place, "wide", f"task.teacher={find_folder(place)}", WIDE, "training.micro_batch_size=2")
    assert np.array(numbers(other)) == pytest.approx(np.array(numbers(whole)), rel=1e-4, abs=1e-7)
    assert f"teacher_top_k: {ROWS}" in (other / "config.yaml").read_text()


@pytest.mark.nightly
def test_stages_make_the_same_files_and_learn_from_them(place):
    """A student of two layers on two stages, which split the tokens of the loss, and on one device. The teacher has
    three layers, which stages do not share."""
    deep = [*TALK, "model.num_layers=2", "checkpoint.save_every_steps=1"]
    deeper = [*TALK, "model.num_layers=3", "checkpoint.save_every_steps=1"]
    stages = "model.mesh_shape=[[2,2],[pp,fsdp]]", "distributed.allow_idle_devices=true", "training.micro_batch_size=4"
    tunix.train([*deeper, *ONE, *NOTHING_ELSE, "training.max_steps=1", "seed=5", f"hydra.run.dir={place}/deep"])
    found = []
    for name, mesh in (("alone", ONE), ("staged", stages)):
        folder = f"loading.cache_dir={place}/cache_{name}"
        words = [*deep, *mesh, folder, f"task.teacher={place}/deep", "task.teacher_top_k=5"]
        tunix.train([*words, f"hydra.run.dir={place}/{name}"])
        (held_out,) = metrics(place / name, "held_out")
        ids = [np.load(path) for path in sorted(place.glob(f"cache_{name}/teacher/*/*/*/ids.npy"))]
        found.append(([*numbers(place / name), [held_out[each] for each in ("loss", "teacher_kl")]], ids))
    (one, one_ids), (other, other_ids) = found
    for line, expected in zip(other, one, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    assert all(np.array_equal(*pair) for pair in zip(one_ids, other_ids, strict=True))
    assert len(one_ids) > 1


def test_work_that_was_killed_goes_on_and_a_resumed_run_has_the_same_digits(place, tmp_path, monkeypatch):
    monkeypatch.setattr("tunix.inference.teacher.PIECE_BYTES", 2000)
    words = [f"loading.cache_dir={tmp_path}", f"task.teacher={place}/teacher", "task.teacher_top_k=3"]
    write, made = LogitFiles.write, []

    def die_after_three(self, number, rows):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(number)
        write(self, number, rows)

    with monkeypatch.context() as killing:
        killing.setattr(LogitFiles, "write", die_after_three)
        with pytest.raises(KeyboardInterrupt):
            run(place, "killed", *words)
    pieces = {path: path.stat().st_mtime_ns for path in tmp_path.glob("teacher/*/*/*/ids.npy")}
    assert len(pieces) == 3
    teacher = shutil.copytree(place / "teacher", tmp_path / "teacher_run")
    words = [f"loading.cache_dir={tmp_path}", f"task.teacher={teacher}", "task.teacher_top_k=3"]
    folder = run(tmp_path, "run", *words)
    assert len([*tmp_path.glob("teacher/*/*/*/ids.npy")]) > 5
    assert {path: path.stat().st_mtime_ns for path in pieces} == pieces
    tunix.train([f"resume={folder}/checkpoints/1"])
    shutil.rmtree(teacher)
    read_teacher.cache_clear()
    with pytest.raises(UserError, match=f"task.teacher={teacher}.* goes on without it: task.teacher=FOLDER"):
        tunix.train([f"resume={folder}/checkpoints/1"])
    files = re.search(r"teacher: the run reads (\S+)", (folder / "train.log").read_text())[1]
    tunix.train([f"resume={folder}/checkpoints/1", f"task.teacher={files}"])
    _, before, *after = numbers(folder)
    assert after == [before, before]


def test_each_row_gets_its_own_positions_from_its_piece(tmp_path, monkeypatch):
    """Three rows of other lengths in pieces of two, of a vocabulary beyond 16 bits; a token without probability."""
    sequences = MagicMock(num_learnt=600, stream=SimpleNamespace(fingerprint="a"))
    sequences.__len__.return_value = 100
    info = LogitsInfo(
        top_k=2, temperature=1, dtype="float16", num_rows=70_000, rows_per_piece=2, teacher="t", tokenizer="t",
        seq_len=4, packing="pad", images="",
    )  # fmt: skip
    files = LogitFiles(tmp_path, info, sequences, [3, 7, 8], "held out")
    rows = {
        index: TopK(np.full((n, 2), 69_990 + n), np.full((n, 2), -n), np.full(n, n))
        for index, n in ((3, 2), (7, 1), (8, 3))
    }
    rows[8].log_probs[0, 1] = -1e9
    for number in files.missing:
        files.write(number, [rows[index] for index in files.rows_of(number)])
    for index, (ids, log_probs, rest) in rows.items():
        mask = np.arange(4) < len(rest)
        found = {name: field.reshape(4, -1)[mask] for name, field in files.read(index, mask).items()}
        assert np.array_equal(found[IDS], ids)
        assert np.array_equal(
            found[LOG_PROBS], np.where(log_probs < -1e8, np.float32(teacher_logits.NO_TOKEN), log_probs)
        )
        assert np.array_equal(found[REST][:, 0], rest)
    assert not files.read(4, np.ones(4))[IDS].any()  # a row that is not evaluated
    with pytest.raises(UserError, match="row 1 has 1 positions, not 2; remove it, and it is made again"):
        files.read(7, np.arange(4) < 2)
    assert LogitFiles(tmp_path, info, sequences, [3, 7, 9], "held out").missing == [0, 1]
    assert files.estimate_bytes([0, 1]) == 600 * 3 / 100 * (2 * (2 + 4) + 4)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    teacher_logits.check_disk_space(tmp_path, 1 << 30)
    with pytest.raises(UserError, match=r"take 2.00 GiB, and the disk of .* has 1.00; make room"):
        teacher_logits.check_disk_space(tmp_path, 2 << 30)


def test_files_that_are_damaged_or_of_another_run_are_refused(place, whole):
    folder = find_folder(place)
    for word, message in (
        (
            "training.seq_len=32",
            "was made with training.seq_len=16, and this run has 32; set it so, or make the logits",
        ),
        ("task.teacher_temperature=2", "was made with task.teacher_temperature=1.0, and this run has 2.0"),
        ("data.below=9", "lacks logits of arithmetic: it was made of other documents"),
        (
            "evaluation.num_sequences=3",
            "lacks logits of arithmetic, held out: .*another evaluation.num_sequences than 3",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run(place, "refused", f"task.teacher={folder}", word)
    with pytest.raises(UserError, match=f"was made with task.teacher_top_k={ROWS}, not 3; leave it out"):
        compose([*TALK, *ONE, f"task.teacher={folder}", "task.teacher_top_k=3"])
    with pytest.raises(UserError, match="holds logits of documents, and task=grpo learns from answers of its own"):
        compose([*TALK, *ONE, "task=grpo", f"task.teacher={folder}"])
    piece = next(folder.glob("*/00000"))
    array = (piece / "log_probs.npy").read_bytes()
    (piece / "log_probs.npy").write_bytes(array[: len(array) // 2])
    with pytest.raises(
        UserError, match=r"log_probs.npy has [\d,]+ bytes, [\d,]+ were written; remove .*/00000, and it"
    ):
        run(place, "damaged", f"task.teacher={folder}", "loading.verify=always")
    (piece / "log_probs.npy").write_bytes(array)
    info = json.loads((folder / "teacher_logits.json").read_text())
    (folder / "teacher_logits.json").write_text(json.dumps(info | {"top_k": "many"}))
    with pytest.raises(UserError, match="teacher_logits.json is damaged .top_k: "):
        compose([*TALK, *ONE, f"task.teacher={folder}"])
    (folder / "teacher_logits.json").write_text(json.dumps(info))
    assert not (place / "refused").exists()
    assert not (place / "damaged").exists()


def test_prepare_computes_logits(place, tmp_path, capsys):
    """For a run elsewhere. Files have 16 bits where products have them."""
    words = ["training.mixed_precision=bf16", f"task.teacher={place}/teacher", "task.teacher_top_k=4"]
    prepare(compose([*TALK, *ONE, *words, f"loading.cache_dir={tmp_path}"]).config)
    folder = Path(re.search(r"^logits of the teacher: (.*)$", capsys.readouterr().out, re.M)[1])
    dtypes = {(path.name, np.load(path).dtype.name, np.load(path).ndim) for path in folder.glob("*/*/*.npy")}
    assert CACHE_FORMS["teacher"] == 1  # where these change, raise it
    assert dtypes == {
        ("ids.npy", "uint16", 2),
        ("log_probs.npy", "float16", 2),
        ("rest.npy", "float32", 1),
        ("ends.npy", "int64", 1),
    }
    assert teacher_logits.describe_logits(compose([*TALK, *words]).config, ROWS).endswith(
        "20 bytes for each learnt token"
    )


def test_a_teacher_that_gives_no_logits_is_refused(monkeypatch):
    model = compose([]).config.model.model_copy(update={"labels": ("no", "yes")})
    monkeypatch.setattr("tunix.config.pretrained_config.find_run", lambda *_, **__: (Path("x"), None))
    monkeypatch.setattr("tunix.config.pretrained_config.trained_model", lambda *_: model)
    with pytest.raises(
        UserError, match="^task.teacher=a_classifier gives no, yes and no text; a teacher gives logits$"
    ):
        read_teacher("a_classifier")


@pytest.mark.nightly
def test_processes_compute_and_read_the_same_logits(place, tmp_path):
    """Two processes with a device each give the numbers of one with both."""
    words = [
        *TALK, *NOTHING_ELSE, "model.mesh_shape=[[2],[fsdp]]", "training.micro_batch_size=4",
        f"task.teacher={place}/teacher", "task.teacher_top_k=3",
    ]  # fmt: skip
    with Processes(*words, f"loading.cache_dir={tmp_path}/two", "hydra.run.dir=run", folder=tmp_path, count=2) as run:
        assert [end.code for end in run.ends()] == [0, 0]
    words += [f"loading.cache_dir={tmp_path}/one", "distributed.allow_idle_devices=true"]
    tunix.train([*words, f"hydra.run.dir={tmp_path}/alone"])
    assert np.array(numbers(tmp_path / "run")) == pytest.approx(np.array(numbers(tmp_path / "alone")), rel=1e-4)


def test_what_is_refused_before_data_are_read(place):
    for words, message in (
        (["task.teacher_top_k=4"], "task.teacher_top_k=4 is of a teacher, and task.teacher=null"),
        (
            [
                f"task.teacher={place}/teacher",
                "task.teacher_top_k=4",
                "training.batch_stages=[{until_step:1,seq_len:8}]",
            ],
            "training.batch_stages.0.seq_len=8 cuts sequences that the teacher of task.teacher_top_k=4 has read whole",
        ),
    ):
        with pytest.raises(UserError, match=message):
            compose([*TALK, *ONE, *words])
    with pytest.raises(UserError, match="task.teacher_top_k=321: the vocabulary has 320 rows; lower it"):
        run(place, "many", f"task.teacher={place}/teacher", "task.teacher_top_k=321")


def test_the_plan_says_what_is_on_disk(place):
    """It counts no teacher beside the state, and one that does not fit alone."""
    mesh = "model.mesh_shape=[[4],[fsdp]]", "training.mixed_precision=bf16", "plan.num_compiled=0"
    beside = [*TALK, *mesh, f"task.teacher={place}/teacher"]
    cluster = read_topology("h100:4")
    (offline,), (other,) = (
        rank(compose([*beside, *more]).config, cluster).fit for more in (["task.teacher_top_k=64"], [])
    )
    assert offline.teacher_bytes == 0
    assert offline.costs.standalone_bytes == other.teacher_bytes
    ranking = rank(compose([*beside, "task.teacher_top_k=64"]).config, cluster)
    said = format_text(ranking, cluster, [])
    assert "a run learns its 64 likeliest tokens from disk, 260 bytes for each learnt token" in said
    large = replace(offline, costs=replace(offline.costs, standalone_bytes=10**12))
    assert large.memory == 10**12
    ranking = replace(ranking, fit=[], too_large=[large])
    assert "most of it teacher; take more devices, a smaller task.teacher" in describe_no_fit(ranking, cluster)
