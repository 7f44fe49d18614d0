"""The wheel, installed outside the repository: it holds every module and every config, and its commands run."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory) -> Iterator[Callable[[list[str], Path], tuple[int, str, str]]]:
    """Runs the installed `tunix` with words in a folder: exit code, output, errors.

    One process imports the installed package, and each command is a fork of it: to import everything takes 4 s.
    """
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "support" / "installed_commands.py")], cwd=tmp_path_factory.mktemp("server"),
        env={**os.environ, "PYTHONPATH": str(installed)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdin
        assert server.stdout
        assert Path(json.loads(server.stdout.readline())).is_relative_to(installed)

        def run(words: list[str], folder: Path) -> tuple[int, str, str]:
            out, err = (tmp_path_factory.mktemp("output") / name for name in ("stdout", "stderr"))
            print(json.dumps([words, *map(str, (folder, out, err))]), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline()), out.read_text(), err.read_text()

        yield run
        server.stdin.close()


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SUFFIXES = (".py", ".yaml", ".html")


def test_every_module_and_config_is_in_it(wheel):
    """pyproject.toml lists the packages by hand: a new folder must be added there."""
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "tunix").rglob("*") if path.suffix in SUFFIXES}
    expected |= {f"tunix/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    names = zipfile.ZipFile(wheel).namelist()
    assert expected - set(names) == set()
    assert [name for name in names if name.startswith("tests")] == []


TUNIX, MODULE = ["bin/tunix"], [sys.executable, "-m", "tunix"]
SMALL = ["dry_run=true", "model=tiny", "data=synthetic"]


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ([*TUNIX, "train", *SMALL], 0, "parameters"),
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
def test_its_commands(command, code, said, installed, run, tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    if command[:1] == TUNIX:
        found = run([str(installed / command[0]), *command[1:]], folder)
    else:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        found = done.returncode, done.stdout, done.stderr
    assert found[0] == code, found[1] + found[2]
    assert said in found[1] + found[2]
    assert "Traceback" not in found[2]
    assert list(folder.iterdir()) == []


def test_the_script_as_users_start_it(installed, tmp_path):
    done = subprocess.run(
        [str(installed / "bin" / "tunix"), "verify", "--steps=many"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(installed)}, check=False,
    )  # fmt: skip
    assert (done.returncode, "--steps" in done.stderr) == (2, True)
