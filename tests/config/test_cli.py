"""The command line as a user meets it: real processes, exit codes, what is on the terminal and on the disk."""

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from support.devices import xla_flags
from support.forks import Started, start
from support.harness import ONE_LAYER, ROOT, RUN, cli, cli_here, errors, experts, metrics, run_python
from support.rollouts import TASK

from tunix.config import Average, Evaluate, Export, Generate, Play, Samples, Serve
from tunix.config.command_line import describe_command, print_warnings
from tunix.config.compose import build, compose, compose_overrides, to_yaml
from tunix.config.mistakes import list_keys


@pytest.fixture
def words(corpus) -> list[str]:
    return [*RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']"]


def assert_refused(done: subprocess.CompletedProcess, message: str, folder: Path) -> None:
    """Exit code 2, one message, no traceback, nothing written."""
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert re.fullmatch(r"error: [^\n]*\n", done.stderr), done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (['model.mesh_shape=[[3,2],["fsdp","tp"]]'], "fsdp=3 x tp=2 needs 6 devices, 8 are visible; legal here: [[4,2]"),
        (['model.mesh_shape=[[8,2],["fsdp","tp"]]'], "needs 16 devices, 8 are visible"),
        (['model.mesh_shape=[[1,8],["fsdp","tp"]]'], "model.num_heads=4 is not divisible by mesh axis tp=8 (nearest tp: 1, 2 or 4); legal here: [[2,4]"),
        (["training.global_batch_size=12"], "training.global_batch_size=12 is not divisible by 8"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_input(more, message, words, tmp_path):
    assert_refused(cli(*words, *more, cwd=tmp_path), message, tmp_path)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["data.paths=[/nowhere]"], "data.paths: /nowhere does not exist"),
        (
            ["--multirun", "optimizer.learning_rate=interval(0.1,1)"],
            "a sweep tries listed values, like optimizer.learning_rate=0.1,0.2",
        ),
        (["--multirun", "training.seq_len=abc,def"], "training.seq_len=abc: expected a whole number"),
        (["--cfg", "job", "modl=1"], "unknown key modl; did you mean model?"),
        (
            ["--cfg", "job", "-p", "nothing"],
            "--package nothing: --cfg job has no such section, or it is null; leave --package out",
        ),
        (
            ["--cfg", "hydra", "-p", "run"],
            "--package run: --cfg hydra has no such section, or it is null; did you mean hydra.run?",
        ),
        (["resume=nowhere"], "resume=nowhere: nowhere is not a run's folder"),
        (["model.init_from=latest"], "model.init_from=latest: there is no outputs/"),
        (["training.micro_batchsize=4"], "did you mean training.micro_batch_size?"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_input_that_composing_finds(more, message, words, tmp_path):
    assert_refused(cli_here(*words, *more, cwd=tmp_path), message, tmp_path)


@pytest.mark.parametrize("words", [["tunix.evaluate", "chekpoint=x"], ["tunix", "plan", "modl=x"]], ids=" ".join)
def test_a_mistake_is_found_before_jax_is_imported(words, tmp_path):
    done = run_python("-X", "importtime", "-m", *words, cwd=tmp_path, fork=False)
    assert done.returncode == 2
    assert "; did you mean " in done.stderr
    assert " jax\n" not in done.stderr


def test_a_first_word_that_is_no_command(tmp_path):
    done = cli_here("trian", cwd=tmp_path)
    assert_refused(done, "error: there is no command trian; choose from train, plan, ", tmp_path)
    assert done.stderr.endswith("did you mean train?\n")


def test_cfg_job_shows_everything(tmp_path):
    shown = cli("--cfg", "job", cwd=tmp_path, fork=False).stdout
    for text in ("sharding_strategy: full_shard", "mesh_shape: auto", "learning_rate: 0.015", "decode_errors: skip"):
        assert text in shown
    assert list(tmp_path.iterdir()) == []


def test_help_and_info(tmp_path):
    shown = cli_here("--help", cwd=tmp_path).stdout
    assert "gemma3_1b" in shown
    assert "docs/config.md" in shown
    listed = re.findall(r"^([\w/]+): ([\w.]+)", shown.partition("== Config ==")[0], re.M)
    assert len(listed) > 20
    for group, option in listed:
        if group.startswith(("command", "model/family", "saved", "task/keys", "data/keys")):
            with pytest.raises(ConfigCompositionException):
                compose_overrides([f"{group}={option}"])
        else:
            compose_overrides([f"{'+' if group == 'experiment' else ''}{group}={option}"])
    assert "tiny" in cli_here("--info", "defaults", cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("section", [Average, Evaluate, Export, Generate, Play, Samples, Serve])
def test_help_of_a_command_with_keys_of_its_own(section, monkeypatch):
    """It fits into the terminal, and says what each key is where nobody types it."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = describe_command(section, "python -m tunix.NAME key=value ...").splitlines()
    assert max(map(len, lines)) <= 80
    written = {line.strip() for line in lines if re.match(r"  \S", line)}
    assert len(written) == len([*list_keys(section)])
    assert written & {"checkpoint", "run", "checkpoint=null"}  # a key without a default must be typed
    assert section is not Generate or {"max_new_tokens=128", "temperature=0.8", "chat=false", "stop=[]"} <= written


PRINTS = """
import sys
from tunix.processes import exits
sys.exit(exits.report_errors(lambda: [print("x" * 1000, file=sys.{stream}) for _ in range(99)] and 3))
"""


@pytest.mark.parametrize(
    ("words", "stderr", "code"),
    [
        (["run_training.py", "--help"], subprocess.PIPE, 0),
        (["run_training.py", "nonsense"], subprocess.STDOUT, 2),
        (["-c", PRINTS.format(stream="stdout")], subprocess.PIPE, 3),
        (["-c", PRINTS.format(stream="stderr")], subprocess.STDOUT, 3),
    ],
    ids=["help", "mistake", "stdout", "stderr"],
)
def test_output_that_nobody_reads(words, stderr, code):
    """`run_training.py --help | head` ends quietly where `head` leaves before all is written; exit codes stay."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, *words], cwd=ROOT, stdout=write_end, stderr=stderr, text=True, check=False)
    os.close(write_end)
    lines = [line for line in (done.stderr or "").splitlines() if not line.startswith("importing tunix: ")]  # if busy
    assert (done.returncode, lines) == (code, [])


def test_warnings_of_a_command_are_their_text_alone(monkeypatch, capsys):
    """Whatever a library, like orbax, has set up before."""
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        logging.basicConfig()
        print_warnings()
        logging.getLogger("tunix.data.dataset").warning("corpus: left out")
    assert capsys.readouterr().err == "corpus: left out\n"


@pytest.mark.nightly
def test_a_sweeps_jobs_never_share_a_folder(words, tmp_path):
    done = cli_here(*words, "--multirun", "training.max_steps=1,2", "seed=1", cwd=tmp_path, devices=1)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "tunix" / "multirun").glob("*/*")
    assert [len(metrics(sweep / job)) for job in ("0", "1")] == [1, 2]
    assert (sweep / "1" / "checkpoints" / "2").is_dir()
    assert "max_steps: 2" in (sweep / "1" / "config.yaml").read_text()
    assert "seed: 1" in (sweep / "0" / "config.yaml").read_text()


@pytest.mark.nightly
def test_a_sweep_goes_on_past_a_point_that_fails(words, tmp_path):
    """The first diverges, the second meets its time limit."""
    words = [*words, "--multirun", "hydra.sweep.dir=it", "scheduler=constant"]
    done = cli(*words, "scheduler.warmup_ratio=0", "training.max_skipped_steps=0", "optimizer=sgd",
               "optimizer.learning_rate=1e38,1e-3", "training.time_limit_s=1000,0.001", cwd=tmp_path, devices=1)  # fmt: skip
    told = re.findall(r"sweep job (\d) ended with exit code (\d+)", done.stdout)
    assert told == [("0", "77"), ("1", "75"), ("3", "75")]
    assert done.returncode == 77, done.stderr
    assert metrics(tmp_path / "it" / "2")[-1]["step"] == 6


@pytest.mark.parametrize(("codes", "told"), [([77, 0], 77), ([75], 75)])
def test_a_sweep_of_several_processes_has_a_child_for_each_point(codes, told, words, tmp_path, monkeypatch):
    """A point that diverges ends alone; a stop ends the sweep. The children are stand-ins here."""
    children = []

    def supervise(_: object) -> int:
        children.append(sys.argv[1:])
        return codes[len(children) - 1]

    monkeypatch.setattr("tunix.processes.supervisor.supervise", supervise)
    two = ["distributed.coordinator_address=localhost:1", "distributed.num_processes=2", "distributed.process_id=0"]
    sweep = ["--config-dir", str(tmp_path), "-m", "training.max_steps=1,2", "hydra.sweep.dir='the sweep'"]
    done = cli_here(*words, *two, *sweep, cwd=tmp_path)
    assert done.returncode == told, done.stderr
    assert len(children) == len(codes)
    for number, child in enumerate(children):
        assert child[:2] == ["--config-dir", str(tmp_path)]
        assert f"training.max_steps={number + 1}" in child
        job = compose([word for word in child[2:] if not word.startswith("hydra.searchpath")])
        assert job.run_dir == tmp_path / "the sweep" / str(number)
        assert job.config.distributed.num_processes == 2


def test_a_sweep_is_refused_before_its_first_point(words, tmp_path):
    done = cli_here(*words[:-1], "--multirun", f"{words[-1]},[/nowhere]", "hydra.sweep.dir=it", cwd=tmp_path)
    assert_refused(done, "data.paths: /nowhere does not exist", tmp_path)
    sweep = [*words, "--multirun", "seed=1,2", "hydra.sweep.dir=it", "checkpoint.folder=home"]
    done = cli_here(*sweep, cwd=tmp_path)  # the first point would train, and take it from all others
    assert_refused(done, "/home has the checkpoints of several points of the sweep", tmp_path)


def test_a_dry_sweep_writes_nothing(words, tmp_path, monkeypatch):
    monkeypatch.setattr("tunix.processes.supervisor.run_member", lambda *_: 0)
    dry = ["--multirun", "dry_run=true", "seed=1,2", "evaluation.sets.more=text", "evaluation.sets.more.paths=[/x]"]
    done = cli_here(*words, *dry, "hydra.sweep.dir=it", "checkpoint.folder=home/${seed}", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("sweep job"), done.stderr) == (0, 2, "")
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_is_given_twice_in_a_sweep_is_named(words, tmp_path, monkeypatch):
    """Hydra takes the last one, so that only one point is left here."""
    monkeypatch.setattr("tunix.processes.supervisor.run_member", lambda *_: 0)
    done = cli_here(*words, "--multirun", "dry_run=true", "seed=1,2", "seed=3", cwd=tmp_path)
    assert "seed is given 2 times: the last value counts, 3\nsweep job 0: " in done.stdout


@pytest.mark.parametrize("error", ["", "ValueError: odd"])
def test_an_error_in_a_point_of_a_sweep_ends_it_at_once(error, words, tmp_path, monkeypatch):
    """Hydra by itself runs the other points first."""

    def run_member(*_: object) -> int:
        raise ValueError("odd")

    monkeypatch.setattr("tunix.processes.supervisor.run_member", run_member)
    if not error:
        (tmp_path / "it" / "0").mkdir(parents=True)
        (tmp_path / "it" / "0" / "config.yaml").touch()
    done = cli_here(*words, "--multirun", "seed=1,2", "hydra.sweep.dir=it", cwd=tmp_path)
    assert done.stdout.count("sweep job") == 1
    assert (done.returncode, "it/0 holds another run" in done.stderr) == ((1, False) if error else (2, True))
    assert error in done.stderr


def test_a_sweep_into_a_folder_that_cannot_be_written(words, tmp_path):
    done = cli_here(*words, "--multirun", "seed=1,2", "hydra.sweep.dir=/proc/x", cwd=tmp_path)
    assert_refused(done, "the sweep's folder /proc/x cannot be written", tmp_path)


def test_cfg_job_of_a_run_that_is_resumed(words, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(compose([*words, "optimizer=lion"]).config))
    shown = cli_here("--cfg", "job", f"resume={tmp_path}", "seed=7", cwd=tmp_path).stdout
    assert compose([f"resume={tmp_path}", "seed=7"]).config == build(OmegaConf.to_container(OmegaConf.create(shown)))


@pytest.mark.nightly
def test_a_saved_run_replays_and_reads_its_programs(words, tmp_path, monkeypatch):
    """The second start finds the step that the first one compiled, and takes it to the same digits.

    Both write into their folders and the cache alone, beside the link to the last run.
    """
    for name in ("HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in list(os.environ):
        if "COMPILATION_CACHE" in name or "PERSISTENT_CACHE" in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # a quiet machine compiles it in 0.4 s
    words = [*words, f"loading.cache_dir={tmp_path / 'cache'}"]
    cli(*words, "hydra.run.dir=first", "training.max_steps=2", cwd=tmp_path, devices=1)
    again = cli(
        "--config-path",
        str(tmp_path / "first"),
        "--config-name",
        "config",
        "hydra.run.dir=again",
        cwd=tmp_path,
        devices=1,
    )
    assert again.returncode == 0, again.stderr
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("first", "again")]
    assert losses[0] == losses[1]
    first, second = ((tmp_path / name / "train.log").read_text() for name in ("first", "again"))
    assert "step compiled in" in first
    assert "step read from the compile cache in" in second
    for log in (first, second):
        assert re.search(
            r"ready for the first step after [\d.]+ s: program .*, data .*, checks .*, state .*, step ", log
        )
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"first", "again", "cache", "outputs", "HOME", "TMPDIR"}
    found = [path for name in ("HOME", "TMPDIR", "outputs") for path in (tmp_path / name).rglob("*")]
    assert [path.name for path in found] == ["tunix", "latest"]


@pytest.mark.nightly
def test_quick_test(tmp_path):
    done = cli(
        "+experiment=quick_test", cwd=tmp_path, devices=1, optimized=True, fork=False
    )  # 20 steps of a model of real size
    assert done.returncode == 0, done.stderr
    assert "step 20/20" in done.stdout
    assert "after >>>" in done.stdout


@pytest.mark.nightly
def test_the_default_job_learns(tmp_path):
    """`python run_training.py`, cut to a quarter of its steps: held-out bits per byte go well below the unigram entropy.

    They went 23.5 % below it (jax 0.10.2, the corpus of Python 3.11); all 460 steps take four times as long for 35 %.
    """
    words = ["training.max_steps=120", "evaluation.every_steps=40"]
    done = cli(*words, cwd=tmp_path, devices=1, timeout=2700, optimized=True, fork=False)
    assert done.returncode == 0, done.stderr
    below = re.search(
        r"held out: ([\d.]+) bits per byte; unigram entropy of the corpus: ([\d.]+); ([\d.]+) % below", done.stdout
    )
    assert below is not None
    assert float(below[3]) >= 22
    assert float(below[1]) <= 0.78 * float(below[2]) + 0.001
    folder = tmp_path / "outputs" / "tunix" / "latest"
    losses = [line["loss"] for line in metrics(folder, "held_out")]
    assert len(losses) == 3
    assert losses[0] - 0.3 > losses[1] > losses[2] + 0.1  # they were 5.98, 5.39 and 5.14: it has not stopped to learn
    assert (folder / "checkpoints").is_dir()


@pytest.fixture(scope="module")
def untouched(corpus, tmp_path_factory) -> tuple[list[str], dict[int, float]]:
    """A run that nothing happens to: its words, and the loss of each step."""
    words = [*RUN, *ONE_LAYER, "data=text", f"data.paths=['{corpus}']", "training.max_steps=28", "checkpoint.save_every_steps=2",
             "evaluation.every_steps=10", "logging.every_steps=100"]  # fmt: skip
    folder = tmp_path_factory.mktemp("untouched")
    cli(*words, "hydra.run.dir=whole", cwd=folder, devices=2)
    return words, {line["step"]: line["loss"] for line in metrics(folder / "whole")}


@pytest.mark.nightly(but=["0"])
@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(2))
def test_kill_9_at_a_random_moment_and_resume(attempt, untouched, tmp_path):
    """Killed as often as it takes, the run comes to the digits of one that was never touched."""
    words, expected = untouched
    assert len(expected) == 28
    kill_until_done(words, expected, random.Random(attempt), 2 + attempt, tmp_path)


