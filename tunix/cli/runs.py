"""Saved runs, as users name them: by a folder, a checkpoint in it, an address in a bucket, or `latest`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from tunix.base.buckets import is_address
from tunix.base.disk import list_numbers
from tunix.base.errors import UserError
from tunix.cli.mirrored import find_mirrored, mirror_run, split_step
from tunix.cli.saved import load_saved
from tunix.config.values import CONF

OUTPUTS = Path("outputs")


def find_run(source: str, key: str = "checkpoint") -> tuple[Path, int | None] | None:
    """Return folder and step (None: the newest) of the run that `source` names; None if it names no run.

    `source` is what the key `resume` accepts; `key` is the key that the user typed, for messages. The folder is the one
    with the run's checkpoints (`checkpoint.folder`). For a run in a bucket it is a folder of this machine that stands
    for the bucket (mirrored.py).
    """
    if is_address(source):
        address, step = split_step(source)
        folder = mirror_run(address, key)
        return None if folder is None else (folder, step)
    path = Path(source)
    is_run = source == "latest" or any((folder / "config.yaml").is_file() for folder in (path, *path.parents[1:2]))
    if not is_run:
        return None
    run_dir, step = find_resume_point(source, None, key)
    home = read_saved_home(run_dir)
    if home is None or Path(home) == run_dir:
        return run_dir, step
    return (find_mirrored(home, key)[0] if is_address(home) else Path(home)), step


def find_resume_point(value: str, project: str | None, key: str = "resume") -> tuple[Path, int | None]:
    """Return the run folder and step (None: the newest) that `resume=value` means; `project` is for "latest".

    Other keys name runs in the same way; `key` is for messages.
    """
    if is_address(value):
        return find_mirrored(value, key)
    if not value:
        raise UserError("resume is empty; expected a run's folder, RUN_DIR/checkpoints/STEP or latest, or resume=null")
    path = Path(value)
    if value == "latest":
        project = project or OmegaConf.load(CONF / "config.yaml").project_name
        path = OUTPUTS / project / "latest"
        if not path.exists():
            raise UserError(f"{key}=latest: there is no {path}; project {project} has no run in this folder yet")
        path = path.resolve()
    step = None
    if path.parent.name == "checkpoints" and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    if not (path / "config.yaml").is_file():
        # Something inside a run's folder, like RUN_DIR/checkpoints or RUN_DIR/checkpoints/STEP/state.
        parents = path.parents[:3] if path.exists() else ()
        above = next((each for each in parents if (each / "config.yaml").is_file()), None)
        hint = f"; did you mean {key}={above}?" if above else ""
        raise UserError(f"{key}={value}: {path} is not a run's folder (it has no config.yaml){hint}")
    return path, step


def read_saved_home(run_dir: Path) -> str | None:
    """Return the `checkpoint.folder` of a run's saved config."""
    return load_saved(run_dir).get("checkpoint", {}).get("folder")


def find_checkpoints(run_dir: Path, choice: Sequence[int] | Literal["all"], key: str) -> list[tuple[int, str]]:
    """Return steps and folders of checkpoints of a run, of `choice` or all that are kept; `key` is for the message.

    Raises:
        UserError: the run lacks one of them, or has none at all.
    """
    folder = run_dir / "checkpoints"
    kept = list_numbers(folder)
    steps = kept if choice == "all" else choice
    missing = [str(step) for step in steps if step not in kept]
    if missing or not steps:
        listed = ", ".join(map(str, kept)) or "none"
        raise UserError(f"{key}: {folder} has no checkpoint of {', '.join(missing) or 'any step'}; it has {listed}")
    return [(step, str(folder / str(step))) for step in steps]
