"""A run whose checkpoints are in a bucket, as a folder of this machine. Imports no jax.

    s3://BUCKET/RUN/config.yaml, tokenizer/, pretrained/      copied
    s3://BUCKET/RUN/checkpoints/STEP                          checkpoints/STEP/address, a stand-in

So every command that takes a run's folder takes its address too. Arrays are read from the bucket.
"""

import shutil
from pathlib import Path

from tunix.base.buckets import filesystem, join, list_names, local_copy, mirror, read_text
from tunix.base.digests import FILE
from tunix.base.disk import list_numbers, write_whole
from tunix.base.errors import UserError

COPIED = ("tokenizer", "pretrained")  # folders of a run whose files are small


def split_step(source: str) -> tuple[str, int | None]:
    """Split RUN/checkpoints/STEP into the run and the step; the step of RUN is None."""
    home, _, rest = source.rstrip("/").rpartition("/checkpoints/")
    return (home, int(rest)) if home and rest.isdigit() else (source.rstrip("/"), None)


def list_steps(home: str, key: str) -> list[int]:
    """Return the steps of a run in a bucket that have a whole checkpoint."""
    folder = join(home, "checkpoints")
    steps = sorted(int(name) for name in list_names(folder, key) if name.isdigit())
    files = filesystem(home, key)
    return [step for step in steps if files.exists(join(folder, str(step), FILE))]


def mirror_run(home: str, key: str) -> Path | None:
    """Return the folder of this machine that stands for a run in a bucket; None if the address is no run.

    Raises:
        UserError: the server refuses, or cannot be reached; the message names `key`.
    """
    config = read_text(join(home, "config.yaml"), key)
    if config is None:
        return None
    folder = local_copy(home)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", config)
    for name in COPIED:
        if list_names(join(home, name), key):
            mirror(join(home, name), ("*",), key)
    # Each checkpoint gets a stand-in, and that of a checkpoint which is gone from the bucket goes too.
    steps = list_steps(home, key)
    for step in steps:
        stand_in = folder / "checkpoints" / str(step)
        stand_in.mkdir(parents=True, exist_ok=True)
        write_whole(stand_in / "address", join(home, "checkpoints", str(step)))
    for gone in set(list_numbers(folder / "checkpoints")) - set(steps):
        shutil.rmtree(folder / "checkpoints" / str(gone), ignore_errors=True)
    return folder


def find_mirrored(source: str, key: str) -> tuple[Path, int | None]:
    """Return folder and step of a run in a bucket, RUN or RUN/checkpoints/STEP.

    Raises:
        UserError: the address is no run.
    """
    home, step = split_step(source)
    folder = mirror_run(home, key)
    if folder is None:
        raise UserError(f"{key}={source}: {home} is not a run (it has no config.yaml)")
    return folder, step
