"""From a command line to a checked `Config`. Imports no jax.

    words -> Hydra composes conf/ and the words -> architecture of model.init_from -> pydantic checks -> Job

With resume=RUN_DIR the saved config of that run takes the place of conf/. Every error is one line that names the key,
the value and the way out (`tunix.cli.mistakes`). Read `compose` first.
"""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tunix.base.buckets import is_address
from tunix.base.errors import UserError, did_you_mean
from tunix.base.nested import flat
from tunix.cli.architecture import _fill_from_pretrained, count_rows, fill_from_adapter, fill_from_run
from tunix.cli.foreign import find_key
from tunix.cli.mirrored import split_step
from tunix.cli.mistakes import explain_errors, unknown_key, validate
from tunix.cli.runs import OUTPUTS, find_resume_point, find_run, saved_home
from tunix.cli.saved import upgrade
from tunix.config import Config
from tunix.config.values import CONF

IDENTITY = ("coordinator_address", "num_processes", "process_id", "local_device_ids")  # keys of `distributed`
SEARCH = "hydra.searchpath="
SETS = "evaluation.sets."  # begins the package of a set's source


@dataclass(frozen=True)
class Job:
    """A checked config and the folder of its run."""

    config: Config
    overrides: list[str]  # as typed
    run_dir: Path  # a new run takes this folder, or a free one beside it
    run_dir_is_explicit: bool  # the user chose the folder: a new run takes no other
    resume_step: int | None = None  # the STEP of resume=RUN_DIR/checkpoints/STEP
    came_from: str | None = None  # of a resumed run: the home of its checkpoints, if it is not the run's folder
    hydra: DictConfig | None = None  # Hydra's own settings, saved in the run's folder

    @property
    def goes_on_in_folder(self) -> bool:
        """True for a resumed run whose folder is there; one that is resumed from a bucket gets a new folder."""
        return self.config.resume is not None and not is_address(self.config.resume)


def compose(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job:
    """Compose and check the config of a run, new or resumed.

    Raises:
        UserError: a line for each error.
    """
    overrides = [_choose_set(word) for word in overrides]
    with explain_errors():
        given = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(overrides)}
        for override in given.values():
            _check_section(override)
            _check_choice(override)
        if "resume" in given and given["resume"].value() is not None:
            return _compose_resumed(overrides, given)
        composed = _compose_by_hydra(add_implied_model(overrides), config_dir, config_name)
        hydra_node = OmegaConf.create({"hydra": OmegaConf.to_container(composed.hydra, resolve=False)})
        return Job(check(composed), overrides, Path(composed.hydra.run.dir), "hydra.run.dir" in given, hydra=hydra_node)


def _choose_set(word: str) -> str:
    """Return evaluation.sets.NAME=CHOICE, with a file of conf/data as the choice, in the form that Hydra has for it."""
    found = re.fullmatch(r"\+*evaluation\.sets\.(\w+)=(\w+)", word)
    if found is None:
        return word
    if not (CONF / "data" / f"{found[2]}.yaml").is_file():
        choices = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
        raise UserError(f"{word}: takes a file of conf/data ({', '.join(choices)}){did_you_mean(found[2], choices)}")
    return f"+data@evaluation.sets.{found[1]}={found[2]}"


def add_implied_model(overrides: list[str]) -> list[str]:
    """Add model=pretrained to the overrides, if they have model.init_from without a model."""
    given = {word.split("=")[0] for word in overrides}
    return ["model=pretrained", *overrides] if "model.init_from" in given and "model" not in given else overrides


def add_search_path(overrides: list[str], *folders: str | Path | None) -> list[str]:
    """Add the override that makes Hydra look for config files in these folders too; None is skipped.

    Raises:
        UserError: a folder does not exist.
    """
    existing = [Path(folder) for folder in folders if folder]
    for folder in existing:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder")
    places = ",".join(f"'file://{folder.absolute()}'" for folder in existing)
    word = f"{SEARCH}[{places}]"
    return [*overrides, word] if places and word not in overrides else overrides


def _check_section(override: Override) -> None:
    """Raise `UserError` for SECTION.KEY of a section that another program has; Hydra would name the section alone."""
    key = override.key_or_group
    section, _, rest = key.partition(".")
    if rest and section not in Config.model_fields and find_key(key):
        raise UserError(unknown_key(key))


