"""`launcher=slurm`: the script as text, and jobs on a real Slurm of two nodes on this host."""

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from support import installs
from support.harness import PAIR, ROOT, cli, metrics
from support.processes import wait_until

import tunix
from tunix.base.errors import UserError
from tunix.config import compose
from tunix.launch import slurm
from tunix.launch.submission import prepare_folder

SLURM = ["launcher=slurm", "launcher.gpus_per_node=1"]
UP, TASK = ROOT / "tests" / "support" / "slurm_up.sh", ROOT / "tests" / "support" / "slurm_task.py"


def written(*words: str) -> tuple[Path, str]:
    """Run folder and script of a dry run in the current folder."""
    assert slurm.launch(compose.compose(["launcher=slurm", "launcher.dry_run=true", "hydra.run.dir=run", *words])) == 0
    return Path("run").absolute(), Path("run/job.sbatch").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty folder, and no Slurm on the PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_script(here):
    folder, text = written(
        "launcher.nodes=4", "launcher.gpus_per_node=8", "launcher.partition=hopper-prod", "launcher.qos=normal", "run_name=first try",
        "launcher.account=me", "launcher.constraint='a&b'", "launcher.memory=0", "launcher.exclusive=true", "launcher.cpus_per_task=6",
        "launcher.time_limit=72:00:00", "launcher.email=researcher@example.com", 'launcher.tmp_dir=/scratch/$SLURM_JOB_ID',
        "launcher.pre_launch_commands=['module load cuda','ulimit -n 65536']", "launcher.extra_env=['NCCL_DEBUG=WARN','A=b $c']",
        "launcher.container_image='nvcr.io#nvidia/jax'", "launcher.container_mounts='/data:/data,/home:/home'", "launcher.max_requeues=3",
    )  # fmt: skip
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert options == {
        "job-name='first try'", "nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=6", "mem=0", "exclusive",
        "partition=hopper-prod", "qos=normal", "account=me", "constraint='a&b'", "time=72:00:00", "signal=USR1@120", "requeue",
        "mail-user=researcher@example.com", "mail-type=BEGIN,END,FAIL", f"chdir={here}", f"output={folder}/slurm-%j.out",
        "open-mode=append",
    }  # fmt: skip
    for line in (
        "# tunix: first try, 4 nodes, 8 GPUs each, 32 processes.", 'export TMPDIR="/scratch/$SLURM_JOB_ID"', "export NCCL_DEBUG=WARN", "export A='b $c'",
        "module load cuda", "ulimit -n 65536", f"  python3 {ROOT}/run_training.py resume={folder}",
        "srun --kill-on-bad-exit=1 --label --cpus-per-task=6 '--container-image=nvcr.io#nvidia/jax' "
        f"--container-mounts=/data:/data,/home:/home,{folder}:{folder},{ROOT}:{ROOT},{here}:{here} --container-workdir={here} \\",
    ):  # fmt: skip
        assert line in lines, line
    assert '[ "$restarts" -lt 3 ]' in text
    assert subprocess.run(["/bin/bash", "-n", "run/job.sbatch"], capture_output=True, check=True).stderr == b""


def test_null_asks_for_nothing_and_one_process_a_node(here):
    _, text = written("launcher.time_limit=null", "launcher.tasks_per_node=1")
    options = set(re.findall(r"#SBATCH --([a-z-]+)", text))
    assert options == {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "signal",
        "requeue",
        "chdir",
        "output",
        "open-mode",
    }
    assert "--ntasks-per-node=1\n" in text


def test_paths_of_configs_logs_and_scripts(here):
    words = [
        "launcher.configs_path=logs/configs",
        "launcher.logs_path=logs/slurm_logs",
        "launcher.scripts_path=logs/scripts",
    ]
    job = compose.compose(
        ["launcher=slurm", "launcher.dry_run=true", "run_name=team/x", "launcher.train_script=mine.py", *words]
    )
    slurm.launch(job)
    (folder,) = (here / "outputs" / "tunix").glob("*/*")
    (script,), (config,) = (list((here / "logs" / kind).iterdir()) for kind in ("scripts", "configs"))
    assert config.read_text() == (folder / "config.yaml").read_text()
    assert f"--output={here}/logs/slurm_logs/slurm-%j.out" in script.read_text()
    assert f"{here}/mine.py resume={folder}" in script.read_text()


