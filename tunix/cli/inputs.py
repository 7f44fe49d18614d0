"""Checks that the files of a run exist, before anything is written or submitted. Imports no jax.

A job may wait in a queue for hours: a typo in a path should be found before, on the machine that submits it.
"""

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunix.base.errors import UserError
from tunix.cli.compose import Job
from tunix.config import Config, Slurm
from tunix.config.data import Mixture


def refuse_missing_inputs(job: Job) -> None:
    """Raise `UserError` for data or a tokenizer that is not there, and for folders that are addresses of buckets.

    A job in a container sees other files than this machine: then only addresses are refused.
    """
    cfg = job.config
    for key, folder in (("hydra.run.dir", str(job.run_dir)), ("loading.cache_dir", cfg.loading.cache_dir)):
        if ":/" in folder:
            raise UserError(
                f"{key}={_as_address(folder)}: a bucket cannot be written there; name a folder of this machine or of a "
                f"shared disk{' (checkpoint.folder may be in a bucket)' if key == 'hydra.run.dir' else ''}"
            )
    if _runs_elsewhere(cfg):
        return
    for key, path in _list_paths(cfg):
        if ":/" not in path and not _exists(path):
            raise UserError(f"{key}: {path} does not exist")


def _as_address(folder: str) -> str:
    """Return an address with the two slashes of which a `Path` keeps one."""
    return re.sub(r":/+", "://", folder, count=1)


def _runs_elsewhere(cfg: Config) -> bool:
    """Return True for a job in a container or on Kubernetes, and for a script that is written but not submitted."""
    launcher = cfg.launcher
    return launcher.name == "kubernetes" or (
        isinstance(launcher, Slurm) and (launcher.dry_run or launcher.container_image is not None)
    )


def _list_paths(cfg: Config) -> Iterator[tuple[str, str]]:
    """Yield the paths of the data and of the tokenizer, each with its key."""
    parts: dict[str, Any] = {"data": cfg.data}
    if isinstance(cfg.data, Mixture):
        parts = {f"data.parts.{name}": part for name, part in cfg.data.parts.items()}
    for key, source in parts.items():
        for path in getattr(source, "paths", None) or ():
            yield f"{key}.paths", path
    path = cfg.tokenizer.path
    if path is not None and not cfg.tokenizer.train and _is_local(path):
        yield "tokenizer.path", path


def _is_local(path: str) -> bool:
    """Return whether a path cannot be the ID of something on the hub, NAME or ORGANISATION/NAME."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix in (".json", ".model")


def _exists(path: str) -> bool:
    expanded = str(Path(path).expanduser())
    return Path(expanded).exists() or (glob.has_magic(expanded) and any(glob.iglob(expanded, recursive=True)))
