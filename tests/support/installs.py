"""What some tests need and a machine may lack. Workers of one test session install one at a time."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

TORCH = ("torch==2.13.0", "accelerate==1.15.0", "transformers==5.23.0", "peft==0.21.2")
XPROF = ("tensorboard==2.21.0", "xprof==2.24.2")


@contextmanager
def one_at_a_time(what: str = "installs") -> Iterator[None]:
    """Let one process of this machine after the other do `what`."""
    with (Path(tempfile.gettempdir()) / f"tunix-test-{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def apt(programs: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Install Debian packages unless their programs are there; skips the test, loudly, where that cannot be."""
    with one_at_a_time():
        if all(map(shutil.which, programs)):
            return
        if os.getuid() or not shutil.which("apt-get"):
            pytest.skip(f"NOT TESTED: {', '.join(packages)} are not installed; installing them needs root and apt")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (("update", "-qq"), ("install", "-y", "-qq", "--no-install-recommends", *packages)):
            done = subprocess.run(["apt-get", *words], env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"NOT TESTED: apt-get could not install {', '.join(packages)}: {done.stderr[-200:]}")


def torch(cache_dir: Path) -> Path:
    """The scripts of an environment with `TORCH`: that of TUNIX_TORCH_PYTHON, or a new one."""
    if given := os.environ.get("TUNIX_TORCH_PYTHON"):
        return Path(given).parent
    return _environment(cache_dir / "torch", "accelerate", TORCH)


def xprof(cache_dir: Path) -> Path:
    """The scripts of an environment with TensorBoard and its profile plugin: this one, or a new one."""
    if find_spec("xprof"):
        return Path(sys.executable).parent
    return _environment(cache_dir / "xprof", "xprof", XPROF)


def _environment(folder: Path, script: str, packages: tuple[str, ...]) -> Path:
    with one_at_a_time():
        bin_dir = folder / "bin"
        if not (bin_dir / script).exists():
            venv.create(folder, with_pip=True)
            words = [bin_dir / "python", "-m", "pip", "install", "-q", *packages]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"NOT TESTED: pip could not install {' and '.join(packages)}: {done.stderr[-200:]}")
        return bin_dir


def cuda_plugin(cache_dir: Path) -> str:
    """A PYTHONPATH with JAX's CUDA plugin: XLA's GPU compiler, 400 MB. That of TUNIX_CUDA_PLUGIN, or a new one."""
    if given := os.environ.get("TUNIX_CUDA_PLUGIN"):
        return given
    with one_at_a_time():
        folder = cache_dir / "cuda_plugin"
        if not (folder / "jax_plugins").exists():
            packages = [f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")]
            words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *packages]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                pytest.skip(f"NOT TESTED: pip could not install {' and '.join(packages)}: {done.stderr[-200:]}")
        return str(folder)