def test_paths_below_home(here, monkeypatch, capsys):
    """No shell expands the ~ of `"launcher.logs_path='~/logs'"`."""
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("python", "train_script", "logs_path", "tmp_dir")
    words = [f"launcher.{key}='~/{key}'" for key in keys]
    slurm.launch(compose.compose(["launcher=slurm", "dry_run=true", *words]))
    text = capsys.readouterr().out
    assert all(f"/home/me/{key}" in text for key in keys)
    assert "~" not in text


def test_the_job_trains_the_saved_config(here):
    """Its launcher is local; everything else is as composed, and `resume=` reads it."""
    folder, text = written("training.max_steps=7", "optimizer=lion")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["launcher"] == {"name": "local"}
    assert (saved["training"]["max_steps"], saved["optimizer"]["name"]) == (7, "lion")
    job = compose.compose([re.search(r"resume=\S+", text)[0]])
    assert (job.run_dir, job.config.launcher.name, job.config.training.max_steps) == (folder, "local", 7)
    assert (folder / ".hydra" / "overrides.yaml").exists()


def test_a_run_goes_on_as_a_job(here):
    """resume=RUN_DIR/checkpoints/STEP starts there once; queued again, it takes the newest. A start that ended before it
    put the newer checkpoint aside was none: the run would go on from that one."""
    folder, _ = written("optimizer=lion")
    (folder / "checkpoints" / "30").mkdir(parents=True)

    def submit() -> str:
        words = ["resume=run/checkpoints/30", "training.max_steps=9", "launcher=slurm", "launcher.dry_run=true"]
        slurm.launch(compose.compose(words))
        lines = (folder / "job.sbatch").read_text().splitlines()
        return next(line for line in lines if "run_training.py" in line and line[0] == " ").split("run_training.py ")[1]

    def start(words: str, restarts: int) -> str:
        command = ["/bin/bash", "-c", f"restarts={restarts}; echo {words}"]
        return subprocess.run(command, env={"PATH": os.defpath}, capture_output=True, text=True, check=True).stdout

    first, newest = f"resume={folder}/checkpoints/30\n", f"resume={folder}\n"
    words = submit()
    assert [start(words, 0), start(words, 1)] == [first, newest]
    newer = folder / "checkpoints" / "60"
    newer.mkdir()
    words = submit()
    assert [start(words, 0), start(words, 1)] == [first, first]
    newer.rename(folder / "aside")
    assert start(words, 1) == newest
    newer.mkdir()
    os.utime(newer, (1, 1))  # of another time: the run has written it anew
    assert start(words, 1) == newest
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["training"]["max_steps"], saved["optimizer"]["name"], saved["resume"]) == (9, "lion", None)


