"""The wheel, installed outside the repository: it holds every module and every config, and its commands run."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.harness import ROOT

pytestmark = pytest.mark.slow
SOURCES = ("tunix", "conf", "pyproject.toml", "run_training.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools leaves folders behind where it builds."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder that the wheel is installed in; what it needs comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", folder, wheel)
    return folder


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_module_and_config_is_in_it(wheel):
    """pyproject.toml lists the packages by hand: a new folder must be added there."""
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "tunix").rglob("*") if path.suffix in (".py", ".yaml")}
    expected |= {f"tunix/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    names = zipfile.ZipFile(wheel).namelist()
    assert expected - set(names) == set()
    assert [name for name in names if name.startswith("tests")] == []


TUNIX, MODULE = ["bin/tunix"], [sys.executable, "-m", "tunix"]
SMALL = ["dry_run=true", "model=tiny", "data=synthetic"]


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ([*TUNIX, *SMALL], 0, "parameters"),
        ([*MODULE, "train", *SMALL], 0, "parameters"),
        ([*MODULE, "training.max_stepz=2"], 2, "did you mean training.max_steps?"),
        ([*TUNIX, "plan", "plan.topology=h200:8", "plan.num_compiled=0", "plan.output=null"], 0, "python run_training.py"),
        ([*TUNIX, "doctor", "training.max_stepz=2"], 2, "did you mean training.max_steps?"),
        ([*TUNIX, "launch", "--help"], 0, "--nprocs"),
        ([*TUNIX, "generate"], 2, "checkpoint"),
        pytest.param([*TUNIX, "export"], 2, "checkpoint", marks=pytest.mark.nightly),
        pytest.param([*TUNIX, "evaluate"], 2, "checkpoint", marks=pytest.mark.nightly),
        ([*TUNIX, "prepare", "data.paths=[nowhere]", "data=text"], 2, "nowhere does not exist"),
        ([*TUNIX, "verify", "--steps=many"], 2, "--steps"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", " ".join(value[-2:])) if isinstance(value, list) else "",
)  # fmt: skip
def test_its_commands(command, code, said, installed, tmp_path):
    if command[:1] == TUNIX:
        command = [str(installed / command[0]), *command[1:]]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
