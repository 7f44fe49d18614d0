"""Real processes on this machine, joined by jax.distributed: the same run as one process makes."""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.harness import PAIR, ROOT, SMALL, cli_here, metrics
from support.processes import End, Processes

import tunix
from tunix.base.digests import VERIFIED
from tunix.config import Export, Generate
from tunix.config.command_line import read_settings
from tunix.config.compose import compose
from tunix.data.dataset import prepare_corpus
from tunix.export import export
from tunix.generate import generate
from tunix.verify import check_everything

pytestmark = pytest.mark.slow
RUN_WORDS = [*PAIR, "training.global_batch_size=4", "evaluation.num_sequences=4"]


def processes(*words: str, cwd: Path, count: int, devices: int) -> list[End]:
    with Processes(*words, folder=cwd, count=count, devices=devices) as run:
        return run.ends()


@pytest.fixture(scope="module")
def words(corpus) -> list[str]:
    return [*RUN_WORDS, "data=text", f"data.paths=['{corpus}']"]


@pytest.fixture(scope="module")
def by_one(words, tmp_path_factory) -> Path:
    """The folder of the run as one process makes it."""
    folder = tmp_path_factory.mktemp("one") / "run"
    mine = ["model.mesh_shape=[[4],[fsdp]]", "distributed.allow_idle_devices=true", f"hydra.run.dir={folder}"]
    tunix.train([*words, *mine])
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder)]


@pytest.mark.nightly(but=["[[2,2],[fsdp,tp]]"])
# On the last mesh both processes have parts of the same sequences, and read the same rows.
@pytest.mark.parametrize("mesh", ["[[2,2],[fsdp,tp]]", "[[2,2],[tp,dp]]", "[[4],[cp]]"])
def test_two_processes_are_one_run(words, by_one, mesh, tmp_path):
    """Same loss as one process; one folder, one log."""
    mine = [f"model.mesh_shape={mesh}", "evaluation.sample_tokens=2"]
    first, second = processes(*words, *mine, cwd=tmp_path, count=2, devices=2)
    assert first.code == second.code == 0, first.stderr + second.stderr
    assert "(process 1)" in first.stdout
    assert re.search(r"processes +0 on \S+, 2 device\(s\); 1 on", first.stdout)
    assert "loss" in first.stdout
    assert "loss" not in second.stdout  # process 0 speaks
    assert losses(tmp_path / "run") == pytest.approx(losses(by_one), rel=1e-5)
    held_out = [metrics(folder, "held_out")[-1]["loss"] for folder in (by_one, tmp_path / "run")]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