def test_a_folder_with_any_name(here):
    names = ["hydra.run.dir='a, (b) 5%j it'", """launcher.tmp_dir='/a `b` "c"'"""]
    slurm.launch(compose.compose(["launcher=slurm", "launcher.dry_run=true", *names]))
    text = Path("a, (b) 5%j it/job.sbatch").read_text()
    line = next(line for line in text.splitlines() if "run_training.py" in line and line[0] == " ")
    shown = subprocess.run(
        ["/bin/bash", "-c", f"printf %s {line.split('run_training.py ')[1]}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert compose.compose([shown.stdout]).run_dir == here / "a, (b) 5%j it"
    assert f"#SBATCH --output='{here}/a, (b) 5%%j it/slurm-%j.out'" in text
    line = next(line for line in text.splitlines() if "TMPDIR=" in line)
    shown = subprocess.check_output(["/bin/bash", "-c", f'{line}; printf %s "$TMPDIR"'], text=True)
    assert shown == '/a `b` "c"'


@pytest.fixture
def say(here):
    """Function that puts a program on the PATH which runs a line of shell."""

    def write(name: str, line: str) -> None:
        (here / "bin").mkdir()
        (here / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (here / "bin" / name).chmod(0o755)

    return write


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("echo JobId=7 JobState=FAILED Restarts=0 ExitCode=2:0", ("FAILED", 2)),
        ("echo JobId=7 JobState=FAILED ExitCode=0:9", ("FAILED", 137)),
        ("echo slurm_load_jobs error: Invalid job id specified >&2", ("COMPLETED", 5)),  # forgotten since its end
        ("echo Unable to contact the controller >&2", ("PENDING", 5)),
    ],
)
def test_what_slurm_says_of_a_job(line, state, say):
    say("scontrol", line)
    assert slurm._read_state("7", 5) == state


def test_a_job_that_is_cancelled_has_not_succeeded(say, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_S", 0)
    say("scontrol", "echo JobState=CANCELLED ExitCode=0:0")
    assert slurm.follow("7", Path("none")) == 1


@pytest.mark.parametrize("said", ["7", "7;far"])
def test_a_job_has_the_number_that_slurm_gives_it(said, say):
    say("sbatch", f"echo '{said}'")
    assert slurm.submit(Path("job.sbatch")) == "7"


def test_dry_run_of_the_training_writes_nothing(here, capsys):
    slurm.launch(compose.compose(["launcher=slurm", "dry_run=true"]))
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            (),
            [
                "gemma3, 999,885,952 parameters",
                r"\[\[4,8\],\[\"dp\",\"fsdp\"\]\] over 32 devices \(gpu\)",
                "= 1 microbatch",
            ],
        ),
        (("training.micro_batch_size=auto", "training.global_batch_size=64"), ["the devices choose the batch"]),
    ],
)
def test_dry_run_of_the_training_shows_its_numbers(words, said, here, capsys):
    run = "launcher=slurm", "launcher.nodes=4", "launcher.gpus_per_node=8", "model=gemma3_1b", "dry_run=true"
    slurm.launch(compose.compose([*run, "model.vocab_size=262144", "model.mesh_shape=[[4,-1],[dp,fsdp]]", *words]))
    report = capsys.readouterr().err
    for text in said:
        assert re.search(text, report), report


@pytest.mark.parametrize(("launcher", "key"), [("slurm", "max_requeues"), ("kubernetes", "max_restarts")])
def test_a_hard_stop_is_not_undone_by_a_new_start(launcher, key):
    needed = ["launcher.image=x", "launcher.volume_claim=y"] if launcher == "kubernetes" else []
    words = [f"launcher={launcher}", *needed, "training.hard_stop=50"]
    with pytest.raises(
        UserError, match=rf"training.hard_stop=50 ends .* launcher.{key}=10 starts it again, past that step; set"
    ):
        compose.compose(words)
    compose.compose([*words, f"launcher.{key}=0"])


def test_no_sbatch(here):
    with pytest.raises(UserError) as error:
        slurm.launch(compose.compose(["launcher=slurm"]))
    assert "there is no sbatch on the PATH" in str(error.value)
    assert list(here.iterdir()) == []