# Kinds of runs with data and steps of their own.
SUMS = ["data=arithmetic", "data.below=10", "data.wrong_share=0.5", "loading.packing=pad"]
KILLED = {
    "sft": ["task=sft", *SUMS[:2]],
    **{task: [f"task={task}", *SUMS] for task in ("dpo", "kto", "reward")},
    "embed": ["task=embed", "task.negatives=1", "data=pairs", "data.paths=[rows.jsonl]", "loading.packing=pad"],
    "refill": ["task.refill=2", "task.curriculum.solved=0.75", "task.rewards=[support.own_reward:some_letters]"],
    "ahead": ["task.staleness=1"],
    "mtp": [
        "data=synthetic", "model=glm4_5_air", "model.rotated_dim=4", "model.sliding_window=null", "model.global_every=1",
        experts(), "model.mtp={loss_weight: 0.3}",
    ],
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", KILLED)
def test_kill_9_in_each_kind_of_run(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests")  # rewards of the tests
    texts = [{"prompt": f"{n} + 1", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    of_answers = ("task=", "task.re", "task.gr", "sampling", "evaluation", "data")
    shared = TASK if name in ("refill", "ahead") else [word for word in TASK if not word.startswith(of_answers)]
    words = [
        *shared,
        *KILLED[name],
        "training.max_steps=12",
        "evaluation.every_steps=null",
        "evaluation.sample_tokens=0",
    ]
    whole = cli(*words, "hydra.run.dir=whole", cwd=tmp_path, devices=2)
    assert whole.returncode == 0, whole.stderr
    expected = {line["step"]: line["loss"] for line in metrics(tmp_path / "whole")}
    assert len(expected) == 12
    kill_until_done(words, expected, random.Random(0), 2, tmp_path)


def kill_until_done(
    words: list[str], expected: dict[int, float], rng: random.Random, most: int, tmp_path: Path
) -> None:
    """Kill a run `most` times, each time within a third of its steps, and compare the losses of all steps."""
    folder, kills, stretch = tmp_path / "part", 0, max(1, len(expected) // 3 - 1)
    first = [*words, "hydra.run.dir=part"]
    while True:
        out, environment = tmp_path / "output", {**os.environ, "XLA_FLAGS": xla_flags(2)}
        command = [str(ROOT / "run_training.py"), *(["resume=part"] if (folder / "config.yaml").exists() else first)]
        process = start(command, tmp_path, environment, out, tmp_path / "errors")
        if kills < most:
            wait_for_step(folder, process, kills * stretch + rng.randint(1, stretch))
            time.sleep(rng.random() * 0.2)
            process.send_signal(signal.SIGKILL)
        process.wait(300)
        output = out.read_text() + (tmp_path / "errors").read_text()
        kills += 1
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, output
    found: dict[int, float] = {}
    for line in metrics(folder):
        assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    assert found == expected
    assert kills > most


def wait_for_step(folder: Path, process: Started | subprocess.Popen, step: int) -> None:
    deadline = time.monotonic() + 300
    while process.poll() is None:
        assert time.monotonic() < deadline
        if (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in complete_lines(folder)):
            return
        time.sleep(0.01)


def complete_lines(folder: Path) -> list[dict]:
    try:
        return metrics(folder)
    except ValueError:  # the last line is being written
        return []


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a tmpfs of some MiB; None where this user may not."""
    mounted = []

    def mount(options: str) -> Path | None:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode:
            return None
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_read_only_disk(words, small_disk):
    disk = small_disk("ro,size=1m")
    if disk is None:
        pytest.skip("NOT TESTED: mounting a tmpfs needs root")
    done = cli(*words, cwd=disk, devices=1)
    assert_refused(done, "cannot be written (Read-only file system); choose hydra.run.dir=DIR", disk)


@pytest.mark.nightly(but=["8-make room and go on with resume="])
@pytest.mark.parametrize(("left", "hint"), [(0, "choose hydra.run.dir=DIR"), (8, "make room and go on with resume=")])
def test_a_disk_that_is_full_at_the_start(left, hint, words, small_disk):
    """With so many KiB left there is no place for config.yaml, or for what comes after it; what the line says works."""
    disk = small_disk("size=1m")
    if disk is None:
        pytest.skip("NOT TESTED: mounting a tmpfs needs root")
    (disk / "filler").write_bytes(b"0" * (2**20 - 1024 * left))
    words = [*words, "hydra.run.dir=run", "training.max_steps=1", "logging.sinks=[jsonl]"]
    done = cli(*words, cwd=disk, devices=1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.fullmatch(r"error: .*cannot be written \(No space left on device\); [^\n]*\n", done.stderr), done.stderr
    assert hint in done.stderr
    (disk / "filler").unlink()
    again = cli_here(*(["resume=run"] if left else words), cwd=disk, devices=1)
    assert again.returncode == 0, again.stderr


def test_a_disk_that_fills_up_keeps_the_last_whole_checkpoint(words, small_disk):
    disk = small_disk("size=5m")
    if disk is None:
        pytest.skip("NOT TESTED: mounting a tmpfs needs root")
    words = [
        *words,
        "model.mlp_dim=1536",
        "training.max_steps=12",
        "checkpoint.save_every_steps=1",
        "checkpoint.max_to_keep=9",
        "hydra.run.dir=run",
    ]
    done = cli(*words, cwd=disk, devices=1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(errors(done)) == 1, done.stderr
    assert "a checkpoint could not be written to" in done.stderr
    assert f"resume={disk}/run" in done.stderr
    whole = [int(step) for step in re.search(r"whole checkpoints: ([\d, ]+)", done.stderr)[1].split(", ")]
    for step in whole[:-1]:
        shutil.rmtree(disk / "run" / "checkpoints" / str(step))  # make room
    resumed = cli(
        "resume=run",
        "checkpoint.max_to_keep=1",
        "checkpoint.keep_best=false",
        "checkpoint.save_every_steps=null",
        cwd=disk,
        devices=1,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed at step {whole[-1]}" in resumed.stdout
    assert metrics(disk / "run")[-1]["step"] == 12


def test_a_stop_signal_before_the_run_began_ends_it_wherever_it_is():
    """Also in a callback whose exceptions Python ignores, as JAX has one in the garbage collector."""
    code = (
        "import gc, os, signal; from tunix.processes import exits; exits.exit_on_stop_signals(); "
        "gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.SIGTERM)); gc.collect(); print('went on')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "SIGTERM before the run began: nothing to save\n")


def test_what_nohup_ignores_stays_ignored():
    code = (
        "import os, signal; from tunix.launch.children import receive_signals; from tunix.processes import exits\n"
        "exits.exit_on_stop_signals()\n"
        "with receive_signals() as received: os.kill(os.getpid(), signal.SIGHUP); print(received)\n"
        "exits.restore_stop_signals(); os.kill(os.getpid(), signal.SIGHUP)"
    )
    ignore = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=ignore)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_stop_signal_while_the_program_is_imported_has_its_exit_code():
    code = (
        "import os, signal, sys, types\n"
        "def find_spec(name, *_):\n"
        "    name == 'hydra' and os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))\n"
        "from run_training import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "SIGUSR1 before the run began: nothing to save\n")
