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
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from tunix.config import Config, ParameterGroup, Section, UserError

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
        if "resume" in given and (value := given["resume"].value()) is not None:
            project = given["project_name"].value() if "project_name" in given else None
            run_dir, step = _resume_point(str(value), project)
            composed = _compose_saved(run_dir, list(given.values()))
            return Job(checked(composed), overrides, run_dir, run_dir_is_explicit=True, resume_step=step)
        composed = _hydra_compose(overrides, config_dir, config_name)
        hydra_node = OmegaConf.create({"hydra": OmegaConf.to_container(composed.hydra, resolve=False)})
        return Job(
            checked(composed), overrides, Path(composed.hydra.run.dir), "hydra.run.dir" in given, hydra=hydra_node
        )


def _hydra_compose(overrides: list[str], config_dir: str | Path | None = None, name: str = "config") -> DictConfig:
    GlobalHydra.instance().clear()
    search = [] if config_dir is None else [f"hydra.searchpath=[file://{CONF}]"]
    with hydra.initialize_config_dir(str(Path(config_dir or CONF).absolute()), version_base="1.3"):
        return hydra.compose(name, overrides + search, return_hydra_config=True)


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


def _compose_saved(run_dir: Path, given: list[Override]) -> DictConfig:
    """The saved config of a run with overrides; a group choice (`optimizer=lion`) replaces that part of it."""
    saved = OmegaConf.load(run_dir / "config.yaml")
    groups = [o for o in given if (CONF / o.key_or_group).is_dir() and isinstance(o.value(), str)]
    chosen = _hydra_compose([o.input_line for o in groups])
    for group in (o.key_or_group for o in groups):
        if group == "experiment":
            raise UserError("resume goes on with the saved config; name the keys to change in place of +experiment")
        mesh_shape = saved.model.mesh_shape
        if group in saved:
            saved[group] = chosen[group]
        saved.model.mesh_shape = chosen.model.mesh_shape if group == "mesh_shape" else mesh_shape
    ConfigStore.instance().store(name="saved_run", node=OmegaConf.to_container(saved))
    return _hydra_compose([o.input_line for o in given if o not in groups], name="saved_run")


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
        said = [line for line in str(error).splitlines() if line.strip(" ^") and "https://" not in line]
        hint = "values with special characters need quotes within quotes: \"key='<a b>'\""
        raise UserError(f"cannot read {error.override}: {said[-1]}; {hint}") from None
    except MissingMandatoryValue as error:
        key = str(error.full_key)
        description = dict(keys())[key].description
        raise UserError(f"{key} must be given: {description[0].lower()}{description[1:]}") from None
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error.__cause__, "full_key", None)
        first = str(error).splitlines()[0] if str(error) else repr(error.__cause__)
        if key and "not in struct" in str(error.__cause__):
            parent = getattr(error.__cause__, "parent_node", None) or {}
            raise UserError(unknown_key(key, _variants().get(parent.get("name") or parent.get("source")))) from None
        if "No match in the defaults list" in first:
            raise UserError(
                f"{first.split('. ')[0]}; write +{re.findall(chr(39) + '(.*?)' + chr(39), first)[0]}=..."
            ) from None
        raise UserError(first) from None


EXPECTED = {  # in place of pydantic's words
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list like [a,b]",
    "too_short": "give at least one",
}


def _explain(error: dict[str, Any]) -> str:
    """One line for one pydantic error: the key, the value, the way out."""
    path, variant = [str(part) for part in error["loc"]], None
    if len(path) > 1 and (variant := _variants().get(path[1])):  # pydantic names the member of a union in the path
        del path[1]
    key, value, kind = ".".join(path), error["input"], error["type"]
    message = EXPECTED.get(kind, error["msg"].removeprefix("Value error, "))
    if kind == "extra_forbidden":
        return unknown_key(key, variant)
    if kind == "missing":
        return f"{key} is missing"
    if kind in ("literal_error", "union_tag_invalid"):
        context = error["ctx"]
        choices = re.findall(r"'([^']*)'", context.get("expected") or context["expected_tags"])
        if kind == "union_tag_invalid":
            key, value = f"{key}.{context['discriminator'].strip(chr(39))}", context["tag"]
        return f"{key}={value}: expected one of {', '.join(choices)}{did_you_mean(str(value), choices)}"
    if isinstance(value, dict | BaseModel):  # a check across keys: its message names them
        return message
    return f"{key}={value}: {message[0].lower()}{message[1:]}"


def unknown_key(key: str, variant: type[Section] | None = None) -> str:
    """The line for a key that does not exist, with the legal key nearest to it."""
    legal = [name for name, _ in keys()]
    head, _, leaf = key.rpartition(".")
    if variant and key in legal:  # of another member of the union
        tag = next(tag for tag, kind in _variants().items() if kind is variant)
        return f"unknown key {key}: {head}={tag} has none; its keys are {', '.join(variant.model_fields)}"
    if head.startswith("optimizer.groups."):
        legal = [f"{head}.{name}" for name in ParameterGroup.model_fields]
    leaves = {name.rpartition(".")[2]: name for name in legal}
    here = {name.rpartition(".")[2]: name for name in legal if name.rpartition(".")[0] == head}
    whole = {name: name for name in [*legal, *Config.model_fields]}
    guesses = [(leaf, leaves, 1.0), (leaf, here, 0.6), (leaf, leaves, 0.7), *([] if head and here else [(key, whole, 0.6)])]
    for word, choices, cutoff in guesses:
        if near := difflib.get_close_matches(word, choices, n=1, cutoff=cutoff):
            return f"unknown key {key}; did you mean {choices[near[0]]}?"
    return f"unknown key {key}; docs/config.md lists all keys"


def did_you_mean(value: str, choices: list[str]) -> str:
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key as users type it, with its pydantic field; variants of a union one after the other."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        kinds = sections(field.annotation)
        for kind in kinds:
            yield from keys(kind, f"{key}.")
        if not kinds:
            yield key, field


def sections(annotation: Any) -> list[type[Section]]:
    """The section that a field holds, or the members of a union of them; none for a plain value."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else (annotation,)
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _variants() -> dict[str, type[Section]]:
    """The sections that are members of a union (data sources, optimizers), by the value that tells them apart."""
    unions = (sections(field.annotation) for field in Config.model_fields.values())
    members = [kind for kinds in unions if len(kinds) > 1 for kind in kinds]
    tags = [(kind.model_fields.get("source") or kind.model_fields["name"]).annotation for kind in members]
    return {typing.get_args(tag)[0]: kind for tag, kind in zip(tags, members, strict=True)}