def test_many_processes_do_not_submit_many_jobs(here, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        written()
    assert "submits a run once, but this is process 3 of 8 (RANK and WORLD_SIZE); start it alone" in str(error.value)
    assert list(here.iterdir()) == []


def test_a_folder_that_is_taken(here):
    written()
    with pytest.raises(UserError) as error:
        written()
    assert "holds another run" in str(error.value)


@pytest.mark.nightly
def test_a_sweep_makes_a_job_of_each_point(tmp_path):
    words = ["--multirun", "launcher=slurm", "launcher.dry_run=true", "training.max_steps=5,6"]
    done = cli(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (sweep,) = (tmp_path / "outputs" / "tunix" / "multirun").glob("*/*")
    for number, steps in ((0, 5), (1, 6)):
        assert f"resume={sweep}/{number}\n" in (sweep / str(number) / "job.sbatch").read_text()
        assert f"max_steps: {steps}" in (sweep / str(number) / "config.yaml").read_text()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with two pretended GPUs each."""
    installs.apt(("sbatch", "slurmctld", "slurmd", "munged"), ("slurm-wlm", "munge"))
    if os.getuid():
        pytest.skip("NOT TESTED: a Slurm of one's own needs root")
    root = tmp_path_factory.mktemp("slurm")
    mine = {
        "SLURM_TEST_ROOT": str(root),
        "SLURM_TEST_PORT": str(random.randrange(20000, 30000, 3)),
        "SLURM_CONF": f"{root}/slurm.conf",
    }
    before = {name: os.environ.get(name) for name in mine}
    os.environ.update(mine)
    subprocess.run(["bash", str(UP)], check=True)
    yield root
    subprocess.run(["bash", str(UP), "down"], check=True)
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def submitted(*words: str, cwd: Path) -> str:
    """Number of the job that this command line submits."""
    done = cli(*SLURM, "launcher.time_limit=10", "hydra.run.dir=run", *words, cwd=cwd, devices=1)
    assert done.returncode == 0, done.stderr
    number = re.search(r"submitted job (\d+): 2 nodes, 1 GPU each, 2 processes", done.stdout)[1]
    assert f"tail -F {cwd}/run/slurm-{number}.out" in done.stdout
    return number


def info(number: str) -> dict[str, str]:
    shown = subprocess.run(["scontrol", "show", "job", "-o", number], capture_output=True, text=True, check=True).stdout
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def wait_for_end(number: str, timeout: float = 90) -> dict[str, str]:
    wait_until(lambda: info(number)["JobState"] not in slurm.GOING, "the end of the job", timeout)
    return info(number)


def wait_for_tasks(folder: Path, start: int) -> list[Path]:
    """Until both tasks of this start of the job wait; the files with their process ids."""
    waiting = [folder / f"waiting.{start}.{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in waiting), "its start", 90)
    return waiting


def task(plan: str) -> list[str]:
    return [f"launcher.train_script={TASK}", f"launcher.extra_env=['PLAN={plan}']"]


@pytest.mark.nightly
def test_queued_again_after_each_end_that_deserves_it(cluster, tmp_path):
    """Stopped early, a process lost while another waits for it, a task killed from outside; then done."""
    job = submitted(*task("75,75 wait,76 wait,wait 0,0"), cwd=tmp_path)
    waiting = wait_for_tasks(tmp_path, start=2)
    os.kill(int(waiting[1].read_text()), signal.SIGKILL)
    end = wait_for_end(job)
    output = (tmp_path / "run" / f"slurm-{job}.out").read_text()
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("COMPLETED", "3", "0:0"), output
    codes = re.findall(r"exit code (\d+): queued again, (\d) of 10", output)
    assert codes == [("75", "0"), ("76", "1"), ("137", "2")], output
    starts = [line.split() for line in (tmp_path / "starts.txt").read_text().splitlines()]
    assert [start[0] for start in starts if start[1] == "0"] == ["0", "1", "2", "3"]
    address = f"127.0.0.1:{61440 + int(job) % 4096}"
    assert {tuple(start[2:]) for start in starts} == {(address, f"resume={tmp_path}/run")}
    assert list((tmp_path / "run").glob("exit_codes*")) == []


@pytest.mark.nightly
def test_near_its_end_preempted_and_without_a_node(cluster, tmp_path):
    """Slurm's own reasons to end a job: `--signal` before the time limit, a job of a partition with more rights, a node
    that is gone. Each time it is queued again, once, and starts anew."""
    words = ["launcher.time_limit=2", "launcher.signal_before_end_s=110", *task("wait,wait wait,wait wait,wait 0,0")]
    job = submitted(*words, cwd=tmp_path)
    wait_for_tasks(tmp_path, start=1)  # SIGUSR1 came, up to a minute early
    output = tmp_path / "run" / f"slurm-{job}.out"
    assert "task 1 saves on SIGUSR1" in output.read_text()
    (tmp_path / "urgent").write_text("#!/bin/sh\nsleep 1\n")
    subprocess.run(
        [
            "sbatch",
            "--parsable",
            "--partition=high",
            "--exclusive",
            "--nodes=2",
            "--output=/dev/null",
            tmp_path / "urgent",
        ],
        check=True,
    )
    wait_for_tasks(tmp_path, start=2)
    subprocess.run(["scontrol", "update", "nodename=node1", "state=down", "reason=test"], check=True)
    end = wait_for_end(job)  # the node comes back by itself: its slurmd lives
    assert (end["JobState"], end["Restarts"], end["ExitCode"]) == ("COMPLETED", "3", "0:0"), output.read_text()


@pytest.mark.slow
def test_followed_to_its_end(cluster, tmp_path):
    """launcher.show_logs shows the output and ends with the job's exit code; a mistake is not queued again."""
    words = [*SLURM, "launcher.show_logs=true", "hydra.run.dir=run"]
    done = cli(*words, *task("wait,2"), cwd=tmp_path, devices=1)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "1: start 0 of task 1: 2" in done.stdout
    assert "FAILED, exit code 2" in done.stdout
    job = submitted("launcher.max_requeues=0", "hydra.run.dir=run", *task("75,75"), cwd=(tmp_path / "run"))
    end = wait_for_end(job)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "75:0", "0")


@pytest.mark.slow
def test_slurm_refuses_in_its_own_words(cluster, tmp_path):
    ema = [f"launcher.{key}_path={tmp_path}" for key in ("scripts", "configs", "logs")]
    done = cli(*SLURM, "launcher.partition=hopper-prod", "hydra.run.dir=a/b/run", *ema, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: sbatch refuses the job: ")
    assert "invalid partition specified: hopper-prod" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_training_is_preempted_and_goes_on(cluster, corpus, tmp_path):
    """Two nodes, one process each; told to stop, it saves, is queued again, and comes to the digits of an unbroken run."""
    words = [*PAIR, "data=text", f"data.paths=['{corpus}']", "training.max_steps=150", "evaluation.every_steps=null",
             "checkpoint.save_every_steps=1000", "optimizer.learning_rate=1e-4"]  # fmt: skip
    job = submitted(*words, cwd=tmp_path)
    file = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: file.exists() and file.read_text().count("\n") >= 2, "its second start", 180)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    end = wait_for_end(job, 180)
    output = (tmp_path / "run" / f"slurm-{job}.out").read_text()
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), output
    assert "exit code 75: queued again" in output
    assert "0: resumed at step" in output
    steps = [line["step"] for line in metrics(tmp_path / "run")]
    assert steps == list(range(1, 151))
    tunix.train([*words, f"hydra.run.dir={tmp_path}/whole", "distributed.allow_idle_devices=true"])
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("before", ["notes/results.csv", None])
def test_a_submission_that_is_refused_leaves_what_was_in_the_folder(here, before):
    """The folder itself goes only where it is empty then."""
    if before is not None:
        Path("mine", before).parent.mkdir(parents=True)
        Path("mine", before).write_text("kept")

    def submit() -> None:
        with prepare_folder(compose.compose(["hydra.run.dir=mine"])) as folder:
            (folder / "job.sbatch").write_text("job")
            raise UserError("no partition")

    with pytest.raises(UserError, match="no partition"):
        submit()
    found = {path.relative_to("mine").as_posix() for path in Path("mine").rglob("*") if path.is_file()}
    assert found == ({before} if before else set())
    assert Path("mine").exists() == (before is not None)


