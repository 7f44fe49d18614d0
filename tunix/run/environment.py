"""The environment of a run: versions, devices, git commit, command."""

import os
import platform
import re
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from tunix.processes.versions import list_versions

MAX_DIFF = 1 << 20  # characters of the difference to the commit that are kept
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|WEBHOOK", re.IGNORECASE)  # in names of variables


@cache
def list_packages() -> dict[str, str]:
    """Return the version of every installed package by its name."""
    packages: dict[str, str] = {}
    for each in metadata.distributions():
        fields = each.metadata  # read once: each use of `metadata` and of `version` parses the package's file again
        if fields and fields["Name"]:
            packages[fields["Name"]] = fields["Version"]
    return packages


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
        "versions": list_versions(),
        "git_commit": git("rev-parse", "HEAD"),
        "git_changes": (git("status", "--porcelain") or "").splitlines(),
        "git_diff": (git("diff", "HEAD") or "")[:MAX_DIFF],
        "packages": list_packages(),
        "devices": [f"{device.id}: {device.device_kind} (process {device.process_index})" for device in jax.devices()],
        "processes": jax.process_count(),
        "variables": {
            name: "(left out)" if SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(("XLA_", "JAX_", "NCCL_", "TUNIX_", "CUDA_", "SLURM_"))
        },
    }
