"""Command line to `Config`: Hydra composes conf/ and the overrides, mistakes become one line each. Knows no jax."""

import difflib
import re
import time
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tunix.config import Config, Section, UserError

PACKAGED = Path(__file__).parent / "conf"  # in an installed wheel
CONF = PACKAGED if PACKAGED.is_dir() else Path(__file__).parents[1] / "conf"
OUTPUTS = Path("outputs")


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
        resume = given["resume"].value() if "resume" in given else None
        point = None
        if resume is not None:
            project = given["project_name"].value() if "project_name" in given else None
            point = _resume_point(str(resume), project)
            overrides_of_values = _store_saved(point[0], list(given.values()))
            config_name = "saved_run"
        else:
            overrides_of_values = overrides
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(Path(config_dir or CONF).absolute()), version_base="1.3"):
            search = [] if config_dir is None else [f"hydra.searchpath=[file://{CONF}]"]
            composed = hydra.compose(config_name, overrides_of_values + search, return_hydra_config=True)
        config = checked(composed)
        run_dir = point[0] if point else Path(composed.hydra.run.dir)
        hydra_node = OmegaConf.create({"hydra": OmegaConf.to_container(composed.hydra, resolve=False)})
    return Job(config, overrides, run_dir, "hydra.run.dir" in given, point[1] if point else None, hydra_node)


def job_of(config: Config) -> Job:
    """A config made in Python, with the run folder that Hydra would give it."""
    return Job(config, [], OUTPUTS / config.project_name / time.strftime("%Y-%m-%d/%H-%M-%S"), False)


def checked(composed: DictConfig) -> Config:
    """The typed config of a composed one, every interpolation resolved."""
    with explained():
        ours = OmegaConf.masked_copy(composed, [key for key in composed if key != "hydra"])
        values = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return build(values)


def build(values: dict[Any, Any]) -> Config:
    """Checked config of plain `values`; raises `UserError` with a line for each mistake."""
    try:
        return Config.model_validate(values)
    except ValidationError as errors:
        raise UserError("\n".join(dict.fromkeys(_explain(dict(error)) for error in errors.errors()))) from None


def to_yaml(config: Config) -> str:
    """The resolved config as it is saved in the run's folder; `--config-path RUN_DIR` replays it."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json", by_alias=True)))


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
        raise UserError(f"resume={value}: {path} is no run's folder (it has no config.yaml)")
    return path, step


def _store_saved(run_dir: Path, given: list) -> list[str]:
    """Make the saved config composable as `saved_run`; returns the overrides that remain to be applied to it.

    A group choice (`optimizer=lion`) replaces that part of the saved config.
    """
    saved = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    assert isinstance(saved, dict)
    defaults: list[Any] = ["_self_"]
    values = []
    for override in given:
        group, choice = override.key_or_group, override.value()
        if (CONF / group).is_dir() and isinstance(choice, str):
            defaults.append({group: choice})
            replaced = saved.pop(group, {})
            if "mesh_shape" in replaced:  # the one key that a group of another name sets
                saved[group] = {"mesh_shape": replaced["mesh_shape"]}
        else:
            values.append(override.input_line)
    ConfigStore.instance().store(name="saved_run", node={"defaults": defaults, **saved})
    return values


@contextmanager
def explained() -> Iterator[None]:
    """Turn what Hydra and OmegaConf say of a mistake into one `UserError` line."""
    try:
        yield
    except MissingConfigException as error:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or [])
        if not group:
            raise UserError(f"{error}".splitlines()[0]) from None
        raise UserError(
            f"{group}={choice}: conf/{group} has no such file; choose from {', '.join(options)}{did_you_mean(choice, options)}"
        ) from None
    except OverrideParseException as error:
        raise UserError(f"cannot read {error.override}: {str(error).splitlines()[-2]}") from None
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        description = dict(keys())[key].description
        raise UserError(f"{key} must be given: {description[0].lower()}{description[1:]}") from None
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error.__cause__, "full_key", None)
        first = str(error).splitlines()[0] if str(error) else repr(error.__cause__)
        if key and "not in struct" in str(error.__cause__):
            raise UserError(unknown_key(key)) from None
        if "No match in the defaults list" in first:
            raise UserError(f"{first.split('. ')[0]}; write +{re.findall(chr(39) + '(.*?)' + chr(39), first)[0]}=...") from None
        raise UserError(first) from None


def _explain(error: dict[str, Any]) -> str:
    """One line for one pydantic error: the key, the value, the way out."""
    tags = {tag for kind in _variants() for tag in _literals(kind)}
    path = [str(part) for n, part in enumerate(error["loc"]) if not (n == 1 and part in tags)]
    key, value, message = ".".join(path), error["input"], error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return unknown_key(key)
    if error["type"] == "missing":
        return f"{key} is missing"
    if error["type"] in ("literal_error", "union_tag_invalid"):
        context = error["ctx"]
        choices = re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
        if error["type"] == "union_tag_invalid":
            key, value = f"{key}.{context['discriminator'].strip(chr(39))}", context["tag"]
        return f"{key}={value}: expected one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    if isinstance(value, dict | BaseModel):  # a check across keys: its message names them
        return message
    return f"{key}={value}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str) -> str:
    """The line for a key that does not exist, with the legal key nearest to it."""
    legal = [name for name, _ in keys()]
    leaf = key.rpartition(".")[2]
    near = [name for name in legal if name.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(key, [*legal, *Config.model_fields], n=1, cutoff=0.7)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in legal}
        near = [leaves[found] for found in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "; docs/config.md lists all keys")


def did_you_mean(value: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as users type it, with its pydantic field; variants of a union one after the other."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        sections = _sections(field.annotation)
        for kind in sections:
            yield from keys(kind, f"{key}.")
        if not sections:
            yield key, field


def _sections(annotation: Any) -> list[type[Section]]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _variants() -> list[type[Section]]:
    """The sections that are members of a union (data sources, optimizers)."""
    found = (_sections(field.annotation) for field in Config.model_fields.values())
    return [kind for kinds in found if len(kinds) > 1 for kind in kinds]


def _literals(kind: type[Section]) -> tuple[str, ...]:
    """The value of the field that tells this variant from the others."""
    field = kind.model_fields.get("source") or kind.model_fields["name"]
    return typing.get_args(field.annotation)
