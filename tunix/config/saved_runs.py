"""Saved runs: their configs, brought to today's form, and their places, as users name them. Imports no jax."""

import copy
import shutil
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tunix.base.buckets import (
    explaining,
    filesystem,
    is_address,
    is_bucket,
    join,
    list_names,
    local_copy,
    mirror,
    read_text,
)
from tunix.base.config_types import CONF
from tunix.base.digests import FILE
from tunix.base.errors import UserError, did_you_mean
from tunix.base.files import expand_home, is_whole_number, list_numbers, write_whole
from tunix.huggingface import hub

# What conf/saved/VERSION.yaml says of each version, the oldest first: its keys that are gone, those with another form,
# and those that it lacks.
OLD_FORMS = [yaml.safe_load(path.read_text()) for path in sorted((CONF / "saved").glob("*.yaml"))]
GONE: dict[str, str] = {key: hint for old in OLD_FORMS for key, hint in old["gone"].items()}
# Sections that the saved config of every version has.
SECTIONS = (
    "model", "data", "loading", "tokenizer", "task", "training", "optimizer", "scheduler", "checkpoint", "evaluation",
    "logging", "profile", "distributed", "launcher", "plan",
)  # fmt: skip


def read_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder, in today's form. Raises `UserError` where the file cannot be read, or is
    not the whole config of a run."""
    values = load_saved(run_dir)
    if missing := next((name for name in SECTIONS if not isinstance(values.get(name), dict)), None):
        raise _describe_damage(run_dir, f"it has no section {missing}")
    return upgrade(values)


def is_run_config(text: str) -> bool:
    """Return whether a text is the saved config of a run: a mapping with all sections."""
    try:
        values = _parse_config(text)
    except NOT_YAML:
        return False
    return isinstance(values, dict) and all(isinstance(values.get(name), dict) for name in SECTIONS)


def load_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder as it is written; raises `UserError` where the file cannot be read."""
    try:
        values = _parse_config((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except Aliased:
        raise _describe_damage(run_dir, "it has aliases, like *NAME, which no run writes") from None
    except NOT_YAML as error:
        raise _describe_damage(run_dir, getattr(error, "strerror", None) or "it is not YAML") from None
    if not isinstance(values, dict):
        raise _describe_damage(run_dir, "it has no sections")
    return values


class Aliased(ValueError):
    """A config has aliases: in ten lines they can stand for a billion values."""


# What OmegaConf raises for a text: OSError for one value, and its own errors for half of an interpolation, `${a`.
NOT_YAML = (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException)


def _parse_config(text: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, loader)):
        raise Aliased
    return OmegaConf.to_container(OmegaConf.load(StringIO(text)))


def _describe_damage(run_dir: Path, damage: str | None) -> UserError:
    file, copy = run_dir / "config.yaml", run_dir / ".hydra" / "config.yaml"
    hint = f"cp {copy} {file} restores it" if copy.is_file() else f"remove {run_dir} if it has no checkpoints"
    return UserError(f"{file} is damaged ({damage}); {hint}")


def upgrade(values: dict[Any, Any]) -> dict[Any, Any]:
    """Bring the values of a whole config to today's form, in place. Raises `UserError` where a word that was never
    legal stands where a word was."""
    for old in OLD_FORMS:
        for key, form in old["forms"].items():
            _change_form(values, key, form)
        for row in old["added"]:
            if all(_find(values, key) in valid for key, valid in row.get("when", {}).items()):
                for section in _list_sections(values, row["section"]):
                    if "beside" in row and not set(row["beside"]) & set(section):
                        continue
                    for key, value in row["keys"].items():
                        section.setdefault(key, copy.deepcopy(value))
    return values


def _change_form(values: dict[Any, Any], key: str, form: dict[str, Any]) -> None:
    """Give the value of a key its new form, under the new name of the key if it has one that is not there."""
    section, _, name = key.rpartition(".")
    new, value = form.get("name", name), _find(values, key)
    if isinstance(value, str | bool) and value in form["values"]:
        (found,) = _list_sections(values, section)
        if new == name or new not in found:
            del found[name]
            found[new] = copy.deepcopy(form["values"][value])
    elif isinstance(value, str) and "otherwise" in form:
        words = list(form["values"])
        hint = did_you_mean(value, words)
        raise UserError(f"{key}={value}: expected {', '.join(words)}, or {form['otherwise']}{hint}")


def _find(values: dict[Any, Any], key: str) -> Any:
    """Return the value of a dotted key; None where there is no such key."""
    section, _, name = key.rpartition(".")
    return next((found.get(name) for found in _list_sections(values, section)), None)


def _list_sections(values: Any, path: str) -> list[dict[Any, Any]]:
    """Return the sections at a dotted path, in which * is any name; a path that leads nowhere has none."""
    found = [values]
    for name in filter(None, path.split(".")):
        below = [each for section in found for each in (section.values() if name == "*" else [section.get(name)])]
        found = [section for section in below if isinstance(section, dict)]
    return found


# A run whose checkpoints are in a bucket, as a folder of this machine.
#
#     s3://BUCKET/RUN/config.yaml                  copied
#     s3://BUCKET/RUN/tokenizer/, pretrained/      copied where they are read; a dry run copies config.yaml alone
#     s3://BUCKET/RUN/checkpoints/STEP             checkpoints/STEP/address, a stand-in
#
# So every command that takes a run's folder takes its address too. Arrays are read from the bucket.

COPIED = ("tokenizer", "pretrained")  # folders of a run whose files are small


def split_step(source: str) -> tuple[str, int | None]:
    """Split RUN/checkpoints/STEP into the run and the step; the step of RUN is None."""
    root, _, remaining = source.rstrip("/").rpartition("/checkpoints/")
    return (root, int(remaining)) if root and is_whole_number(remaining) else (source.rstrip("/"), None)


def list_steps(root: str, key: str) -> list[int]:
    """Return the steps of a run in a bucket that have a whole checkpoint.

    Raises:
        UserError: a checkpoint was copied there from a folder, whose form is another one.
    """
    folder = join(root, "checkpoints")
    steps = sorted(int(name) for name in list_names(folder, key) if is_whole_number(name))
    files = filesystem(root, key)
    with explaining(folder, key):
        whole = [step for step in steps if files.exists(join(folder, str(step), FILE))]
        copied = [step for step in steps if step not in whole and files.exists(join(folder, str(step), "run", FILE))]
    if copied:  # they would be taken for what a kill has left of a save, and deleted
        raise UserError(
            f"{key}={root}: checkpoints/{copied[-1]} was copied from a disk, and has another form in a bucket; copy "
            f"the run to a disk, and give {key}=FOLDER"
        )
    return whole


def mirror_run(root: str, key: str, copied: Sequence[str] = ()) -> Path | None:
    """Return the folder of this machine that stands for a run in a bucket; None if the address is no run.

    A run is in a bucket, where tunix can write it, and its config.yaml has the sections of a run's config: a web server
    never has one. `copied` names the folders of `COPIED` that the caller reads.

    Raises:
        UserError: the server refuses, or cannot be reached; the message names `key`.
    """
    config = read_text(join(root, "config.yaml"), key) if is_bucket(root) else None
    if config is None or not is_run_config(config):
        return None
    folder = local_copy(root)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.yaml", config)
    for name in copied:
        if list_names(join(root, name), key):
            mirror(join(root, name), (*hub.INFO_FILES, "*.txt"), key)
    # Each checkpoint gets a stand-in, and that of a checkpoint which is gone from the bucket goes too.
    steps = list_steps(root, key)
    for step in steps:
        stand_in = folder / "checkpoints" / str(step)
        stand_in.mkdir(parents=True, exist_ok=True)
        write_whole(stand_in / "address", join(root, "checkpoints", str(step)))
    for gone in set(list_numbers(folder / "checkpoints")) - set(steps):
        shutil.rmtree(folder / "checkpoints" / str(gone), ignore_errors=True)
    return folder


def find_mirrored(source: str, key: str, copied: Sequence[str] = ()) -> tuple[Path, int | None]:
    """Return folder and step of a run in a bucket, RUN or RUN/checkpoints/STEP; `copied` as `mirror_run` has it. Raises
    `UserError` where the address is no run."""
    root, step = split_step(source)
    folder = mirror_run(root, key, copied)
    if folder is None:
        raise UserError(f"{key}={source}: {root} is not a run in a bucket (it has no config.yaml of a run)")
    return folder, step


# Saved runs, as users name them: by a folder, a checkpoint in it, an address in a bucket, or `latest`.

OUTPUTS = Path("outputs")


def find_run(source: str, key: str = "checkpoint", copied: Sequence[str] = ()) -> tuple[Path, int | None] | None:
    """Return folder and step (None: the newest) of the run that `source` names; None if it names no run.

    `source` is what the key `resume` accepts; `key` is the key that the user typed, for messages. The folder is the one
    with the run's checkpoints (`checkpoint.folder`). For a run in a bucket it is a folder of this machine that stands
    for the bucket, with the folders `copied` (`mirror_run`).
    """
    if is_address(source):
        address, step = split_step(source)
        folder = mirror_run(address, key, copied)
        return None if folder is None else (folder, step)
    path = expand_home(source)
    is_run = source == "latest" or any((folder / "config.yaml").is_file() for folder in (path, *path.parents[1:2]))
    if not is_run:
        return None
    run_dir, step = find_resume_point(source, None, key)
    root = read_root(run_dir)
    if root is None or Path(root) == run_dir:
        return run_dir, step
    return (find_mirrored(root, key, copied)[0] if is_address(root) else Path(root)), step


def find_resume_point(value: str, project: str | None, key: str = "resume") -> tuple[Path, int | None]:
    """Return the run folder and step (None: the newest) that `resume=value` means; `project` is for "latest".

    Other keys name runs in the same way; `key` is for messages.
    """
    if is_address(value):
        return find_mirrored(value, key)
    if not value:
        raise UserError("resume is empty; expected a run's folder, RUN_DIR/checkpoints/STEP or latest, or resume=null")
    path = expand_home(value)
    if value == "latest":
        project = project or OmegaConf.load(CONF / "config.yaml").project_name
        path = OUTPUTS / project / "latest"
        if not path.exists():
            raise UserError(f"{key}=latest: there is no {path}; project {project} has no run in this folder yet")
    step = None
    if path.parent.name == "checkpoints" and is_whole_number(path.name):
        path, step = path.parent.parent, int(path.name)
    if path.is_symlink() and path.exists():  # like outputs/PROJECT/latest, which the run itself and others change
        path = path.resolve()
    if not (path / "config.yaml").is_file():
        # Something inside a run's folder, like RUN_DIR/checkpoints or RUN_DIR/checkpoints/STEP/state.
        parents = path.parents[:3] if path.exists() else ()
        above = next((each for each in parents if (each / "config.yaml").is_file()), None)
        hint = f"; did you mean {key}={above}?" if above else ""
        if not path.exists():
            hint = f"; {key}=latest is the last run of a project"
        raise UserError(f"{key}={value}: {path} is not a run's folder (it has no config.yaml){hint}")
    return path, step


def read_root(run_dir: Path) -> str | None:
    """Return the `checkpoint.folder` of a run's saved config; a folder as an absolute path.

    A folder that has the checkpoints itself may have been moved or copied since.
    """
    root = load_saved(run_dir).get("checkpoint", {}).get("folder")
    if root is None or is_address(root):
        return root
    return str((run_dir if (run_dir / "checkpoints").is_dir() else Path(root)).absolute())


def find_checkpoints(
    source: str, choice: Sequence[int] | Literal["all"], key: str, hint: str = ""
) -> list[tuple[int, str]]:
    """Return steps and folders of checkpoints of the run `checkpoint=source`, of `choice` or all that are kept. Raises
    `UserError` where it is no run, lacks one of them, or has none at all; `key` begins the message, `hint` may end
    it."""
    run = find_run(source)
    if run is None or run[1] is not None:
        label = "is no run of tunix" if run is None else "is one checkpoint"
        raise UserError(f"{key}: checkpoint={source} {label}; give the folder of a run{hint}")
    folder = run[0] / "checkpoints"
    saved_steps = list_numbers(folder)
    steps = saved_steps if choice == "all" else choice
    missing = [str(step) for step in steps if step not in saved_steps]
    if missing or not steps:
        entries = ", ".join(map(str, saved_steps)) or "none"
        raise UserError(f"{key}: {folder} has no checkpoint of {', '.join(missing) or 'any step'}; it has {entries}")
    return [(step, str(folder / str(step))) for step in steps]
