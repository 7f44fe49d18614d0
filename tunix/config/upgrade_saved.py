"""Saved configs are read, and brought to today's form by conf/saved/VERSION.yaml. Imports no jax."""

import copy
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from yaml import YAMLError

from tunix.base.config_types import CONF
from tunix.base.errors import UserError, did_you_mean

# By version, the oldest first: its keys that are gone, those with another form, and those that it lacks.
OLD_FORMS = [yaml.safe_load(path.read_text()) for path in sorted((CONF / "saved").glob("*.yaml"))]
GONE: dict[str, str] = {key: hint for old in OLD_FORMS for key, hint in old["gone"].items()}
# Sections that the saved config of every version has.
SECTIONS = (
    "model", "data", "loading", "tokenizer", "task", "training", "optimizer", "scheduler", "checkpoint", "evaluation",
    "logging", "profile", "distributed", "launcher", "plan",
)  # fmt: skip


def read_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder, in today's form.

    Raises:
        UserError: the file cannot be read, or is not the whole config of a run.
    """
    values = load_saved(run_dir)
    if missing := _find_missing_section(values):
        raise _describe_damage(run_dir, f"it has no section {missing}")
    return upgrade(values)


def _find_missing_section(values: dict[Any, Any]) -> str | None:
    return next((name for name in SECTIONS if not isinstance(values.get(name), dict)), None)


def is_run_config(text: str) -> bool:
    """Return whether a text is the saved config of a run: a mapping with all sections."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.create(text))
    except (ValueError, RecursionError, YAMLError):
        return False
    return isinstance(values, dict) and _find_missing_section(values) is None


def load_saved(run_dir: Path) -> dict[Any, Any]:
    """Read the saved config of a run's folder as it is written; raises `UserError` where the file cannot be read."""
    try:
        values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
    except OSError as error:
        raise _describe_damage(run_dir, error.strerror) from None
    except (ValueError, RecursionError, YAMLError):
        raise _describe_damage(run_dir, "it is not YAML") from None
    if not isinstance(values, dict):
        raise _describe_damage(run_dir, "it has no sections")
    return values


def _describe_damage(run_dir: Path, damage: str | None) -> UserError:
    file, copy = run_dir / "config.yaml", run_dir / ".hydra" / "config.yaml"
    hint = f"; cp {copy} {file} restores it" if copy.is_file() else ""
    return UserError(f"{file} is damaged ({damage}){hint}")


def upgrade(values: dict[Any, Any]) -> dict[Any, Any]:
    """Bring the values of a whole config to today's form, in place.

    Raises:
        UserError: a word that was never legal stands where a word was.
    """
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
