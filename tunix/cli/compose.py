"""Command line to `Config`: Hydra composes conf/ and the overrides, mistakes become one line each. Knows no jax."""

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

from tunix.base.errors import UserError
from tunix.cli.architecture import _fill_from_pretrained
from tunix.cli.mistakes import explained, validated
from tunix.cli.saved import upgrade
from tunix.config import Config, Tokenizer
from tunix.config.values import CONF, flat

IDENTITY = ("coordinator_address", "num_processes", "process_id", "local_device_ids")  # of distributed
OUTPUTS = Path("outputs")
SEARCH = "hydra.searchpath="


@dataclass(frozen=True)
class Job:
    """A checked config and where its run lives."""

    config: Config
    overrides: list[str]  # as typed
    run_dir: Path  # the folder asked for; a fresh run claims it, or a free one beside it
    run_dir_is_explicit: bool
    resume_step: int | None = None  # of resume=RUN_DIR/checkpoints/STEP
    hydra: DictConfig | None = None  # Hydra's own node, kept for the record


def compose(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job:
    """Compose, check and resolve a run; raises `UserError` with a line for each mistake."""
    with explained():
        given = {override.key_or_group: override for override in OverridesParser.create().parse_overrides(overrides)}
        for override in given.values():
            _check_choice(override)
        if "resume" in given and (value := given["resume"].value()) is not None:
            project = str(given["project_name"].value()) if "project_name" in given else None
            run_dir, step = _resume_point(str(value), project)
            composed = _compose_saved(run_dir, list(given.values()))
            if composed.loading.allow_changed_data and composed.tokenizer.path is None:
                composed.tokenizer.path = str(run_dir.absolute() / "tokenizer")  # not one of the changed corpus
            return Job(checked(composed, fresh=False), overrides, run_dir, run_dir_is_explicit=True, resume_step=step)
        composed = _hydra_compose(implied(overrides), config_dir, config_name)
        hydra_node = OmegaConf.create({"hydra": OmegaConf.to_container(composed.hydra, resolve=False)})
        return Job(
            checked(composed), overrides, Path(composed.hydra.run.dir), "hydra.run.dir" in given, hydra=hydra_node
        )


def implied(overrides: list[str]) -> list[str]:
    """The overrides, and the model that `model.init_from` alone stands for."""
    given = {word.split("=")[0] for word in overrides}
    return ["model=pretrained", *overrides] if "model.init_from" in given and "model" not in given else overrides


def searched(overrides: list[str], *folders: str | Path | None) -> list[str]:
    """The overrides, and the folders that groups are looked for in besides; None is no folder."""
    asked = [Path(folder) for folder in folders if folder]
    for folder in asked:
        if not folder.is_dir():
            raise UserError(f"--config-dir {folder}: there is no such folder")
    places = ",".join(f"'file://{folder.absolute()}'" for folder in asked)
    word = f"{SEARCH}[{places}]"
    return [*overrides, word] if places and word not in overrides else overrides


def _check_choice(override: Override) -> None:
    """Raise `UserError` where a part of the config is given in place of the name of one."""
    group = override.key_or_group
    if not (CONF / group).is_dir() or override.is_delete() or override.is_sweep_override():
        return
    value: Any = override.value()
    if not all(isinstance(choice, str) for choice in (value if isinstance(value, list) else [value])):
        keys = "shapes go to model.mesh_shape" if group == "mesh_shape" else f"its keys are set by {group}.KEY=VALUE"
        choices = ", ".join(sorted(path.stem for path in (CONF / group).glob("*.yaml")))
        raise UserError(f"{override.input_line}: takes a file of conf/{group} ({choices}); {keys}")


def _hydra_compose(overrides: list[str], config_dir: str | Path | None = None, name: str = "config") -> DictConfig:
    GlobalHydra.instance().clear()
    if config_dir is not None and not any(word.startswith(SEARCH) for word in overrides):
        overrides = searched(overrides, CONF)
    with hydra.initialize_config_dir(str(Path(config_dir or CONF).absolute()), version_base="1.3"):
        return hydra.compose(name, overrides, return_hydra_config=True)


def check_sweep(overrides: list[str], config_dir: str | Path | None = None, config_name: str = "config") -> Job | None:
    """Compose and check every point of a grid, so that a mistake in the last one is found before the first runs.

    Returns the first point; None where another sweeper chooses them.
    """
    if any(override.startswith("hydra/sweeper") for override in overrides):
        return None
    parsed = OverridesParser.create().parse_overrides(overrides)
    points = BasicSweeper.split_arguments(parsed, max_batch_size=None)[0]
    jobs = [compose(list(point), config_dir, config_name) for point in points]
    if any(job.config.resume for job in jobs):
        raise UserError("resume goes on with one run; it cannot be part of a sweep")
    return jobs[0]


def job_of(config: Config) -> Job:
    """A config made in Python, with the run folder that Hydra would give it."""
    return Job(config, [], OUTPUTS / config.project_name / time.strftime("%Y-%m-%d/%H-%M-%S"), False)


def checked(composed: DictConfig, fresh: bool = True) -> Config:
    """The typed config of a composed one, every interpolation resolved; a saved one (not fresh) is complete."""
    with explained():
        ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
        values = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    upgrade(values)
    if fresh and values["model"].get("init_from"):
        _fill_from_pretrained(values)
    elif values["model"]["family"] is None:
        raise UserError("model=pretrained needs model.init_from=DIR or an ID of the Hugging Face hub")
    if values["model"]["vocab_size"] == "auto":
        values["model"]["vocab_size"] = _rows(values)
    return build(values)


def _rows(values: dict[Any, Any]) -> int:
    """Rows of the embedding table for the tokenizer that the run will have."""
    from tunix.tokenizer import vocabulary  # only where asked for: it takes longer to import than a config to check

    cfg, data = validated(Tokenizer, values["tokenizer"], "tokenizer"), values["data"]
    if cfg.path is None and data["source"] == "tokens":  # prepared, its tokenizer with it
        cfg = cfg.model_copy(update={"path": f"{data['paths'][0]}/tokenizer"})
    trained = cfg.path is None or cfg.train
    return vocabulary.padded(cfg.vocab_size if trained else vocabulary.read(cfg).num_tokens)


def find_run(source: str) -> tuple[Path, int | None] | None:
    """Folder and step (None: the newest) of a run, as `resume` takes them; None where `source` is no run."""
    path = Path(source)
    is_run = source == "latest" or any((folder / "config.yaml").is_file() for folder in (path, *path.parents[1:2]))
    return _resume_point(source, None) if is_run else None


def build(values: dict[Any, Any]) -> Config:
    """Checked config of plain `values`; raises `UserError` with a line for each mistake."""
    return validated(Config, values)


def to_yaml(config: Config) -> str:
    """The resolved config as it is saved in the run's folder; `--config-path RUN_DIR` replays it.

    Which process of which run this was is left out: another job continues from it. So is the leave to go on with
    other data, which is given once.
    """
    tree = _of_all_processes(config)
    tree["loading"]["allow_changed_data"] = False
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def facts(config: Config) -> dict[str, Any]:
    """Every key with its value, as far as processes must agree on it."""
    return {key: value for key, value in flat(_of_all_processes(config)).items() if key != "loading.cache_dir"}


def _of_all_processes(config: Config) -> dict[str, Any]:
    anyone = config.distributed.model_copy(update=dict.fromkeys(IDENTITY))
    return config.model_copy(update={"distributed": anyone}).model_dump(mode="json", by_alias=True)


def _resume_point(value: str, project: str | None) -> tuple[Path, int | None]:
    """Run folder and step (None: the newest) that `resume=value` means."""
    path = Path(value)
    if value == "latest":
        project = project or OmegaConf.load(CONF / "config.yaml").project_name
        path = OUTPUTS / project / "latest"
        if not path.exists():
            raise UserError(f"resume=latest: there is no {path}; project {project} has no run in this folder yet")
        path = path.resolve()
    step = None
    if path.parent.name == "checkpoints" and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    if not (path / "config.yaml").is_file():
        raise UserError(f"resume={value}: {path} is not a run's folder (it has no config.yaml)")
    return path, step


def _compose_saved(run_dir: Path, given: list[Override]) -> DictConfig:
    """The saved config of a run with overrides; a group choice (`optimizer=lion`) replaces that part of it."""
    values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    saved = OmegaConf.create(upgrade(values))
    groups = [o for o in given if (CONF / o.key_or_group).is_dir() and isinstance(o.value(), str)]
    search = [str(o.input_line) for o in given if str(o.input_line).startswith(SEARCH)]
    # Without a choice, the default model would bring settings that the saved one does not train with.
    neutral = [] if any(o.key_or_group == "training" for o in groups) else ["training=default"]
    chosen = _hydra_compose([str(o.input_line) for o in groups] + neutral + search)
    for group in (o.key_or_group for o in groups):
        if group == "experiment":
            raise UserError("resume goes on with the saved config; name the keys to change in place of +experiment")
        mesh_shape = saved.model.mesh_shape
        if group in saved:
            saved[group] = chosen[group]
        saved.model.mesh_shape = chosen.model.mesh_shape if group == "mesh_shape" else mesh_shape
    ConfigStore.instance().store(name="saved_run", node=OmegaConf.to_container(saved))
    return _hydra_compose([str(o.input_line) for o in given if o not in groups], name="saved_run")
