"""`launcher=ray`: what it would start, and runs on a real Ray cluster of two nodes on this host."""

import os
import re
import signal
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support.devices import xla_flags
from support.forks import start
from support.harness import PAIR, ROOT, metrics
from support.processes import Processes

import tunix.launch
from tunix.base.errors import UserError
from tunix.config import compose
from tunix.launch import ray

RAY = ["launcher=ray", "launcher.gpus_per_node=0", "hydra.run.dir=run"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_prints_what_would_start(here, capsys):
    words = [
        "launcher=ray", "launcher.nodes=4", "launcher.min_nodes=1", "launcher.gpus_per_node=8", "launcher.cpus_per_task=2",
        "launcher.resources=['accelerator_type:H100=0.001']", "launcher.extra_env=['NCCL_DEBUG=WARN','A=b $c']",
        "model.mesh_shape=[[-1,8],[fsdp,tp]]", "model.num_heads=8", "model.num_kv_heads=8", "training.global_batch_size=64",
        "dry_run=true", "hydra.run.dir=my run",
    ]  # fmt: skip
    assert ray.launch(compose.compose(words)) == 0
    text = capsys.readouterr().out
    assert text.startswith("# 4 nodes, 8 GPUs each, 32 processes.")
    shown = yaml.safe_load(text)
    assert shown["nodes"] == [4, 2, 1]  # a batch of 64 is not divisible by three nodes
    assert shown["bundle"] == {"CPU": 16, "GPU": 8, "accelerator_type:H100": 0.001}
    assert shown["environment"] == {"NCCL_DEBUG": "WARN", "A": "b $c"}
    assert "--grace_s=30" in shown["python"]
    assert shown["python"][-4:] == ["--label", "-m", "tunix", f"resume='{here}/my run'"]
    assert list(here.iterdir()) == []


def test_nodes_for_a_batch_of_tokens_and_without_gpus():
    words = ["launcher.min_nodes=1", "launcher.train_script='~/task.py'", "training.global_batch_tokens=65536"]
    cfg = compose.compose([*RAY, *words, "launcher.extra_env=['JAX_PLATFORMS=tpu']"]).config
    assert ray.list_sizes(cfg, cfg.launcher) == [2, 1]
    assert ray.make_bundle(cfg.launcher) == {"CPU": cfg.launcher.cpus_per_task * cfg.launcher.tasks}
    assert ray.make_environment(cfg.launcher) == {"JAX_PLATFORMS": "tpu"}
    assert ray.make_environment(compose.compose(RAY).config.launcher) == {"JAX_PLATFORMS": "cpu"}
    assert str(Path("~/task.py").expanduser()) in ray.make_command(cfg.launcher, 0, 2, ("a", 5), Path("run"), None)
    assert ray.make_command(cfg.launcher, 0, 2, ("a", 5), Path("run"), 3)[-1] == "resume=run/checkpoints/3"


def test_what_cannot_run_is_refused(here, monkeypatch):
    def refused(*words: str) -> str:
        with pytest.raises(UserError) as error:
            ray.launch(compose.compose([*RAY, *words]))
        return str(error.value)

    assert "launcher.min_nodes=1 needs training.global_batch_size" in refused("launcher.min_nodes=1")
    fixed = ["launcher.min_nodes=1", "training.global_batch_size=64"]
    two = refused("model.mesh_shape=[[2],[fsdp]]", *fixed)
    assert "launcher.min_nodes=1: the run does not fit: model.mesh_shape fsdp=2 needs 2 devices, 1 are" in two
    assert "launcher.address=127.0.0.1:1: [Errno 111]" in refused("launcher.address=127.0.0.1:1")
    monkeypatch.setattr(ray, "find_spec", lambda name: None)
    assert "launcher=ray needs the package ray: pip install 'tunix-trainer[ray]'" in refused()
    assert list(here.iterdir()) == []


@pytest.fixture
def starts(here, monkeypatch):
    """Return a function that launches a run whose starts end as told: the step with which each has begun, and the end.

    An end is its exit code and whether the user has asked for it, or an error: then there are no nodes for that start.
    """
    (here / "run" / "checkpoints" / "2").mkdir(parents=True)
    (here / "run" / "checkpoints" / "4").mkdir()

    def launch(ends: list[tuple[int, bool] | UserError], *words: str, step: int | None = None):
        begun: list[int | None] = []

        def take_nodes(*_: object) -> list[str]:
            if isinstance(ends[len(begun)], UserError):
                raise ends[len(begun)]
            return ["node"]

        def run_once(_launcher: object, nodes: object, folder: Path, step: int | None, _received: object):
            begun.append(step)
            if len(begun) == 2 and (folder / "checkpoints" / "4").is_dir():  # it trains: what is newer is put aside
                (folder / "checkpoints" / "4").rename(folder / "aside")
            return ends[len(begun) - 1]

        cluster = SimpleNamespace(connect=nullcontext, take_nodes=take_nodes, Node=str)
        monkeypatch.setattr(tunix.launch, "ray_cluster", cluster, raising=False)
        monkeypatch.setattr(ray, "_run_once", run_once)
        monkeypatch.setattr(ray.submission, "prepare_folder", lambda job: nullcontext(here / "run"))
        job = replace(compose.compose([*RAY, *words]), resume_step=step)
        return begun, ray.launch(job)

    return launch


KILLED, LOST, STOPPED = (137, False), (76, False), (75, False)


@pytest.mark.parametrize(
    ("words", "ends", "code"),
    [
        ([], [KILLED, LOST, STOPPED, (0, False)], 0),
        ([], [(77, False)], 77),
        ([], [LOST, (75, True)], 75),
        ([], [LOST, UserError("no nodes")], 76),
        (["launcher.max_restarts=1"], [LOST, LOST], 76),
        (["training.time_limit_s=60"], [LOST, STOPPED], 75),
        (["training.hard_stop=2"], [LOST, STOPPED], 75),
    ],
    ids=["lost", "diverged", "a signal", "no nodes", "too often", "its time is over", "its last step"],
)
def test_ends_behind_which_a_run_starts_again(words, ends, code, starts, capsys):
    begun, found = starts(ends, *words)
    assert (len(begun), found) == (sum(not isinstance(each, UserError) for each in ends), code)
    assert ("launcher.max_restarts=1 are used up" in capsys.readouterr().err) == bool(words and "max" in words[0])


@pytest.mark.parametrize(("step", "steps"), [(2, [2, 2, None, None]), (4, [4, None, None, None])])
def test_a_start_that_came_to_no_step_begins_where_the_user_said(step, steps, starts):
    """The second one has put the newer steps aside; from then on each goes on from the newest. So it is from the second
    start on where nothing is newer."""
    begun, _ = starts([LOST, LOST, LOST, (0, False)], step=step)
    assert begun == steps


@pytest.fixture
def cluster(cache_dir, monkeypatch):
    """Two nodes of one CPU each; the first one is the head."""
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))  # the nodes keep this environment
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster()
    try:
        for index in ({"include_dashboard": False}, {}):
            for _ in range(3):  # Ray gives a node 30 seconds to start, which a busy machine may need
                with suppress(Exception):
                    cluster.other = cluster.add_node(**node, **index)
                    break
        assert len(cluster.list_all_nodes()) == 2
        yield cluster
    finally:
        cluster.shutdown()


