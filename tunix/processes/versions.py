"""Versions that must be the same on all processes of a run."""

import hashlib
import platform
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

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


def list_versions() -> dict[str, str]:
    """Return versions of Python and of the packages that a run's numbers depend on, and a hash of tunix's own code."""
    by_name = {"python": platform.python_version(), "code of tunix": _hash_code()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            by_name[package] = metadata.version(package)
    return by_name


@cache  # the code that this process runs is that of its start
def _hash_code() -> str:
    """Return a hash of tunix's own files: two copies of a development version have the same number."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:12]