@pytest.mark.nightly
def test_four_processes_go_on_for_one_and_one_for_four(words, by_one, tmp_path):
    expected = losses(by_one)
    shutil.copytree(by_one, tmp_path / "run")
    four = ["model.mesh_shape=[[2,2],[dp,fsdp]]", "distributed.allow_idle_devices=false"]
    ends = processes("resume=run/checkpoints/3", *four, cwd=tmp_path, count=4, devices=1)
    assert [end.code for end in ends] == [0] * 4, "".join(end.stderr for end in ends)
    assert losses(tmp_path / "run")[6:] == pytest.approx(expected[3:], rel=1e-5)

    assert "process_id: null" in (tmp_path / "run" / "config.yaml").read_text()
    one = cli_here("resume=run", "training.max_steps=8", "distributed.allow_idle_devices=true", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert "resumed at step 6, sample 24" in one.stdout
    assert [line["step"] for line in metrics(tmp_path / "run")[9:]] == [7, 8]


def test_commands_of_two_processes(by_one, hf_dir, tmp_path):
    """Evaluation, generation and export join, split the work, and write once what one process writes."""
    prompts = [{"id": n, "prompt": "abc ab"[: n + 2]} for n in range(3)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    generating = {"checkpoint": str(by_one), "input": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 4}
    evaluating = ["evaluate", f"checkpoint={by_one}", "output=results.json"]
    exporting = ["export", f"checkpoint={hf_dir}", "output=out", "shard_gb=0.00001"]
    words = [f"{key}={value}" for key, value in generating.items()]
    program = [*evaluating, "--", "generate", *words, "output=answers.jsonl", "--", *exporting]
    with Processes(*program, folder=tmp_path, count=2, devices=2, script="tests/support/commands.py") as run:
        ends = run.ends()
    assert [end.code for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    assert "parameters in " in ends[0].stdout
    assert not re.search("loss|parameters", ends[1].stdout)  # process 0 speaks
    measured = json.loads((tmp_path / "results.json").read_text())["loss"]
    assert measured == pytest.approx(metrics(by_one, "held_out")[-1]["loss"], rel=1e-6)

    generate(read_settings(Generate, [*words, f"output={tmp_path}/alone.jsonl"]))
    together, alone = ((tmp_path / name).read_text().splitlines() for name in ("answers.jsonl", "alone.jsonl"))
    for ours, theirs in zip(map(json.loads, together), map(json.loads, alone), strict=True):
        assert ours.pop("log_probability") == pytest.approx(theirs.pop("log_probability"), rel=1e-5)
        assert ours == theirs

    whole = {name: tensor for file in hf_dir.glob("*.safetensors") for name, tensor in load_file(file).items()}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert parts.keys() == whole.keys()
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    assert check_everything(str(tmp_path / "out"))[1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.nightly
def test_verify_and_prepare_of_two_processes(words, corpus, tmp_path):
    """The mesh of both processes is compared with one device; both tokenize into the bytes that one process makes."""
    data = ["data=text", f"data.paths=['{corpus}']", "loading.shard_bytes=9000"]
    meshes = '--meshes=[[[1],["dp"]],[[2,2],["dp","fsdp"]]]'
    program = ["verify", *words, "model.mesh_shape=auto", meshes, "--steps=1", "--", "prepare", *SMALL, *data]
    with Processes(
        *program,
        f"loading.cache_dir={tmp_path}/two",
        folder=tmp_path,
        count=2,
        devices=2,
        script="tests/support/commands.py",
    ) as run:
        ends = run.ends()
    assert [end.code for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    assert "within the tolerance of 1e-05" in ends[0].stdout
    assert "2 processes have tokenized" in ends[0].stdout
    assert not re.search("tolerance|fingerprint", ends[1].stdout)  # process 0 speaks
    prepare_corpus(compose([*SMALL, *data, f"loading.cache_dir={tmp_path}/one"]).config)
    one, two = (
        {
            path.relative_to(tmp_path / name).as_posix(): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and path.name != VERIFIED
        }
        for name in ("one", "two")
    )
    assert sum(name.endswith("facts.json") for name in one) >= 4
    assert one.items() <= two.items()  # `two` has the corpus of verify, too


def test_a_mistake_is_everyones(words, tmp_path):
    """A folder that is taken, and a corpus that is missing, end both processes with the same line."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    for more, said in (
        ([], "hydra.run.dir"),
        (["data.paths=[missing]", "hydra.run.dir=other"], "missing does not exist"),
    ):
        ends = processes(*words, *more, cwd=tmp_path, count=2, devices=1)
        assert [end.code for end in ends] == [2, 2], ends
        for end in ends:
            assert said in end.stderr
            assert "Traceback" not in end.stderr


def test_elastic(words, tmp_path):
    """One process, then two, told to stop, then three (refused: the batch does not divide), then one: one run, one
    data order."""
    one = ["model.mesh_shape=[[1],[dp]]", "distributed.allow_idle_devices=true"]
    tunix.train([*words, "training.max_steps=2", *one, f"hydra.run.dir={tmp_path}/run"])
    with Processes(
        "resume=run", "training.max_steps=6", "model.mesh_shape=[[-1],[dp]]", folder=tmp_path, count=2
    ) as run:
        run.wait_for_text("resumed at step 2, sample 8")
        run.started[1].send_signal(signal.SIGTERM)  # before a first step that is not step 1
        ends = run.ends()
        assert [end.code for end in ends] == [75] * 2, ends[0].stderr
        assert re.search(r"SIGTERM: saved after step [345];", ends[0].stdout)
        assert "4 sequences = 2 microbatch(es) x 2 data shard(s)" in ends[0].stdout
    with Processes("resume=run", "training.max_steps=6", folder=tmp_path, count=3) as run:
        ends = run.ends()
        assert [end.code for end in ends] == [2] * 3
        assert all("training.global_batch_size=4 is not divisible by 3" in end.stderr for end in ends)
    done = cli_here("resume=run", "training.max_steps=6", *one, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tunix.train([*words, "training.max_steps=6", *one, f"hydra.run.dir={tmp_path}/whole"])
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.nightly
def test_a_sweep(words, tmp_path):
    """Each point once, one after the other."""
    words = [word for word in words if not word.startswith("hydra.run.dir")]
    sweep = ["--multirun", "training.max_steps=1,2", "hydra.sweep.dir=sweep", "model.mesh_shape=[[-1],[dp]]"]
    with Processes(*words, *sweep, folder=tmp_path, count=2, fork=False) as run:  # a fork has one spare child
        ends = run.ends()
    assert [end.code for end in ends] == [0, 0], ends[0].stderr
    assert ends[0].stdout.count("sweep job") == 2
    assert [len(metrics(tmp_path / "sweep" / point)) for point in "01"] == [1, 2]
    assert [(tmp_path / "sweep" / point / "checkpoints" / last).is_dir() for point, last in ("01", "12")] == [True] * 2


def test_different_configs_and_code_are_refused(words, tmp_path):
    other = tmp_path / "other"
    for name in ("tunix", "conf", "run_training.py"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, other / name)
    with (other / "tunix" / "training" / "loss.py").open("a") as file:
        file.write("# a change\n")
    with Processes(*words, folder=tmp_path, count=2, own=["seed=0", "seed=1"], roots=[ROOT, other]) as run:
        ends = run.ends()
    assert [end.code for end in ends] == [2, 2]
    assert "seed is 0 on process 0" in ends[1].stderr
    assert "and 1 on process 1" in ends[0].stderr
    assert all("the processes differ: code of tunix is " in end.stderr for end in ends)
    assert not (tmp_path / "run").exists()


def test_a_process_that_never_comes(words, tmp_path):
    stays_away = ["", "distributed.process_id=9"]
    with Processes(*words, "distributed.init_timeout_s=3", folder=tmp_path, count=2, own=stays_away) as run:
        ends = run.ends(120)
    assert [end.code for end in ends] == [76, 2]
    assert "processes [1] of 2 did not come, only 0 (" in ends[0].stderr


@pytest.mark.parametrize("refused", [0, 1])
def test_a_wrong_config_of_one_process_ends_all(refused, words, tmp_path):
    own = ["dry_run=wrong" * (rank == refused) for rank in range(2)]
    with Processes(*words, folder=tmp_path, count=2, own=own) as run:
        ends = run.ends(120)
    assert [end.code for end in ends] == [2, 2]
    assert f": process {refused} (" in ends[1 - refused].stderr
    assert all("dry_run=wrong" in end.stderr for end in ends)


COUNTING = """
import sys
sys.path.insert(0, {root!r})
from tunix.huggingface.weights import TensorFiles
read, seen = TensorFiles.read, []
def counted(*args):
    seen.append(read(*args))
    print("weights read:", sum(part.nbytes for part in seen))
    return seen[-1]
TensorFiles.read = counted
import run_training
sys.exit(run_training.main())
"""


@pytest.mark.nightly
def test_two_processes_tune_a_pretrained_model(hf_dir, corpus, tmp_path):
    """Each reads its slices alone; the frozen base is quantized as one process does it, and it goes out whole."""
    tuning = [
        f"model.init_from={hf_dir}", "model.lora.rank=2", "model.lora.quantize_base=int8", "data=text", f"data.paths=['{corpus}']",
        "training.seq_len=32", "training.loss_chunk_size=32", "training.micro_batch_size=2", "training.mixed_precision=fp32",
        "training.max_steps=3", "logging.every_steps=1", "evaluation.num_sequences=4", "evaluation.sample_tokens=0",
        "model.mesh_shape=[[2],[fsdp]]", "hydra.run.dir=run",
    ]  # fmt: skip
    (tmp_path / "one").mkdir()
    (tmp_path / "counting.py").write_text(COUNTING.format(root=str(ROOT)))
    done = cli_here(*tuning, cwd=tmp_path / "one", devices=2)
    assert done.returncode == 0, done.stderr
    with Processes(*tuning, folder=tmp_path, count=2, script=str(tmp_path / "counting.py")) as run:
        ends = run.ends()
    assert [end.code for end in ends] == [0, 0], "".join(end.stderr for end in ends)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one" / "run"), rel=1e-5)
    whole = sum(path.stat().st_size for path in hf_dir.glob("*.safetensors"))
    for end in ends:
        read = int(re.findall(r"weights read: (\d+)", end.stdout)[-1])
        assert 0.4 * whole < read < 0.52 * whole
    models = []
    for folder in (tmp_path, tmp_path / "one"):
        export(
            read_settings(
                Export, [f"checkpoint={folder / 'run'}", f"output={folder / 'out'}", "dtype=float32", "merge_lora=true"]
            )
        )
        models.append(load_file(folder / "out" / "model.safetensors"))
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        np.testing.assert_allclose(tensor, models[1][name], atol=1e-5, err_msg=name)