class Driver(Processes):
    """The process that a user starts, and its output."""

    def __init__(self, folder: Path, cluster, *words: str):
        self.folder = folder
        command = [str(ROOT / "run_training.py"), *RAY, f"launcher.address={cluster.address}", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.started = [start(command, folder, environment, folder / "stdout.0", folder / "stderr.0")]


@pytest.mark.nightly
@pytest.mark.slow
def test_on_two_nodes(here, corpus, cluster):
    """A run that fails, its ranks and its output; then a training that loses a node, goes on with one, and is stopped."""
    task = ROOT / "tests" / "support" / "ray_task.py"
    run = "hydra.run.dir=failed"
    with Driver(
        here, cluster, run, f"launcher.train_script={task}", "launcher.extra_env=['COLOUR=deep blue']"
    ) as driver:
        (end,) = driver.ends()
    assert end.code == 77, end.stderr  # it is not started again
    lines = end.stdout.splitlines()
    assert lines[0] == f"run folder: {here}/failed"
    address = re.search(r"\] (\S+) resume", end.stdout)[1]
    for rank in (0, 1):
        values = [str(rank), "0", "2", "cpu", "deep blue"]
        assert f"{rank}: {values} {address} resume={here}/failed" in lines
        assert f"{rank}: process {rank} has something to say" in end.stderr.splitlines()
    assert yaml.safe_load((here / "failed" / "config.yaml").read_text())["launcher"] == {"name": "local"}

    training = [
        *PAIR, "data=text", f"data.paths=['{corpus}']", "model.mesh_shape=[[-1],[fsdp]]", "training.max_steps=100000",
        "evaluation.every_steps=null", "checkpoint.save_every_steps=2", "launcher.min_nodes=1", "launcher.start_timeout_s=2",
        "launcher.grace_period_s=5",
    ]  # fmt: skip
    with Driver(here, cluster, *training) as driver:
        driver.wait_for_file(here / "run" / "checkpoints" / "4")
        cluster.remove_node(cluster.other, allow_graceful=False)
        driver.wait_until(lambda: "starts again" in (here / "stderr.0").read_text(), "the restart")
        before = metrics(here / "run")
        driver.wait_for_step(here / "run", before[-1]["step"] + 2)
        driver.started[0].send_signal(signal.SIGTERM)
        (end,) = driver.ends()
    assert end.code == 75, end.stderr
    assert re.search(r"node \d \(\S+\) is lost", end.stderr), end.stderr
    assert "1 nodes, 1 processes each" in end.stderr
    losses: dict[int, set[float]] = {}
    lines = metrics(here / "run")
    for line in lines:
        losses.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(losses) == list(range(1, lines[-1]["step"] + 1))
    for step, values in losses.items():  # on one node as on two
        assert max(values) == pytest.approx(min(values), rel=1e-5), step
    assert (here / "run" / "checkpoints" / str(lines[-1]["step"])).is_dir()  # saved when it was stopped
