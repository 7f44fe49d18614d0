"""The same training from every launcher, with two processes: the loss that one process finds."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import installs
from support.devices import xla_flags
from support.harness import PAIR, ROOT, metrics

import tunix

pytestmark = pytest.mark.slow
TRAINING = [sys.executable, str(ROOT / "run_training.py")]


@pytest.fixture(scope="module")
def words(corpus) -> list[str]:
    return [*PAIR, "data=text", f"data.paths=['{corpus}']", "training.max_steps=2", "scheduler.warmup_steps=0"]


@pytest.fixture(scope="module")
def losses(words, tmp_path_factory) -> list[float]:
    """Of one process with two devices."""
    folder = tmp_path_factory.mktemp("one") / "run"
    tunix.train([*words, f"hydra.run.dir={folder}", "distributed.allow_idle_devices=true"])
    return [line["loss"] for line in metrics(folder)]


@pytest.fixture(scope="module")
def torch_bin(installs_dir) -> Path:
    return installs.torch(installs_dir)


def trained(command: list[str], cwd: Path) -> list[float]:
    """Losses of a run of two processes that `command` starts."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "XLA_FLAGS": xla_flags(1), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout  # mpirun gives its processes a terminal: no progress bar is drawn into a file
    assert json.loads((cwd / "run" / "environment.json").read_text())["processes"] == 2
    return [line["loss"] for line in metrics(cwd / "run")]


@pytest.mark.nightly
def test_tunix_launch(words, losses, tmp_path):
    """The losses of one process; one Ctrl-C for the launcher, and all processes stop after the same step, saved."""
    launch = [sys.executable, "-m", "tunix.launch", "--nprocs=2", "--log-dir=logs", TRAINING[1]]
    process = subprocess.Popen(
        [*launch, *words, "training.max_steps=100000"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "XLA_FLAGS": xla_flags(1), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    file, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 200
    while not file.exists() or file.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    assert time.monotonic() - asked < 30
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2
    lines = metrics(tmp_path / "run")
    assert [line["loss"] for line in lines[:2]] == pytest.approx(losses, rel=1e-5)
    assert f"saved after step {lines[-1]['step']}" in output
    assert "step 2/100000" in (tmp_path / "logs" / "train.0.log").read_text()
    assert "step 2/100000" not in (tmp_path / "logs" / "train.1.log").read_text()
    assert (tmp_path / "run" / "checkpoints" / str(lines[-1]["step"])).is_dir()


def test_a_mistake_is_said_once(words, tmp_path):
    """All processes find it; the terminal shows it once, the exit code is that of the mistake."""
    launch = [sys.executable, "-m", "tunix.launch", "--nprocs=2", "--log-dir=logs", TRAINING[1]]
    done = subprocess.run(
        [*launch, "training.max_stepz=2"], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("did you mean training.max_steps?") == 1


@pytest.mark.nightly
def test_torchrun(words, losses, torch_bin, tmp_path):
    command = [torch_bin / "torchrun", "--standalone", "--nproc-per-node=2", "--no-python", *TRAINING, *words]
    assert trained(command, tmp_path) == pytest.approx(losses, rel=1e-5)


@pytest.mark.nightly
def test_accelerate(words, losses, torch_bin, tmp_path):
    launch = [torch_bin / "accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1", "--no_python"]
    assert trained([*launch, *TRAINING, *words], tmp_path) == pytest.approx(losses, rel=1e-5)


@pytest.mark.nightly
def test_mpirun(words, losses, tmp_path):
    installs.apt(("mpirun",), ("openmpi-bin",))
    launch = ["mpirun", *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe", "-np", "2"]
    assert trained([*launch, *TRAINING, *words], tmp_path) == pytest.approx(losses, rel=1e-5)