def _check_choice(override: Override) -> None:
    """Raise `UserError` if a group gets a value that is not the name of one of its files: `mesh_shape=[[8],[fsdp]]`."""
    group = override.key_or_group
    if not (CONF / group).is_dir() or override.is_delete() or override.is_sweep_override():
        return
    value: Any = override.value()
    if not all(isinstance(choice, str) for choice in (value if isinstance(value, list) else [value])):
        keys = "shapes go to model.mesh_shape" if group == "mesh_shape" else f"its keys are set by {group}.KEY=VALUE"
        choices = ", ".join(sorted(path.stem for path in (CONF / group).glob("*.yaml")))
        raise UserError(f"{override.input_line}: takes a file of conf/{group} ({choices}); {keys}")


def _compose_by_hydra(overrides: list[str], config_dir: str | Path | None = None, name: str = "config") -> DictConfig:
    GlobalHydra.instance().clear()
    if config_dir is not None and not any(word.startswith(SEARCH) for word in overrides):
        overrides = add_search_path(overrides, CONF)
    with hydra.initialize_config_dir(str(Path(config_dir or CONF).absolute()), version_base="1.3"):
        return hydra.compose(name, overrides, return_hydra_config=True)


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
        own = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        values = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    upgrade(values)
    if fresh and values["model"].get("init_from"):
        if run := find_run(str(values["model"]["init_from"])):
            fill_from_run(values, *run)
        else:
            _fill_from_pretrained(values)
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


def build(values: dict[Any, Any]) -> Config:
    """Check plain `values` and return the config; raises `UserError` with a line for each error."""
    return validate(Config, values)


def to_yaml(config: Config) -> str:
    """Format the resolved config as it is saved in the run's folder; `--config-path RUN_DIR` runs it again.

    Two things are left out, since another job may resume from it: which process of the run this was, and
    `loading.allow_changed_data`, which applies to one resume only.
    """
    tree = _drop_identity(config)
    tree["loading"]["allow_changed_data"] = False
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def list_facts(config: Config) -> dict[str, Any]:
    """Return every key, with its value, on which all processes of a run must agree."""
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
    composed = _compose_saved(run_dir, list(given.values()))
    if composed.loading.allow_changed_data and composed.tokenizer.path is None:
        # Without a path a tokenizer would be trained on the changed corpus; the model knows the saved one.
        composed.tokenizer.path = str(run_dir.absolute() / "tokenizer")
    home = saved_home(run_dir) or str(run_dir)
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


def _compose_saved(run_dir: Path, given: list[Override]) -> DictConfig:
    """Compose the saved config of a run with overrides.

    A choice of a group (`optimizer=lion`) replaces that part of the saved config; a key (`training.max_steps=9`)
    changes one value. So the choices are composed first, from conf/, and their parts are put into the saved config;
    then Hydra composes the result with the keys.
    """
    values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    saved = OmegaConf.create(upgrade(values))
    groups = [word for word in given if (CONF / word.key_or_group).is_dir() and isinstance(word.value(), str)]
    sets = [word for word in groups if str(word.package or "").startswith(SETS)]
    groups = [word for word in groups if word not in sets]
    search = [str(word.input_line) for word in given if str(word.input_line).startswith(SEARCH)]
    # A model's file may choose the group `training` too. The default keeps such settings out of the saved config.
    neutral = [] if any(word.key_or_group == "training" for word in groups) else ["training=default"]
    chosen = _compose_by_hydra([str(word.input_line) for word in [*groups, *sets]] + neutral + search)
    for word in sets:
        name = str(word.package).removeprefix(SETS)
        saved.evaluation.sets[name] = chosen.evaluation.sets[name]
    for group in (word.key_or_group for word in groups):
        if group == "experiment":
            raise UserError("resume goes on with the saved config; name the keys to change in place of +experiment")
        mesh_shape = saved.model.mesh_shape  # a choice of the model keeps the mesh
        if group in saved:
            saved[group] = chosen[group]
        saved.model.mesh_shape = chosen.model.mesh_shape if group == "mesh_shape" else mesh_shape
    ConfigStore.instance().store(name="saved_run", node=OmegaConf.to_container(saved))
    keys = [str(word.input_line) for word in given if word not in groups and word not in sets]
    return _compose_by_hydra(keys, name="saved_run")