def test_a_refused_resume_leaves_the_script_of_the_last_job(here):
    folder, _ = written("launcher.configs_path=configs")
    (folder / ".hydra" / "overrides.yaml").write_text("[]")
    Path("bin").mkdir()
    Path("bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    Path("bin/sbatch").chmod(0o755)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    job = compose.compose(["resume=run", "launcher=slurm", "launcher.nodes=4", "launcher.configs_path=configs"])
    with pytest.raises(UserError, match="sbatch refuses the job: invalid partition"):
        slurm.launch(job)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert len(list(Path("configs").iterdir())) == 1


@pytest.mark.parametrize(
    "word",
    [
        *(
            "launcher.memory=10Q",
            "launcher.memory=1.5G",
            "launcher.memory=256Gi",
        ),  # sbatch: Invalid --mem specification
        *("kubernetes.memory=64GB", "kubernetes.cpu=many", "kubernetes.shared_memory=1T5"),
    ],
)
def test_sizes_that_the_cluster_would_refuse(word):
    launcher = ["launcher=slurm"]
    if word.startswith("kubernetes"):
        launcher = ["launcher=kubernetes", "launcher.image=x", "launcher.volume_claim=y"]
    key, _, value = word.replace("kubernetes", "launcher").partition("=")
    with pytest.raises(UserError, match=rf"{key}={value}: expected"):
        compose.compose([*launcher, f"{key}={value}"])
