"""The environment of a run: versions, devices, git commit, command."""

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

MAX_DIFF = 1 << 20  # characters of the difference to the commit that are kept
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)  # in names of variables
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tokenizers",
    "numpy",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on, and a hash of tunix's own code."""
    found = {"python": platform.python_version(), "code of tunix": _code_hash()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _code_hash() -> str:
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]


def describe_environment() -> dict[str, Any]:
    """The environment of this process, as environment.json keeps it."""

    def git(*words: str) -> str | None:
        result = subprocess.run(
            ["git", *words], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
        )
        return result.stdout.strip() if result.returncode == 0 else None

    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": [sys.executable, *sys.argv],
        "folder": os.getcwd(),
        "host": platform.node(),
        "versions": versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changes": (git("status", "--porcelain") or "").splitlines(),
        "git_diff": (git("diff", "HEAD") or "")[:MAX_DIFF],
        "packages": {each.metadata["Name"]: each.version for each in metadata.distributions() if each.metadata["Name"]},
        "devices": [f"{device.id}: {device.device_kind} (process {device.process_index})" for device in jax.devices()],
        "processes": jax.process_count(),
        "variables": {
            name: "(left out)" if SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(("XLA_", "JAX_", "NCCL_", "TUNIX_", "CUDA_", "SLURM_"))
        },
    }
