"""Overrides of a command line, as users type them and as Hydra composes them with conf/. Imports no jax.

word                        means
group=option                take the file conf/GROUP/OPTION.yaml
section.key=value           change one value
evaluation.sets.NAME=FILE   take the file conf/data/FILE.yaml as one more set, in the form that Hydra has for it
"""

import re
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from tunix.base.errors import UserError, did_you_mean
from tunix.cli.foreign import find_key
from tunix.cli.mistakes import explain_unknown_key
from tunix.cli.saved import read_saved
from tunix.config import Config
from tunix.config.values import CONF

SEARCH = "hydra.searchpath="
SETS = "evaluation.sets."  # begins the package of a set's source


def choose_set(word: str) -> str:
    """Return evaluation.sets.NAME=CHOICE, with a file of conf/data as the choice, in the form that Hydra has for it."""
    match = re.fullmatch(r"\+*evaluation\.sets\.(\w+)=(\w+)", word)
    if match is None:
        return word
    if not (CONF / "data" / f"{match[2]}.yaml").is_file():
        choices = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
        raise UserError(f"{word}: takes a file of conf/data ({', '.join(choices)}){did_you_mean(match[2], choices)}")
    return f"+data@evaluation.sets.{match[1]}={match[2]}"


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


def check_section(override: Override) -> None:
    """Raise `UserError` for SECTION.KEY of a section that another program has; Hydra would name the section alone."""
    key = override.key_or_group
    section, _, rest = key.partition(".")
    if rest and section not in Config.model_fields and find_key(key):
        raise UserError(explain_unknown_key(key))


def check_choice(override: Override) -> None:
    """Raise `UserError` if a group gets a value that is not the name of one of its files: `mesh_shape=[[8],[fsdp]]`."""
    group = override.key_or_group
    if not (CONF / group).is_dir() or override.is_delete() or override.is_sweep_override():
        return
    value: Any = override.value()
    if not all(isinstance(choice, str) for choice in (value if isinstance(value, list) else [value])):
        keys = "shapes go to model.mesh_shape" if group == "mesh_shape" else f"its keys are set by {group}.KEY=VALUE"
        choices = ", ".join(sorted(path.stem for path in (CONF / group).glob("*.yaml")))
        raise UserError(f"{override.input_line}: takes a file of conf/{group} ({choices}); {keys}")


def compose_words(overrides: list[str], config_dir: str | Path | None = None, name: str = "config") -> DictConfig:
    """Compose a file of values, by default conf/config.yaml, with overrides."""
    # Hydra keeps one state for the whole process, and refuses a second composition without this.
    GlobalHydra.instance().clear()
    if config_dir is not None and not any(word.startswith(SEARCH) for word in overrides):
        overrides = add_search_path(overrides, CONF)
    with hydra.initialize_config_dir(str(Path(config_dir or CONF).absolute()), version_base="1.3"):
        return hydra.compose(name, overrides, return_hydra_config=True)


def compose_saved(run_dir: Path, given: list[Override]) -> DictConfig:
    """Compose the saved config of a run with overrides.

    A choice of a group (`optimizer=lion`) replaces that part of the saved config; a key (`training.max_steps=9`)
    changes one value. So the choices are composed first, from conf/, and their parts are put into the saved config;
    then Hydra composes the result with the keys.

        conf/ + choices -> parts of the groups ----+
        RUN_DIR/config.yaml -> brought up to date -+-> + keys -> config
    """
    saved = OmegaConf.create(read_saved(run_dir))
    # Three kinds of words: choices of a group (`groups`), sets of held-out data (`sets`), and keys.
    groups = [word for word in given if (CONF / word.key_or_group).is_dir() and isinstance(word.value(), str)]
    sets = [word for word in groups if str(word.package or "").startswith(SETS)]
    groups = [word for word in groups if word not in sets]
    search = [str(word.input_line) for word in given if str(word.input_line).startswith(SEARCH)]
    # A model's file may choose the group `training` too. The default keeps such settings out of the saved config.
    neutral = [] if any(word.key_or_group == "training" for word in groups) else ["training=default"]
    chosen = compose_words([str(word.input_line) for word in [*groups, *sets]] + neutral + search)
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
    # Hydra composes files only; its store takes a tree of values in the place of one.
    ConfigStore.instance().store(name="saved_run", node=OmegaConf.to_container(saved))
    keys = [str(word.input_line) for word in given if word not in groups and word not in sets]
    return compose_words(keys, name="saved_run")
