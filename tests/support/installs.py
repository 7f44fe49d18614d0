"""What some tests need and a machine may lack. Workers of one test session install one at a time."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

TORCH = ("torch==2.13.0", "accelerate==1.15.0", "transformers==5.23.0", "peft==0.21.2")
QUICKLY = ("install", "-q", "--no-compile")  # Python compiles the few files that a test imports


@contextmanager
def one_at_a_time(label: str = "installs") -> Iterator[None]:
    """Let one process of this user after the other do `label`."""
    with (Path(tempfile.gettempdir()) / f"tunix-test-{os.getuid()}-{label}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def apt(programs: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Install Debian packages unless their programs are there; skips the test where that needs another user or system."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):  # of daemons; the PATH of a user lacks it
        os.environ["PATH"] += f"{os.pathsep}/usr/sbin"
    with one_at_a_time():
        if all(map(shutil.which, programs)):
            return
        if os.getuid() or not shutil.which("apt-get"):
            missing = ", ".join(name for name in programs if not shutil.which(name))
            pytest.skip(f"NOT TESTED: {missing} not found; install it: apt-get install {' '.join(packages)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", *packages)):
            done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"NOT TESTED: apt-get install {' '.join(packages)} has failed: {done.stderr[-200:]}")


def torch(installs_dir: Path) -> Path:
    """The scripts of an environment with `TORCH`: that of TUNIX_TORCH_PYTHON, or a new one."""
    if given := os.environ.get("TUNIX_TORCH_PYTHON"):
        return Path(given).parent
    return _environment(installs_dir, TORCH)


def cuda_plugin(installs_dir: Path) -> str:
    """A PYTHONPATH with JAX's CUDA plugin: XLA's GPU compiler, 400 MB. That of TUNIX_CUDA_PLUGIN, or a new one."""
    if given := os.environ.get("TUNIX_CUDA_PLUGIN"):
        return given
    packages = tuple(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))
    pip = [sys.executable, "-m", "pip", *QUICKLY, "--no-deps", "--target"]
    return str(_installed(installs_dir, packages, lambda folder: [*pip, str(folder)]))


def _environment(installs_dir: Path, packages: tuple[str, ...]) -> Path:
    """The scripts of a virtual environment with these packages."""

    def pip(folder: Path) -> list[str]:
        venv.create(folder, with_pip=True)
        return [str(folder / "bin" / "python"), "-m", "pip", *QUICKLY]

    return _installed(installs_dir, packages, pip) / "bin"


def _installed(installs_dir: Path, packages: tuple[str, ...], pip: Callable[[Path], list[str]]) -> Path:
    """The folder with these packages: one of an earlier session, or a new one that `pip(folder)` fills."""
    folder = installs_dir / "+".join(packages)
    complete = folder / "complete"  # written last: an install that was killed is begun again
    with one_at_a_time():
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            done = subprocess.run([*pip(folder), *packages], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"pip could not install {' and '.join(packages)}: {done.stderr[-200:]}")
            complete.touch()
    return folder
