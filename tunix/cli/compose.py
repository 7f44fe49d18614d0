"""From a command line to a checked `Config`. Imports no jax.

    words -> Hydra composes conf/ and the words -> architecture of model.init_from -> pydantic checks -> Job

With resume=RUN_DIR the saved config of that run takes the place of conf/. Every error is one line that names the key,
the value and the way out (`tunix.cli.mistakes`). Read `compose` first.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tunix.base.buckets import is_address
from tunix.base.errors import UserError
from tunix.base.nested import flat
from tunix.base.yaml_text import format_yaml
from tunix.cli.architecture import count_rows, fill_from_adapter, fill_from_pretrained, fill_from_run
from tunix.cli.hydra_words import (
    add_implied_model,
    check_choice,
    check_section,
    choose_set,
    compose_saved,
    compose_words,
)
from tunix.cli.mirrored import split_step
from tunix.cli.mistakes import explain_errors, validate
from tunix.cli.runs import OUTPUTS, find_resume_point, find_run, read_saved_home
from tunix.cli.saved import upgrade
from tunix.config import Config

IDENTITY = ("coordinator_address", "num_processes", "process_id", "local_device_ids")  # keys of `distributed`


@dataclass(frozen=True)
class Job:
    """A checked config and the folder of its run."""

    config: Config
    overrides: list[str]  # as typed
    run_dir: Path  # a new run takes this folder, or a free one beside it
    run_dir_is_explicit: bool  # the user chose the folder: a new run takes no other
    resume_step: int | None = None  # the STEP of resume=RUN_DIR/checkpoints/STEP
    came_from: str | None = None  # a resumed run: the folder or address with the checkpoints of the run before
    hydra: dict[str, Any] | None = None  # Hydra's own settings, saved in the run's folder

    @property
    def goes_on_in_folder(self) -> bool:
        """True for a resumed run whose folder is there; one that is resumed from a bucket gets a new folder."""
        return self.config.resume is not None and not is_address(self.config.resume)


def compose(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job:
    """Compose and check the config of a run, new or resumed.

    Raises:
        UserError: a line for each error.
    """
    overrides = [choose_set(word) for word in overrides]
    with explain_errors():
        given = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(overrides)}
        for override in given.values():
            check_section(override)
            check_choice(override)
        if "resume" in given and given["resume"].value() is not None:
            return _compose_resumed(overrides, given)
        composed = compose_words(add_implied_model(overrides), config_dir, config_name)
        hydra: Any = {"hydra": OmegaConf.to_container(composed.hydra, resolve=False, enum_to_str=True)}
        return Job(check(composed), overrides, Path(composed.hydra.run.dir), "hydra.run.dir" in given, hydra=hydra)


def check_sweep(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job | None:
    """Compose and check every point of a grid, so that an error in the last point is found before the first one runs.

    Returns the first point; None if another sweeper chooses the points while the sweep runs.
    """
    if any(override.startswith("hydra/sweeper") for override in overrides):
        return None
    parsed = OverridesParser.create().parse_overrides(overrides)
    for override in parsed:
        if override.is_interval_sweep():
            raise UserError(
                f"{override.input_line}: a sweep tries listed values, like {override.key_or_group}=0.1,0.2; "
                "docs/extending.md shows a search in an interval"
            )
    points = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    jobs = [compose(list(point), config_dir, config_name) for point in points]
    if any(job.config.resume for job in jobs):
        raise UserError("resume goes on with one run; it cannot be part of a sweep")
    return jobs[0]


def make_job(config: Config) -> Job:
    """Return a job for a config that was made in Python, with the run folder that Hydra would choose."""
    return Job(config, [], _dated_folder(config), False)


def _dated_folder(config: Config) -> Path:
    return OUTPUTS / config.project_name / time.strftime("%Y-%m-%d/%H-%M-%S")


def check(composed: DictConfig, fresh: bool = True) -> Config:
    """Resolve the interpolations of a composed config, fill in what depends on files, and check it.

    A saved config (not `fresh`) is complete: nothing is filled in.
    """
    with explain_errors():
        own = {str(key): composed[key] for key in composed if key != "hydra"}
        values: dict[Any, Any] = {key: _resolve(value) for key, value in own.items()}
    upgrade(values)
    if fresh and values["model"].get("init_from"):
        if run := find_run(str(values["model"]["init_from"]), "model.init_from"):
            fill_from_run(values, *run)
        else:
            fill_from_pretrained(values)
        if values["model"]["init_adapter"]:
            fill_from_adapter(values["model"])
    elif fresh and values["model"]["init_adapter"]:
        raise UserError(
            f"model.init_adapter={values['model']['init_adapter']} updates the matrices of a base; give it too: "
            "model.init_from=DIR"
        )
    elif values["model"]["family"] is None:
        raise UserError("model=pretrained needs model.init_from=DIR or an ID of the Hugging Face hub")
    if values["model"]["vocab_size"] == "auto":
        values["model"]["vocab_size"] = count_rows(values)
    return build(values)


def _resolve(value: Any) -> Any:
    """Return plain values in place of a section of a composed config; a value alone stays."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def build(values: dict[Any, Any]) -> Config:
    """Check plain values, as YAML has them, and return the config; raises `UserError` with a line for each error."""
    return validate(Config, values)


def to_yaml(config: Config) -> str:
    """Format the resolved config as it is saved in the run's folder; `--config-path RUN_DIR` runs it again.

    Two things are left out, since another job may resume from it: which process of the run this was, and
    `loading.allow_changed_data`, which applies to one resume only.
    """
    tree = _drop_identity(config)
    tree["loading"]["allow_changed_data"] = False
    return format_yaml(tree)


def list_facts(config: Config) -> dict[str, Any]:
    """Return every key, with its value, on which all processes of a run must agree."""
    # Hosts may keep their caches in different folders.
    return {key: value for key, value in flat(_drop_identity(config)).items() if key != "loading.cache_dir"}


def _drop_identity(config: Config) -> dict[str, Any]:
    """Return the config as plain values, without the keys that tell processes apart."""
    distributed = config.distributed.model_copy(update=dict.fromkeys(IDENTITY))
    return config.model_copy(update={"distributed": distributed}).model_dump(mode="json", by_alias=True)


def _compose_resumed(overrides: list[str], given: dict[str, Override]) -> Job:
    """Compose the job that goes on with the run of `resume`; `given` are the overrides by their keys."""
    source = str(given["resume"].value())
    project = str(given["project_name"].value()) if "project_name" in given else None
    run_dir, step = find_resume_point(source, project)
    composed = compose_saved(run_dir, list(given.values()))
    if composed.loading.allow_changed_data and composed.tokenizer.path is None:
        # Without a path a tokenizer would be trained on the changed corpus; the model knows the saved one.
        composed.tokenizer.path = str(run_dir.absolute() / "tokenizer")
    home = read_saved_home(run_dir) or str(run_dir)
    if not is_address(source):
        config = check(composed, fresh=False)
        return Job(config, overrides, run_dir, run_dir_is_explicit=True, resume_step=step, came_from=home)
    # `run_dir` is a copy of the bucket's files here; the run takes a new folder.
    home = split_step(source)[0]
    if "checkpoint.folder" not in given:
        composed.checkpoint.folder = home
    config = check(composed, fresh=False)
    is_explicit = "hydra.run.dir" in given
    folder = Path(str(given["hydra.run.dir"].value())) if is_explicit else _dated_folder(config)
    return Job(config, overrides, folder, is_explicit, resume_step=step, came_from=home)
